"""Injected faults: wrong implementations that show which faults the checks detect."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from kvview.errors import ConfigError
from kvview.testing.effort import Effort
from kvview.testing.harness import Factory
from kvview.testing.recorder import LawBroken
from kvview.testing.runner import PlannedCheck, plan_checks, run_planned


@dataclass(frozen=True)
class Mutant:
    """One wrong implementation.

    Args:
        factory: Factory of the wrong harness.
        law: The law that the implementation breaks.
        what: The fault, in one line.
        incident: The public thread about this fault in a real system, or None.
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
        """Run the kit until a check fails, and return the failure, which is not shrunk.

        The checks of the broken law come first, then the checks of its family.

        A check whose capabilities the harness does not declare is skipped, as for any target.
        """
        effort = Effort(is_brief=True)
        planned = plan_checks(self.factory, effort)[1]
        family = self.law.partition("-")[0]

        def place(one: PlannedCheck) -> tuple[bool, bool]:  # because a family shares one search
            return one.check.law != self.law, not one.check.law.startswith(f"{family}-")

        for one in sorted(planned, key=place):
            failure = run_planned(self.factory, one, effort).failure
            if failure is not None:
                return failure
        return None


@dataclass(frozen=True)
class MutantResult:
    """Whether the kit detected a mutant.

    Args:
        mutant: The mutant.
        killed_by: Law of the first failure; None if every check passed.
    """

    mutant: Mutant
    killed_by: str | None

    @property
    def is_killed(self) -> bool:
        """Whether a check failed."""
        return self.killed_by is not None

    @property
    def is_named(self) -> bool:
        """Whether the first failure names the law that the injected fault breaks."""
        return self.killed_by == self.mutant.law


def run_mutants(
    mutants: Sequence[Mutant], on_result: Callable[[MutantResult], None] | None = None
) -> list[MutantResult]:
    """Run the kit on each mutant until a check fails, with one process for each core.

    If the process of a mutant dies, the mutant counts as a survivor, because no check detected it.
    """
    from kvview.testing.connector.workers import default_processes, workers

    def law_of_first_failure(number: int) -> str | None:
        failure = mutants[number].first_failure()
        return None if failure is None else failure.law

    results = []
    with (
        workers(law_of_first_failure, default_processes()) as processes,
        closing(processes.map(range(len(mutants)))) as answers,
    ):
        for mutant, law in zip(mutants, answers, strict=True):
            results.append(MutantResult(mutant, law if isinstance(law, str) else None))
            if on_result is not None:
                on_result(results[-1])
    return results


def load_mutants(folder: Path | None = None) -> Sequence[Mutant]:
    """Return the injected faults of the source tree: every ``MUTANTS`` under ``tests/mutants``.

    Args:
        folder: Folder of the mutants; by default ``tests/mutants`` of the checkout.

    Raises:
        ConfigError: The mutants are not installed, because wheels do not contain them.
    """
    name = "kvview_injected_faults"
    folder = folder or Path(__file__).parents[2] / "tests" / "mutants"
    if not (folder / "__init__.py").is_file():
        raise ConfigError(
            "the injected faults are in the source tree, but not in the wheel; run the self-test "
            "in a checkout"
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
    mutants: Sequence[Mutant] = sys.modules[name].MUTANTS
    return mutants
