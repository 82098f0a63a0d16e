"""Every printed script fails on the faulty code by itself, and passes on the right one."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvview.targets import is_connector
from kvview.testing import run_checks
from kvview_reference import harness
from tests import mutants
from tests.mutants.mutant import Mutant

pytest.importorskip("torch")

pytestmark = pytest.mark.slow

CONNECTORS = [m for m in mutants.MUTANTS if is_connector(m.factory)]
MUTANTS = [m for m in mutants.MUTANTS if m not in CONNECTORS]
DRAWN = random.Random(9).sample(MUTANTS, 14)
ROOT = Path(__file__).parents[2]
RUNNER = """
import json, os, sys
outcomes = {}
for name, script in json.load(sys.stdin).items():
    try:
        exec(compile(script, name, "exec"), {"__name__": "script"})
        outcomes[name] = None
    except Exception as error:
        outcomes[name] = type(error).__name__
print(json.dumps(outcomes), flush=True)
os._exit(0)  # workers of wrong implementations may never end
"""


def run_scripts(scripts: dict[str, str]) -> dict[str, str | None]:
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        cwd=ROOT,
        input=json.dumps(scripts),
        capture_output=True,
        text=True,
        timeout=300,
    )
    outcomes: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return outcomes


def script_of(mutant: Mutant) -> str:
    if is_connector(mutant.factory):
        broken = mutant.first_failure()
        assert broken is not None, mutant.name
        return broken.script
    report = run_checks(mutant.factory, select=[mutant.law])
    failures = report.failures or run_checks(mutant.factory).failures
    assert failures[0].failure is not None, mutant.name
    return failures[0].failure.script


def on_the_right_one(mutant: Mutant, script: str) -> str | None:
    """The script with what the mutant was made from, where that is a reference harness."""
    factory: Any = mutant.factory
    for base in getattr(factory, "__mro__", ())[1:]:
        if base.__module__ == harness.__name__:
            source = rf"from {base.__module__} import {base.__name__} as \g<1>"
            wrong = rf"from {factory.__module__} import (?:\w+ as )?(\w+)"
            return re.sub(wrong, source, script)
    return None


def test_scripts_fail_on_the_faulty_code_and_pass_on_the_right_one() -> None:
    scripts = {mutant.name: script_of(mutant) for mutant in DRAWN}
    assert [name for name, error in run_scripts(scripts).items() if error is None] == []
    right = {m.name: on_the_right_one(m, scripts[m.name]) for m in DRAWN}
    passed = run_scripts({name: script for name, script in right.items() if script})
    assert [name for name, error in passed.items() if error is not None] == []
    assert len(passed) >= 6


@pytest.mark.parametrize("mutant", [DRAWN[0], CONNECTORS[3]], ids=lambda mutant: mutant.name)
def test_a_script_alone_exits_1(mutant: Mutant, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(script_of(mutant))
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert re.search(r"^(AssertionError|kvview\.\S+_Broken|kvview\.\S+Error): ", done.stderr, re.M)


def test_scripts_of_connectors_fail() -> None:
    scripts = {m.name: script_of(m) for m in random.Random(9).sample(CONNECTORS, 8)[1:]}
    assert set(run_scripts(scripts).values()) == {"AssertionError"}
