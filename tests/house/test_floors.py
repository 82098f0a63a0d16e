"""The layers: the same contracts in each, no cycles, modules of limited size.

The direction of imports is checked by ruff and import-linter (``pyproject.toml``).
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from graphlib import CycleError, TopologicalSorter

import grimp
import pytest

from tests.house.source_tree import (
    FLOORS,
    NOT_IN_EVERY_LAYER,
    ROOMS,
    ROOT,
    files_of_tests,
    module_names,
    modules,
)

ADAPTERS = ("kvview_vllm", "kvview_lmcache", "kvview_sglang")
ABOVE = {
    "kvview": {"kvview_reference", *ADAPTERS},
    "kvview_reference": {*ADAPTERS},
    **{name: {"kvview_reference", *ADAPTERS} - {name} for name in ADAPTERS},
}
_RUFF = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["ruff"]["lint"]
HEAVY = _RUFF["flake8-tidy-imports"]["banned-module-level-imports"]

NAMES_ABOVE = {
    # Real engines get the reference's wire as a target in their settings.
    "adapters/kvview_vllm/handoff/cases.py": {"kvview_reference"},
    # The trial of a tier uses the bridge of the named engine, if it is installed.
    "adapters/kvview_vllm/doctor/diagnosis.py": {"kvview_lmcache", "kvview_sglang"},
    # Frames of these packages are not the connector's.
    "kvview/connector/hook_errors.py": {"kvview_reference", "kvview_vllm"},
}
"""Modules that may name a higher layer in a string, and why."""

MAX_FILES = 9
FULLER_FOLDERS = {
    # Its modules are the public import paths of the contract, and import-linter orders each.
    "kvview": 14,
}
"""Folders with more modules, and why; ``__init__`` does not count."""

MAX_LINES = 700
MAX_CONTRACT_LINES = 300
LONG_CONTRACT_MODULES = {
    # Behaviour, not protocols: the ledger and its checks.
    "kvview/guard/ledger.py": 500,
    "kvview/guard/view.py": 500,
    "kvview/tier/guard/guarded.py": 470,
}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """The imports of all modules, also those inside functions and for types."""
    return grimp.build_graph(*FLOORS, include_external_packages=True, cache_dir=None)


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("floor", ["kvview", "kvview.testing", "kvview_reference", "kvview_vllm"])
def test_every_contract_has_a_module_in_every_layer(floor: str, room: str) -> None:
    is_there = room not in NOT_IN_EVERY_LAYER.get(floor, ())
    assert (f"{floor}.{room}" in module_names()) == is_there


@pytest.mark.parametrize("room", ROOMS)
def test_every_contract_has_its_tests_and_its_planted_faults(room: str) -> None:
    tests = files_of_tests("test_*.py")
    assert [path for path in tests if path.startswith(f"tests/{room}/")]
    assert [*(ROOT / "tests/mutants").glob(f"{room}.py"), *(ROOT / "tests/mutants").glob(room)]


def test_no_modules_import_each_other_in_a_cycle(graph: grimp.ImportGraph) -> None:
    imported = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        pytest.fail(" is imported by ".join(error.args[1]))


def test_every_package_imported_is_a_known_one(graph: grimp.ImportGraph) -> None:
    packages = {name for name in graph.modules if "." not in name}
    assert packages <= {*sys.stdlib_module_names, *FLOORS, *HEAVY, "typing_extensions"}


def test_no_layer_names_a_higher_one_in_a_string() -> None:
    # Engines and commands of other layers are found among the entry points.
    wrong = []
    for module in modules():
        above = ABOVE[module.name.partition(".")[0]] - NAMES_ABOVE.get(module.path, set())
        text = (ROOT / module.path).read_text("utf-8")
        if not any(name in text for name in above):
            continue  # most modules: a walk takes longer
        # Docstrings may name any module; they are expressions.
        prose = {id(n.value) for n in ast.walk(module.tree) if isinstance(n, ast.Expr)}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = above & set(node.value.replace(".", " ").replace(":", " ").split())
                if named and id(node) not in prose:
                    wrong.append(f"{module.path}:{node.lineno} names {', '.join(named)}")
    assert not wrong, "\n".join(wrong)


def test_no_module_is_too_long() -> None:
    paths = [module.path for module in modules()] + files_of_tests()
    paths += [
        path.relative_to(ROOT).as_posix()
        for folder in ("benchmarks", "examples", "docs")
        for path in (ROOT / folder).rglob("*.py")
    ]
    long = []
    for path in paths:
        lines = len((ROOT / path).read_text(encoding="utf-8").splitlines())
        limit = MAX_LINES
        if path.startswith("kvview/") and not path.startswith("kvview/testing/"):
            limit = LONG_CONTRACT_MODULES.get(path, MAX_CONTRACT_LINES)
        if lines > limit:
            long.append(f"{path}: {lines} lines, at most {limit}")
    assert not long, "\n".join(long)


def test_no_folder_has_too_many_modules() -> None:
    folders = Counter(
        module.path.rpartition("/")[0]
        for module in modules()
        if not module.path.endswith("/__init__.py")
        and not module.path.startswith("kvview/testing/")
    )
    allowed = {folder: FULLER_FOLDERS.get(folder, MAX_FILES) for folder in folders}
    assert {folder: n for folder, n in folders.items() if n > allowed[folder]} == {}


def test_no_module_is_called_utils() -> None:
    vague = {"utils", "util", "helpers", "common", "misc"}
    assert not [module.path for module in modules() if vague & set(module.name.split("."))]
