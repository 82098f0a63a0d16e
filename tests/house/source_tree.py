"""The source tree for the tests of its structure: modules by path, parsed once."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLOORS = {
    "kvview": ROOT / "kvview",
    "kvview_reference": ROOT / "reference/kvview_reference",
    "kvview_vllm": ROOT / "adapters/kvview_vllm",
    "kvview_lmcache": ROOT / "adapters/kvview_lmcache",
    "kvview_sglang": ROOT / "adapters/kvview_sglang",
}
"""The installed packages. ``kvview.testing`` is a separate layer inside the first."""

ROOMS = (
    *("pool", "geometry", "events", "offloading", "transfer"),
    *("connector", "handoff", "guard", "tier"),
)
"""The contracts: each has a module or package of its name in every layer."""


@dataclass(frozen=True)
class Module:
    """One source file.

    Args:
        name: As it is imported, ``kvview.pool.view`` for example.
        path: Relative to the root of the repository.
    """

    name: str
    path: str

    @property
    def tree(self) -> ast.Module:
        return parse(self.path)

    @property
    def package(self) -> str:
        """The package of relative imports."""
        return self.name if self.path.endswith("__init__.py") else self.name.rpartition(".")[0]

    def imports(self) -> Sequence[tuple[str, int, bool]]:
        """Its imports as ``(module, line, whether at its own import)``."""
        return imports_of(self)

    def _imports(self) -> Iterator[tuple[str, int, bool]]:
        for node, is_late in _with_lateness(self.tree, False):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, node.lineno, not is_late
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parts = self.package.split(".")
                    base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [base])])
                for alias in node.names:
                    longer = f"{base}.{alias.name}"
                    yield (longer if longer in module_names() else base), node.lineno, not is_late


def _with_lateness(node: ast.AST, is_late: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        late = is_late or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        late = late or (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING")
        yield child, late
        yield from _with_lateness(child, late)


@cache
def imports_of(module: Module) -> Sequence[tuple[str, int, bool]]:
    return tuple(module._imports())


@cache
def parse(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


@cache
def modules() -> tuple[Module, ...]:
    """All modules of the installed packages."""
    found = []
    for package, folder in FLOORS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            name = ".".join(parts).removesuffix(".__init__")
            found.append(Module(name, path.relative_to(ROOT).as_posix()))
    return tuple(found)


@cache
def module_names() -> frozenset[str]:
    return frozenset(module.name for module in modules())


def files_of_tests(pattern: str = "*.py") -> list[str]:
    """Paths of the tests, relative to the root."""
    return sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "tests").rglob(pattern))
