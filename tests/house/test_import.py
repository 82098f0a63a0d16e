"""What importing costs, and what is there: each check in a fresh interpreter."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import kvview

HEAVY = {"torch", "vllm", "hypothesis", "numpy", "pydantic", "msgspec", "zmq"}

NAMES = [
    "GPUBlockPoolView",
    "OffloadingEvent",
    "OffloadKey",
    "make_offload_key",
    "get_offload_block_hash",
    "get_offload_group_idx",
    "LookupResult",
    "OffloadingManager",
    "PrepareStoreOutput",
    "GPULoadStoreSpec",
    "CPULoadStoreSpec",
    "TransferWorker",
    "CacheGeometry",
    "UnknownBlockError",
    "BlockNotHeldError",
    "ViewClosedError",
    "NoFreeBlocksError",
    "GeometryError",
    "ConfigError",
    "TraceError",
    "KeyNotLoadableError",
    "EventOrderError",
    "ConnectorError",
    "TransferSpecError",
]
ERRORS = sorted(
    name
    for name, value in inspect.getmembers(kvview, inspect.isclass)
    if issubclass(value, Exception)
)


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == ""
    return set(done.stdout.split())


def test_import_kvview_is_light() -> None:
    loaded = modules_after("import kvview")
    assert not loaded & HEAVY
    assert not [name for name in loaded if name.startswith(("kvview_reference", "kvview_vllm"))]


@pytest.mark.parametrize("module", ["pool", "geometry", "offloading"])
def test_bookkeeping_of_the_reference_needs_no_torch(module: str) -> None:
    assert not modules_after(f"import kvview_reference.{module}") & {"torch", "vllm", "hypothesis"}


@pytest.mark.parametrize("module", ["engine", "connector", "replay"])
def test_the_reference_engine_needs_neither_vllm_nor_hypothesis(module: str) -> None:
    assert not modules_after(f"import kvview_reference.{module}") & {"vllm", "hypothesis"}


@pytest.mark.parametrize("module", ["simulation", "simulation.engine", "simulation.scheduler"])
def test_the_adapter_opens_vllm_and_the_reference_when_it_needs_them(module: str) -> None:
    loaded = modules_after(f"import kvview_vllm.{module}")
    assert not loaded & {"vllm", "kvview_reference"}


@pytest.mark.parametrize("name", NAMES)
def test_name_is_exported(name: str) -> None:
    assert name in kvview.__all__
    assert hasattr(kvview, name)


def test_all_is_complete_and_sorted() -> None:
    assert set(ERRORS) | set(NAMES) <= set(kvview.__all__)
    assert len(kvview.__all__) == len(set(kvview.__all__))
    for name in kvview.__all__:
        assert getattr(kvview, name, None) is not None


@pytest.mark.parametrize("name", ERRORS)
def test_error_is_also_the_builtin_that_a_caller_expects(name: str) -> None:
    error = getattr(kvview, name)
    assert issubclass(error, kvview.KVViewError)
    if error is not kvview.KVViewError:
        builtins = [base for base in error.__mro__ if base.__module__ == "builtins"]
        assert set(builtins) - {Exception, BaseException, object}, "no builtin but Exception"


def test_every_error_of_the_module_is_exported() -> None:
    import kvview.errors

    classes = inspect.getmembers(kvview.errors, inspect.isclass)
    assert [name for name, _ in classes] == ERRORS


def test_the_contract_names_are_documented() -> None:
    for name in NAMES:
        if name != "OffloadKey":  # a NewType has the docstring of typing
            assert inspect.getdoc(getattr(kvview, name)), name
