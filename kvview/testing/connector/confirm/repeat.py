"""The comparison of two runs of a scenario, because a seed only reproduces a deterministic run."""

from __future__ import annotations

from kvview.testing.connector.result import Failure, SimulationResult

EVERY = 10
"""One in this number of seeds is run twice, if the seed is clean, short, and has loads."""


def difference(first: SimulationResult, second: SimulationResult) -> str | None:
    """Return the difference between two runs of one scenario as a line; None if they are equal.

    Messages are not compared, because they may contain memory addresses.
    """
    if _end(first.failure) != _end(second.failure):
        return f"the first run: {_text(first.failure)}; the second: {_text(second.failure)}"
    for one, other in zip(first.timeline, second.timeline, strict=False):
        if one != other:
            return f"from step {one.step} on: {one} in the first run, {other} in the second"
    for name in sorted({*first.coverage, *second.coverage}):
        times = first.coverage.get(name, 0), second.coverage.get(name, 0)
        if times[0] != times[1]:
            return f"{name}: {times[0]} times in the first run, {times[1]} times in the second"
    return None


def _end(failure: Failure | None) -> tuple[str, int] | None:
    return None if failure is None else (failure.law, failure.step)


def _text(failure: Failure | None) -> str:
    return "no law broken" if failure is None else str(failure)
