"""Planted faults: wrong implementations that show whether the checks can see."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvview.errors import ConfigError
from kvview.testing.effort import Effort
from kvview.testing.harness import Factory
from kvview.testing.recorder import LawBroken
from kvview.testing.runner import PlannedCheck, plan_checks, run_planned


@dataclass(frozen=True)
class Mutant:
    """One wrong implementation.

    Args:
        factory: Makes the wrong harness.
        law: The law that it breaks.
        what: The fault, in one line.
        incident: The public thread where this happened, or None.
    """

    factory: Factory
    law: str
    what: str
    incident: str | None = None

    @property
    def name(self) -> str:
        """Name of the factory."""
        return getattr(self.factory, "__name__", repr(self.factory))

    def first_failure(self) -> LawBroken | None:
        """Run the kit until a check fails, unshrunk.

        The checks of the fault's law come first, then those of its family.

        A check whose capabilities the harness does not declare is skipped, as for any target.
        """
        effort = Effort(is_brief=True)
        planned = plan_checks(self.factory, effort)[1]
        family = self.law.partition("-")[0]

        def place(one: PlannedCheck) -> tuple[bool, bool]:  # one family shares a search
            return one.check.law != self.law, not one.check.law.startswith(f"{family}-")

        for one in sorted(planned, key=place):
            failure = run_planned(self.factory, one, effort).failure
            if failure is not None:
                return failure
        return None


@dataclass(frozen=True)
class MutantResult:
    """Whether a mutant was seen.

    Args:
        mutant: The mutant.
        broken: The failure that the check reported; None if it passed.
    """

    mutant: Mutant
    broken: LawBroken | None

    @property
    def is_killed(self) -> bool:
        """Whether anything of the kit failed."""
        return self.broken is not None

    @property
    def is_named(self) -> bool:
        """Whether the first failure breaks the law that the fault is about."""
        return self.broken is not None and self.broken.law == self.mutant.law


def run_mutants(
    mutants: Iterable[Mutant], on_result: Callable[[MutantResult], None] | None = None
) -> list[MutantResult]:
    """Run the whole kit on each mutant, until something fails."""
    results = []
    for mutant in mutants:
        results.append(MutantResult(mutant, mutant.first_failure()))
        if on_result is not None:
            on_result(results[-1])
    return results


def load_mutants(folder: Path | None = None) -> Sequence[Mutant]:
    """The planted faults of the source tree: every ``MUTANTS`` under ``tests/mutants``.

    Args:
        folder: Their folder; by default next to the package, in a checkout.

    Raises:
        ConfigError: The mutants are not installed, because wheels do not contain them.
    """
    mutants: Sequence[Mutant] = _load("mutants", "kvview_planted_faults", folder).MUTANTS
    return mutants


def run_automatic_mutants(
    num: int, seed: int = 0, on_progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Play automatic mutants of the reference and the shared code against the whole kit.

    Args:
        num: Number of mutants; those of a smaller number are the first of a larger one.
        seed: Seed of the draw.
        on_progress: Called with the name of each mutant when it is done.

    Returns:
        The part of a report; ``"unexplained"`` lists the survivors without a reason.

    Raises:
        ConfigError: They are not there: wheels do not carry them.
    """
    summarize = _load("mutation", "kvview_automatic_mutants").summarize
    report: dict[str, Any] = summarize(num, seed, on_progress or (lambda name: None))
    return report


def _load(room: str, name: str, folder: Path | None = None) -> Any:
    folder = folder or Path(__file__).parents[2] / "tests" / room
    if not (folder / "__init__.py").is_file():
        raise ConfigError(
            "the planted faults are in the source tree, not in the wheel: run this from a checkout"
        )
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None, "a package always has a spec"
        assert spec.loader is not None, "a package always has a loader"
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
