"""Whether a run gives the same again: without that, a seed replays nothing."""

from __future__ import annotations

from kvview.testing.connector.result import Failure, SimulationResult

EVERY = 10
"""One of so many seeds is run twice, if it is clean, short, and loaded anything."""


def difference(first: SimulationResult, second: SimulationResult) -> str | None:
    """How two runs of one scenario differ, in one line; None when they do not.

    Messages are not compared: they may quote what differs from run to run, as addresses do.
    """
    if _end(first.failure) != _end(second.failure):
        return f"the first run: {_told(first.failure)}; the second: {_told(second.failure)}"
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


def _told(failure: Failure | None) -> str:
    return "no law broken" if failure is None else str(failure)
