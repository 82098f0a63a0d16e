"""The layers: the same contracts in each, imports in one direction, modules of limited size."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.house.source_tree import FLOORS, ROOMS, ROOT, files_of_tests, module_names, modules

# The modules of kvview; each may import only those before it.
CONTRACT_ORDER = (
    "urls",
    "laws",
    "errors",
    "input_files",
    "version",
    "keys",
    "prefix_search",
    "geometry",
    "events",
    "transfer",
    "offloading",
    "pool",
    "connector",
    "handoff",
    "guard",
    "tier",
    "options",
    "targets",
    "store_connector",
    "bridge",
    "config",
    "cli",
)

# The modules that may import a heavy package at their own import.
ALLOWED_AT_IMPORT = {
    "torch": (
        "kvview.store_connector.cuda_copies",
        "kvview.store_connector.cuda_copy_kernel",
        "kvview.store_connector.cuda_rows",
        "kvview.testing.connector",
        "kvview_reference.transfer",
        "kvview_reference.connector",
        "kvview_reference.handoff",
        "kvview_vllm.transfer",
        "kvview_vllm.simulation.raw",
        "kvview_lmcache.l2_adapter_store",
        "kvview_sglang",
    ),
    "numpy": (
        "kvview.store_connector.cuda_copies",
        "kvview.store_connector.cuda_copy_kernel",
        "kvview.store_connector.cuda_rows",
        "kvview.testing.connector.kv_bytes",
        "kvview_reference.transfer",
    ),
    "triton": ("kvview.store_connector.cuda_copy_kernel",),
    "vllm": (  # vLLM itself imports these, by --scheduler-cls and by the name of a connector
        "kvview_vllm.scheduler",
        "kvview_vllm.connector.connector",
        "kvview_vllm.connector.messages",
    ),
    "hypothesis": ("kvview.testing",),
    "pytest": ("kvview.testing.parametrize",),
    "coverage": ("kvview.testing.connector.code_coverage",),
    "lmcache": ("kvview_lmcache",),
    "sglang": ("kvview_sglang",),
    "pydantic": (
        "kvview.bridge",
        "kvview.store_connector",
        "kvview.options",
        "kvview.testing.schema",
        "kvview_reference",
        "kvview_vllm",
    ),
    "pydantic_core": ("kvview_reference",),
    "click": ("kvview.cli", "*.command"),
    "rich": ("*.command", "kvview.cli.console", "kvview.testing.terminal"),
    "typing_extensions": ("kvview", "kvview_reference", "kvview_vllm"),
    "msgspec": (
        "kvview.events.batches",
        "kvview.events.recording",
        "kvview.events.wire",
        "kvview_reference.handoff",
    ),
    "zmq": ("kvview.events.channel", "kvview.events.link", "kvview_reference.handoff"),
    "xxhash": (),
    "obstore": (),
    "transformers": (),
    "tokenizers": (),
}
# The modules that may import it later, inside a function, because only some callers need it.
ALLOWED_LATER = {
    **dict.fromkeys(("hypothesis", "pytest"), (*FLOORS,)),
    "torch": ("kvview.store_connector", "kvview.testing", "kvview_reference", "kvview_vllm"),
    "numpy": ("kvview.testing", "kvview_reference", "kvview_vllm"),
    "vllm": ("kvview_vllm",),
    **dict.fromkeys(("transformers", "tokenizers"), ("kvview_vllm.inference",)),
    "xxhash": ("kvview.tier.checksum",),
    "obstore": ("kvview_reference.tier.object_store",),
}

NAMES_ABOVE = {
    # Defaults of the user's settings `manager` and `worker`, which are targets.
    "adapters/kvview_vllm/offloading_spec.py": {"kvview_reference"},
    # Real engines get the reference's wire as a target in their settings.
    "adapters/kvview_vllm/handoff/cases.py": {"kvview_reference"},
    # The trial of a tier uses the bridge of the named engine, if it is installed.
    "adapters/kvview_vllm/doctor/diagnosis.py": {"kvview_lmcache", "kvview_sglang"},
    # Frames of these packages are not the connector's.
    "kvview/connector/hook_errors.py": {"kvview_reference", "kvview_vllm"},
}
"""Modules that may name a higher layer in a string, and why."""

MAX_LINES = 700
MAX_CONTRACT_LINES = 300
LONG_CONTRACT_MODULES = {
    # Behaviour, not protocols: the ledger and its checks.
    "kvview/guard/ledger.py": 500,
    "kvview/guard/view.py": 500,
    "kvview/tier/guarded.py": 470,
}


def _is_in(name: str, places: tuple[str, ...]) -> bool:
    return any(
        name.endswith(place[1:]) if place.startswith("*") else f"{name}.".startswith(f"{place}.")
        for place in places
    )


def _floor(name: str) -> str:
    return "kvview.testing" if _is_in(name, ("kvview.testing",)) else name.partition(".")[0]


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("floor", ["kvview", "kvview.testing", "kvview_reference", "kvview_vllm"])
def test_every_contract_has_a_module_in_every_layer(floor: str, room: str) -> None:
    name = f"{floor}.{room}"
    assert name in module_names()


@pytest.mark.parametrize("room", ROOMS)
def test_every_contract_has_its_tests_and_its_planted_faults(room: str) -> None:
    tests = files_of_tests("test_*.py")
    assert [path for path in tests if path.startswith(f"tests/{room}/")]
    assert [*(ROOT / "tests/mutants").glob(f"{room}.py"), *(ROOT / "tests/mutants").glob(room)]


def test_contract_modules_import_only_those_before_them() -> None:
    wrong = []
    for module in modules():
        room = module.name.split(".")[1] if "." in module.name else None
        if _floor(module.name) != "kvview" or room in (None, "__main__"):
            continue
        assert room in CONTRACT_ORDER, f"{module.path}: a new room needs its place in the order"
        for name, line, _ in module.imports():
            if name == "kvview":
                wrong.append(f"{module.path}:{line} imports the package that imports it")
            elif _floor(name) == "kvview":
                other = name.split(".")[1]
                if CONTRACT_ORDER.index(other) > CONTRACT_ORDER.index(room):
                    wrong.append(f"{module.path}:{line} imports {name}, which is below {room}")
    assert not wrong, "\n".join(wrong)


ADAPTERS = ("kvview_vllm", "kvview_lmcache", "kvview_sglang")
FORBIDDEN = {
    "kvview": ("kvview.testing", "kvview_reference", *ADAPTERS),
    "kvview.testing": ("kvview_reference", *ADAPTERS),
    "kvview_reference": ADAPTERS,
    **{
        adapter: ("kvview_reference", *(other for other in ADAPTERS if other != adapter))
        for adapter in ADAPTERS
    },
}


def test_no_layer_imports_a_higher_one() -> None:
    wrong = [
        f"{module.path}:{line} imports {name}"
        for module in modules()
        for name, line, _ in module.imports()
        if _is_in(name, FORBIDDEN[_floor(module.name)])
    ]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other_in_a_cycle() -> None:
    # Imports inside functions and for types count too, because a reader needs both modules.
    imported = {
        module.name: {name for name, _, _ in module.imports() if name in module_names()}
        for module in modules()
    }
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        pytest.fail(" is imported by ".join(error.args[1]))


def test_no_layer_names_a_higher_one_in_a_string() -> None:
    # Engines and commands of other layers are found among the entry points.
    wrong = []
    for module in modules():
        above = {name.partition(".")[0] for name in FORBIDDEN[_floor(module.name)]} - {"kvview"}
        # Docstrings may name any module; they are expressions.
        prose = {id(n.value) for n in ast.walk(module.tree) if isinstance(n, ast.Expr)}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = above & set(node.value.replace(".", " ").replace(":", " ").split())
                named -= NAMES_ABOVE.get(module.path, set())
                if named and id(node) not in prose:
                    wrong.append(f"{module.path}:{node.lineno} names {', '.join(named)}")
    assert not wrong, "\n".join(wrong)


def test_only_commands_import_the_command_line() -> None:
    wrong = [
        f"{module.path}:{line}"
        for module in modules()
        for name, line, _ in module.imports()
        if _is_in(name, ("kvview.cli",))
        and not _is_in(module.name, ("kvview.cli", "kvview.__main__", "*.command"))
    ]
    assert not wrong, "\n".join(wrong)


def test_heavy_packages_are_imported_only_where_they_are_needed() -> None:
    wrong = []
    for module in modules():
        for name, line, at_import in module.imports():
            package = name.partition(".")[0]
            if package not in ALLOWED_AT_IMPORT:
                continue
            places = ALLOWED_AT_IMPORT[package]
            if not at_import:
                places = (*places, *ALLOWED_LATER.get(package, ()))
            if not _is_in(module.name, places):
                wrong.append(f"{module.path}:{line} imports {package}")
    assert not wrong, "\n".join(wrong)


def test_every_package_imported_is_a_known_one() -> None:
    import sys

    known = {*sys.stdlib_module_names, *FLOORS, *ALLOWED_AT_IMPORT}
    wrong = [
        f"{module.path}:{line} imports {name}"
        for module in modules()
        for name, line, _ in module.imports()
        if name.partition(".")[0] not in known
    ]
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


def test_no_module_is_called_utils() -> None:
    vague = {"utils", "util", "helpers", "common", "misc"}
    assert not [module.path for module in modules() if vague & set(module.name.split("."))]
