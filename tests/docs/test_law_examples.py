"""Every example of the laws page fails with its injected fault, and passes without it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from docs.law_examples import Example, examples, faults
from kvview.laws import laws
from kvview.targets import load_target
from tests.house.test_laws import LAWS_WITHOUT_A_CHECK

EXAMPLES = examples()


def test_every_law_with_an_injected_fault_has_an_example() -> None:
    without = laws().keys() - EXAMPLES.keys()
    assert without == LAWS_WITHOUT_A_CHECK.keys() - {law for law, _ in faults()}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of a fault
@pytest.mark.parametrize("law", [law for law, one in EXAMPLES.items() if one.body])
def test_an_example_fails_with_its_fault_only(
    law: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    example = EXAMPLES[law]
    run(example, load_target(example.right))
    wrong = load_target(f"{example.module}:{example.fault}")
    with pytest.raises((Exception, pytest.fail.Exception)):
        run(example, wrong)


def run(example: Example, subject: object) -> None:
    """Make the calls of an example with the wrong class, or with the right one."""
    names: dict[str, Any] = {"Subject": subject}
    try:
        exec(example.imports + example.body, names)
    finally:
        if worker := names.get("worker"):
            worker.shutdown()
        if store := names.get("store"):
            store.drain(10)
