"""Checks of a long run of equal rounds: the loads of late rounds, and the memory of the halves.

The last rounds of a run are compared with the same rounds of new connectors, which excludes chance
and the pattern of the requests as causes. Memory is measured at the end of rounds.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

import torch

from kvview.connector.halves import SchedulerConnector, WorkerConnector
from kvview.testing.connector.author_code import AuthorCode
from kvview.testing.connector.invariants import InvariantBroken
from kvview.testing.connector.result import Failure, SimulationResult
from kvview.testing.connector.scenario import Scenario

FEWEST_ROUNDS = 24
"""Number of rounds from which on the tier of a run is checked."""
_ROUNDS_WHEN_NEW = 2
_NUM_NEW = 4
_FEWEST_TOKENS = 100  # tokens that must be loaded in the compared rounds
_BYTES_PER_PAGE = 250  # bytes for each page of a tier by which a connector may grow
_BYTES_OF_A_HELD_PAGE = 2_000  # bytes that a connector may keep for a page that its tier holds
_ROUNDS_TO_CONFIRM = 2 * FEWEST_ROUNDS
_A_DAY = 24 * 3600.0
_OF_KVVIEW = ("kvview.guard", "kvview.testing", "kvview.tier.answers")  # the last expires
_NOT_KEPT = (type, ModuleType, torch.Tensor)


def when_new(scenario: Scenario) -> list[Scenario]:
    """The last rounds of a long run, in pairs, each pair for a new connector."""
    end = scenario.first_round + scenario.rounds
    starts = range(end - _NUM_NEW * _ROUNDS_WHEN_NEW, end, _ROUNDS_WHEN_NEW)
    return [replace(scenario, first_round=first, rounds=_ROUNDS_WHEN_NEW) for first in starts]


def is_comparable(loads_when_new: Sequence[int]) -> bool:
    """Whether a new connector loads enough for a comparison."""
    return sum(loads_when_new) >= _FEWEST_TOKENS


def check_conserved(loads_of_rounds: Sequence[int], loads_when_new: Sequence[int]) -> None:
    """Require that a tier after many rounds loads at least half as much as a new tier.

    Args:
        loads_of_rounds: Number of tokens that requests were to load, by round.
        loads_when_new: The same numbers for new connectors, in the last of these rounds.

    Raises:
        InvariantBroken: CONN-10 is broken; the message has both numbers.
    """
    late, new = sum(loads_of_rounds[-len(loads_when_new) :]), sum(loads_when_new)
    if is_comparable(loads_when_new) and 2 * late < new:
        raise InvariantBroken(
            "CONN-10",
            f"the last {len(loads_when_new)} of {len(loads_of_rounds)} rounds loaded {late} "
            f"tokens, but new connectors load {new} in the same rounds, so the connector's own "
            f"tier loses pages. Check the code that frees pages after a failed store or load, an "
            f"abort, a reset, a second store of a key, a promise that is not loaded, and an "
            f"eviction",
        )


class Memory:
    """Measures the memory of the halves at the end of each third of a long run.

    In the last third of a run that confirms growth, allocations are traced.

    Args:
        connector_class: The connector.
        rounds: Rounds of the run.
    """

    def __init__(self, connector_class: type, rounds: int) -> None:
        self.sizes: list[int] = []
        """Bytes beyond those that the pages of the tier may take."""
        self.allocated_at = ""
        """The author's line that allocated most of the memory in the last third."""
        self._connector_class = connector_class
        self._rounds = rounds
        self._traces = False

    def end_round(
        self, place: int, halves: Iterable[SchedulerConnector | WorkerConnector], num_held: int
    ) -> None:
        """Measure the memory at the end of a round that ends a third.

        Args:
            place: Number of the round, from 0.
            halves: All halves.
            num_held: Maximum of pages that the tiers hold, because some of them may be filling.
        """
        if self._rounds < FEWEST_ROUNDS or (place + 1) % (self._rounds // 3):
            return
        self.sizes.append(_kept_bytes(halves) - _BYTES_OF_A_HELD_PAGE * num_held)
        if len(self.sizes) == 2 and self._rounds >= _ROUNDS_TO_CONFIRM:
            self._traces = not tracemalloc.is_tracing()
            tracemalloc.start()
        elif len(self.sizes) == 3 and self._traces:
            self.allocated_at = _line_of_allocations(self._connector_class)

    def close(self) -> None:
        """End the tracing of allocations."""
        if self._traces:
            tracemalloc.stop()


def grows(sizes: Sequence[int], num_pages: int) -> bool:
    """Whether memory grew in the second and in the last third of a run, by about the same amount.

    Args:
        sizes: Bytes at the end of each third, without those of pages that the tier holds.
        num_pages: Pages of the tier.
    """
    if len(sizes) < 3:  # because the halves of a raw connector are not measured
        return False
    before, after = sizes[1] - sizes[0], sizes[2] - sizes[1]
    # A dictionary grows in leaps, because it doubles its table.
    is_steady = before <= 4 * after and after <= 4 * before
    return before + after >= _BYTES_PER_PAGE * num_pages and is_steady


def longer(scenario: Scenario) -> Scenario:
    """Make a run in which bounded memory does not grow.

    It reuses prompts, because a history of keys may be long before it is full. Days pass between
    two hooks, because entries may have a time to live. Requests and jobs are new.
    """
    again = _ROUNDS_TO_CONFIRM // 6
    return replace(scenario, rounds=_ROUNDS_TO_CONFIRM, rounds_until_reuse=again, clock_jump=_A_DAY)


def check_memory(sizes: Sequence[int], scenario: Scenario, allocated_at: str) -> None:
    """Require that the memory of the halves is bounded.

    Args:
        sizes: Bytes at the end of each third of the run.
        scenario: The run.
        allocated_at: The line that allocated most of the growth, or empty.

    Raises:
        InvariantBroken: CONN-10 is broken; the message has the growth.
    """
    if grows(sizes, scenario.cpu_blocks):
        growth = (sizes[-1] - sizes[-2]) // (scenario.rounds // 3)
        at = f", most of it allocated at {allocated_at}" if allocated_at else ""
        raise InvariantBroken(
            "CONN-10",
            f"the halves keep {growth} bytes more with each of {scenario.rounds} equal rounds{at}; "
            f"delete the entries of requests, jobs and keys when these end",
            hint="Remove the entries of a request or a job when it ends, and bound every table.",
        )


def _loads_when_new(
    scenario: Scenario, play: Callable[[Scenario], SimulationResult]
) -> Sequence[int]:
    return [tokens for new in when_new(scenario) for tokens in play(new).loads_of_rounds]


def _kept_bytes(halves: Iterable[SchedulerConnector | WorkerConnector]) -> int:
    """Count the bytes of the objects to which the halves refer, without views and tensors."""
    found: dict[int, Any] = {}
    ahead: list[Any] = list(halves)
    while ahead:
        one = ahead.pop()
        if id(one) in found or isinstance(one, _NOT_KEPT):
            continue
        if type(one).__module__.startswith(_OF_KVVIEW):
            continue
        found[id(one)] = one
        ahead += _parts(one)
    return sum(sys.getsizeof(one, 0) for one in found.values())


def _parts(one: Any) -> list[Any]:
    if isinstance(one, FunctionType):  # not its globals
        return gc.get_referents(*(one.__closure__ or ()))
    return gc.get_referents(one)


def _line_of_allocations(connector_class: type) -> str:
    """The author's line that allocated most of the traced memory; empty without such a line."""
    modules = (sys.modules.get(one.__module__) for one in connector_class.__mro__)
    files = {file for module in modules if (file := getattr(module, "__file__", None))}
    files.update(AuthorCode(connector_class).paths)
    snapshot = tracemalloc.take_snapshot()
    own = snapshot.filter_traces([tracemalloc.Filter(True, file) for file in sorted(files)])
    most = own.statistics("lineno")[:1]
    return f"{most[0].traceback[0].filename}:{most[0].traceback[0].lineno}" if most else ""


def failure_at_the_end(
    result: SimulationResult, law: str, message: str, hint: str | None = None
) -> Failure:
    """A failure found after the end of a run."""
    steps, events = result.coverage.get("steps", 0), len(result.scenario.events)
    return Failure(law, message, steps, events, hint=hint)


def with_rounds_compared(
    result: SimulationResult, play: Callable[[Scenario], SimulationResult]
) -> SimulationResult:
    """Play a run, and compare the rounds of a long run."""
    rounds = result.scenario.rounds
    is_whole = len(result.loads_of_rounds) == rounds and not result.scenario.ends_abruptly
    if result.failure or rounds < FEWEST_ROUNDS or not is_whole:
        return result
    try:
        coverage = _compare_rounds(result, play)
    except InvariantBroken as broken:
        failure = failure_at_the_end(result, broken.law, broken.message, broken.hint)
        return replace(result, failure=failure)
    return replace(result, coverage={**result.coverage, **coverage})


def _compare_rounds(
    result: SimulationResult, play: Callable[[Scenario], SimulationResult]
) -> Mapping[str, int]:
    """Compare the rounds of a long run with each other, and with those of a new connector.

    Args:
        result: The long run.
        play: Plays a scenario with a new connector.

    Returns:
        The coverage of the comparison.

    Raises:
        InvariantBroken: CONN-10 is broken.
    """
    scenario = result.scenario
    loads = _loads_when_new(scenario, play)
    try:
        check_conserved(result.loads_of_rounds, loads)
    except InvariantBroken:  # perhaps by chance, because a store that was slow may be paused
        check_conserved(play(scenario).loads_of_rounds, _loads_when_new(scenario, play))
    if grows(result.kept_bytes, scenario.cpu_blocks):
        confirmed = play(longer(scenario))
        check_memory(confirmed.kept_bytes, confirmed.scenario, confirmed.allocated_at)
    return {"steady runs to compare": int(is_comparable(loads))}
