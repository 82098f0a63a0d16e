"""The cost of imports and the exported names; each import in a new interpreter."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import kvview
import kvview.errors

HEAVY = {"torch", "vllm", "hypothesis", "numpy", "pydantic", "msgspec", "zmq"}
ERRORS = sorted(name for name, _ in inspect.getmembers(kvview.errors, inspect.isclass))


def modules_after(*statements: str) -> list[set[str]]:
    """The imported modules after each statement, in one new interpreter."""
    code = "import sys\n" + "".join(f"{one}\nprint(*sys.modules)\n" for one in statements)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == ""
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_import_kvview_is_light() -> None:
    (loaded,) = modules_after("import kvview")
    assert not loaded & HEAVY
    assert not [name for name in loaded if name.startswith(("kvview_reference", "kvview_vllm"))]


def test_parts_import_only_the_libraries_that_they_need() -> None:
    (light,) = modules_after(
        "import kvview_reference.pool, kvview_reference.geometry, kvview_reference.offloading"
    )
    assert not light & {"torch", "vllm", "hypothesis"}
    adapter, engine = modules_after(
        "import kvview_vllm.simulation.engine, kvview_vllm.simulation.scheduler",
        "import kvview_reference.engine, kvview_reference.replay",
    )
    assert not adapter & {"vllm", "kvview_reference"}
    assert not engine & {"vllm", "hypothesis"}


def test_all_is_complete_and_documented() -> None:
    assert set(ERRORS) <= set(kvview.__all__)
    assert len(kvview.__all__) == len(set(kvview.__all__))
    for name in kvview.__all__:
        value = getattr(kvview, name)
        assert inspect.getdoc(value) or not inspect.isclass(value), name


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_also_the_builtin_that_a_caller_expects(name: str) -> None:
    error = getattr(kvview, name)
    assert issubclass(error, kvview.KVViewError)
    if error is not kvview.KVViewError:
        builtins = [base for base in error.__mro__ if base.__module__ == "builtins"]
        assert set(builtins) - {Exception, BaseException, object}, "no builtin but Exception"
