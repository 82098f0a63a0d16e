"""The modules that are made wrong, and the targets of the kit that execute them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import judges
from .judges import Subject

ROOT = Path(__file__).parents[2]
OWN = ("kvview", "kvview_reference", "kvview_vllm", "examples", "docs", "tests.mutants")
NEVER_WRONG = {
    "kvview.testing": "the kit itself",
    "kvview_reference.engine": "the engine of the kit",
    "kvview_reference.simulation": "the engine of the kit",
    "kvview_reference.harness": "harnesses of the kit",
    "kvview_vllm.simulation": "the engine of the kit",
    "kvview.connector.hook_errors": "the kit itself: texts about hooks that raise",
    **dict.fromkeys(
        ("kvview_vllm.connector.trial_run", "kvview_vllm.connector.trial_half"),
        "checks of vLLM when a connector starts, which edits of vLLM test",
    ),
    "kvview_vllm.metrics": "log lines and metrics for people",
    "kvview_vllm.tier_metrics": "log lines and metrics for people",
    "kvview_vllm.releases": "finds and reads the sources of a release",
    **dict.fromkeys(
        (
            "kvview.cli",
            "kvview.targets",
            "kvview.options",
            "kvview.version",
            "kvview.laws",
            "kvview.urls",
            "kvview.input_files",
            "kvview.__main__",
            "kvview_reference.sizing",
            "kvview_reference.replay",
            "kvview_reference.traces",
            "kvview_reference.tier.command",
            "kvview_reference.tier.throughput",
            "kvview_vllm.doctor",
            "kvview_vllm.inference",
            "kvview_vllm.partition",
            "kvview_vllm.handoff",
        ),
        "part of a command",
    ),
}
"""Modules and packages that are never made wrong, with the reason."""


def path_of(module: str) -> Path:
    """Return the file of a module, without an import of its packages."""
    package, *rest = module.split(".")
    path = folder_of(package).joinpath(*rest)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"there is no package {package}"
    return Path(next(iter(spec.submodule_search_locations or ())))


def modules_of(*packages: str, but: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the modules of packages that may be made wrong.

    Args:
        packages: The packages.
        but: Modules and packages that belong to another area.
    """
    left_out = (*NEVER_WRONG, *but)
    found = []
    for package in packages:
        root = path_of(package).parent
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            if not any(f"{name}.".startswith(f"{one}.") for one in left_out):
                found.append(name)
    return tuple(found)


@dataclass(frozen=True)
class Area:
    """Modules that are made wrong, and the targets of the kit; each area has its own process.

    Args:
        modules: The modules.
        subjects: The targets.
        release: The release of vLLM that they run in; empty if they need none.
        are_wrong: Whether the targets are wrong code that must be refused.
    """

    modules: Sequence[str]
    subjects: Sequence[Subject]
    release: str = ""
    are_wrong: bool = False

    def warm_up(self) -> None:
        """Import slow packages once for all forked processes."""
        if str(ROOT) not in sys.path:
            sys.path.insert(0, str(ROOT))
        slow = ["torch", "numpy", "hypothesis.stateful", "pydantic", "click", "rich.table"]
        if self.release:
            from kvview_vllm.releases.sources import sources

            path = str(sources(self.release))
            sys.path.insert(0, path)
            os.environ["PYTHONPATH"] = os.pathsep.join([path, os.environ.get("PYTHONPATH", "")])
            slow += ["vllm.v1.core.sched.scheduler", "vllm.v1.core.block_pool", "vllm.v1.request"]
        for name in (*slow, "xxhash"):
            importlib.import_module(name)
        sys.modules["torch"].set_num_threads(1)  # a pool of threads does not survive a fork


_TIER = ("kvview.tier", "kvview_reference.tier")
_TIER_MODULES = modules_of(*_TIER)
_ENGINE_MODULES = (
    *modules_of("kvview", "kvview_reference", but=_TIER),
    *("examples.host_cache", "examples.host_memory", "examples.two_levels"),
)
_ADAPTER = modules_of("kvview_vllm")
_NEWEST, _OLD, _OLDEST = "0.33.0", "0.11.2", "0.11.0"  # the last one reports no failed loads
AREAS = {
    "engine": Area(_ENGINE_MODULES, judges.SUBJECTS),
    "tier": Area(_TIER_MODULES, judges.TIER_SUBJECTS),
    "vllm": Area(_ADAPTER, judges.VLLM_SUBJECTS, _NEWEST),
    "old vllm": Area(_ADAPTER, judges.OLD_VLLM_SUBJECTS, _OLD),
    "wrong": Area((*_ENGINE_MODULES, *_TIER_MODULES), judges.WRONG_SUBJECTS, are_wrong=True),
    "wrong in vllm": Area(_ADAPTER, judges.WRONG_VLLM_SUBJECTS, _NEWEST, are_wrong=True),
    "wrong in old vllm": Area(_ADAPTER, judges.WRONG_OLD_VLLM_SUBJECTS, _OLDEST, are_wrong=True),
}
"""Separate areas, because their targets do not execute the modules of another, or run elsewhere.

A mutant is played in the areas in this order. Those with vLLM need the Python of the vLLM lane.
"""
