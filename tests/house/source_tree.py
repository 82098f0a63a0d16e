"""The source tree for the tests of its structure: modules by path, parsed once."""

from __future__ import annotations

import ast
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

NOT_IN_EVERY_LAYER = {
    "kvview.testing": ("geometry", "guard"),  # kvview alone implements them: tests, and no kit
    "kvview_vllm": ("offloading",),  # the manager of the reference runs in vLLM
}
"""The contracts that a layer does not have."""


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
