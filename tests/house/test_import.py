"""The cost of imports and the exported names; each import in a new interpreter."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvview
import kvview.errors
from tests.cases import read_cases

ERRORS = sorted(name for name, _ in inspect.getmembers(kvview.errors, inspect.isclass))
COMMAND = """
from kvview.cli import main
sys.argv = {!r}.split()
try:
    main()
except SystemExit as end:
    assert end.code == 0
"""


@pytest.mark.parametrize(
    ("_", "statement", "packages"), read_cases(Path(__file__).with_name("light.txt"))
)
def test_a_package_that_is_not_needed_is_not_imported(
    _: str, statement: str, packages: str, tmp_path: Path
) -> None:
    body = COMMAND.format(statement) if statement.startswith("kvview ") else statement
    paths = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{body}\nprint(); print(*sys.modules)"],
        cwd=tmp_path,
        env=os.environ | paths,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    loaded = done.stdout.splitlines()[-1].split()
    assert "kvview.errors" in loaded
    assert not {*packages.split()} & {*loaded}


def test_every_error_is_exported_and_every_exported_class_is_documented() -> None:
    assert vars(kvview).keys() >= {*ERRORS}
    for name, value in inspect.getmembers(kvview, inspect.isclass):
        assert inspect.getdoc(value), name


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_also_the_builtin_that_a_caller_expects(name: str) -> None:
    error = getattr(kvview, name)
    assert issubclass(error, kvview.KVViewError)
    if error is not kvview.KVViewError:
        builtins = [base for base in error.__mro__ if base.__module__ == "builtins"]
        assert set(builtins) - {Exception, BaseException, object}, "no builtin but Exception"
