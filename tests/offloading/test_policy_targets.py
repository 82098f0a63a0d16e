"""Cache policies of third parties: given by target, checked inside the reference's manager."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvview import LookupResult, make_offload_key
from kvview.targets import load_target
from kvview.testing import Effort, LawBroken, Outcome, run_checks
from kvview.testing.offloading.policy import suite_of_policy
from kvview.testing.suites.conformance import find_failures
from kvview_reference.offloading import CPUOffloadingManager

PAGE = Path(__file__).parents[2] / "docs" / "replay.md"
KEYS = [make_offload_key(bytes([number]), 0) for number in range(9)]


@pytest.fixture
def source() -> str:
    """The policy of the page."""
    found = re.search(r"<!-- policy -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_policy_of_the_page_satisfies_every_law(source: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(source)
    target = f"{tmp_path / 'mine.py'}:FirstInFirstOut"
    report = run_checks(load_target(target), seeds=15)
    assert report.contract == "offloading"
    assert report.is_clean, report.failures
    assert report.counts[Outcome.PASSED] >= 14
    manager = CPUOffloadingManager(4, target)
    for keys in (KEYS[:4], KEYS[4:6]):
        output = manager.prepare_store(keys)
        assert output is not None
        manager.complete_store(keys)
        manager.touch(KEYS[:2])
    held = [key for key in KEYS if manager.lookup(key) is LookupResult.HIT]
    assert held == [KEYS[0], KEYS[1], KEYS[4], KEYS[5]]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("if key not in busy", ""),
        ("self.order.pop(key, None)", "pass"),
        ("[:num_victims]", "[:num_victims + 1]"),
        ("            del self.order[key]\n", "            pass\n"),
    ],
)
def test_wrong_policies_are_caught(right: str, wrong: str, source: str, tmp_path: Path) -> None:
    assert right in source
    (tmp_path / "wrong.py").write_text(source.replace(right, wrong))
    suite: Any = suite_of_policy(load_target(f"{tmp_path / 'wrong.py'}:FirstInFirstOut"))
    assert find_failures(suite, Effort(seeds=20, is_brief=True))


def test_a_script_makes_the_suite_of_the_policy_again(source: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(source.replace("self.order.pop(key, None)", "pass"))
    suite: Any = suite_of_policy(load_target(f"{tmp_path / 'wrong.py'}:FirstInFirstOut"))
    (failure, *_) = find_failures(suite, Effort(seeds=20)).values()
    with pytest.raises(LawBroken):
        exec(failure.script, {"__name__": "script"})
