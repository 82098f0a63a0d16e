"""Checks of a long run of equal rounds: the loads of late rounds, and the memory of the halves.

The last rounds of a run are compared with the same rounds of new connectors, so that neither chance
nor the pattern of the requests can cause a difference. Memory is measured at the end of rounds.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import pairwise
from types import FunctionType, ModuleType
from typing import Any

import torch

from kvview.connector import SchedulerConnector, WorkerConnector
from kvview.testing.connector.exercised.coverage import IN_REAL_TIME
from kvview.testing.connector.judge.invariants import InvariantBroken
from kvview.testing.connector.result import SimulationResult, failure_at_the_end
from kvview.testing.connector.scenario.scenario import (
    Abort,
    AbortLoading,
    Add,
    HoldBlocks,
    Reset,
    Scenario,
    Step,
)

FEWEST_ROUNDS = 24
"""Minimum number of rounds of a run whose tier is checked."""
_ROUNDS_WHEN_NEW, _NUM_NEW = 2, 4
_FEWEST_TOKENS = 100  # tokens that must be loaded in the compared rounds
_BYTES_PER_PAGE = 250  # bytes for each page of a tier by which a connector may grow
_BYTES_OF_AN_ENTRY = 64  # bytes of an entry of a dictionary or a set, without key and value
_BYTES_OF_A_HELD_PAGE = 2_000  # bytes that a connector may keep for a page that its tier holds
_ROUNDS_TO_CONFIRM = 2 * FEWEST_ROUNDS
_WINDOWS = 6  # of a long run; tiers and pools of connections fill in the first two
_LEAST_SHARE = 1 / 32  # of the growth, that each of the other windows has
_MANY_BLOCKS = 1_250  # of both prompts in each round of many keys: 120,000 keys in all
_BYTES_PER_KEY = 16
_A_DAY = 24 * 3600.0
_OF_KVVIEW = (
    "kvview.guard",
    "kvview.testing",
    "kvview.tier.answers",
)  # entries of the last one expire
_NOT_KEPT = (type, ModuleType, torch.Tensor)


def when_new(scenario: Scenario) -> list[Scenario]:
    """Return the last rounds of a long run as scenarios of two rounds, each for a new connector."""
    end = scenario.first_round + scenario.rounds
    starts = range(end - _NUM_NEW * _ROUNDS_WHEN_NEW, end, _ROUNDS_WHEN_NEW)
    return [replace(scenario, first_round=first, rounds=_ROUNDS_WHEN_NEW) for first in starts]


def is_comparable(loads_when_new: Sequence[int]) -> bool:
    """Whether a new connector loads enough for a comparison."""
    return sum(loads_when_new) >= _FEWEST_TOKENS


def check_conserved(
    scenario: Scenario, loads_of_rounds: Sequence[int], loads_when_new: Sequence[int]
) -> None:
    """Require that after many rounds a tier loads at least half as much as a new tier.

    Args:
        scenario: The run.
        loads_of_rounds: Number of tokens that requests were to load, by round.
        loads_when_new: The same number for new connectors, in each of the last of these rounds.

    Raises:
        InvariantBroken: CONN-10 is broken; the message has both numbers.
    """
    late, new = sum(loads_of_rounds[-len(loads_when_new) :]), sum(loads_when_new)
    if is_comparable(loads_when_new) and 2 * late < new:
        raise InvariantBroken(
            "CONN-10",
            f"the last {len(loads_when_new)} of {len(loads_of_rounds)} rounds loaded {late} "
            f"tokens, but new connectors load {new} in the same rounds, so the connector's own "
            f"tier loses pages. Check the code that frees pages after {_ends_of_pages(scenario)}",
        )


def _ends_of_pages(scenario: Scenario) -> str:
    """List the events of a run after which a connector frees pages; other events are no cause."""
    kinds = {type(event) for event in scenario.events}
    has_failures = any(fate.outcome != "ok" for fate in scenario.fates)
    ends = [
        *["a failed store or load"] * has_failures,
        *["an abort"] * (not kinds.isdisjoint({Abort, AbortLoading})),
        *["a reset"] * (Reset in kinds),
        "a second store of a key",
        "a promise that is not loaded",
    ]
    return f"{', '.join(ends)}, and an eviction"


class KeptObjects:
    """Measures the objects of the halves at the end of each round of a long run.

    Args:
        rounds: Rounds of the run.
        confirms: Whether the run only confirms growth.
    """

    def __init__(self, rounds: int, *, confirms: bool = False) -> None:
        self.sizes: list[int] = []
        """Least bytes in each window of rounds, beyond those that pages of the tier may take."""
        self.requests: list[int] = []
        """Least number of ids of ended requests in each window of rounds."""
        self._rounds = rounds
        self._confirms = confirms

    def end_round(
        self,
        place: int,
        halves: Iterable[SchedulerConnector | WorkerConnector],
        num_held: int,
        ended: Set[str],
    ) -> None:
        """Measure the objects at the end of a round.

        Args:
            place: Number of the round, from 0.
            halves: All halves.
            num_held: Maximum number of pages that the tiers hold, because a tier may not be full
                yet.
            ended: Ids of the requests that have ended.
        """
        if self._rounds < FEWEST_ROUNDS:
            return
        kept = _kept_objects(halves)
        size = sum(map(_bytes_of, kept)) - _BYTES_OF_A_HELD_PAGE * num_held
        num_requests = sum(isinstance(one, str) and one in ended for one in kept)
        window = place * _WINDOWS // self._rounds
        for found, number in ((self.sizes, size), (self.requests, num_requests)):
            if window == len(found):
                found.append(number)
            found[window] = min(number, found[window])  # unfinished jobs also take memory

    @property
    def refutes(self) -> bool:
        """Whether a run that only confirms growth has a window without growth, and may end."""
        growths = (_differences(found[1:-1]) for found in (self.sizes, self.requests))
        return self._confirms and all(map(_has_a_pause, growths))


def grows(sizes: Sequence[int], num_pages: int) -> bool:
    """Whether memory grew in each window of a run after the first two.

    A pool of connections that is not full yet also grows, but not in each window.

    Args:
        sizes: Minimum number of bytes in each window, without the bytes of pages that the tier
            holds.
        num_pages: Pages of the tier.
    """
    growth = _growth_of_windows(sizes)
    return sum(growth) >= _BYTES_PER_PAGE * num_pages > 0 and not _has_a_pause(growth)


def _has_a_pause(growth: Sequence[int]) -> bool:
    """Whether memory hardly grew in one of these windows."""
    return min(growth, default=1) < max(1, _LEAST_SHARE * sum(growth))


def _growth_of_windows(sizes: Sequence[int]) -> list[int]:
    """Return the growth in each window after the first two; none if the run was not measured."""
    is_whole = len(sizes) == _WINDOWS  # the halves of a raw connector are not measured
    return _differences(sizes[1:]) if is_whole else []


def _differences(numbers: Sequence[int]) -> list[int]:
    return [after - before for before, after in pairwise(numbers)]


def confirms(scenario: Scenario) -> bool:
    """Whether a run is long enough to confirm growth, and reuses prompts for this purpose."""
    return scenario.rounds_until_reuse < scenario.rounds >= _ROUNDS_TO_CONFIRM


def longer(scenario: Scenario) -> Scenario:
    """Make a longer run, in which the memory of a connector with bounded tables does not grow.

    The run reuses prompts, because a bounded history of keys may take long to fill. Days of
    simulated time pass between two hooks, because entries may expire. Requests and jobs are new in
    each round.
    """
    again = _ROUNDS_TO_CONFIRM // 6
    return replace(scenario, rounds=_ROUNDS_TO_CONFIRM, rounds_until_reuse=again, clock_jump=_A_DAY)


def with_many_keys(scenario: Scenario) -> Scenario:
    """Make a run with so many new keys that a bounded history of keys is full in its last third.

    Each round has two long prompts, whose blocks are computed in one step. The first prompt is
    loaded again, and dropped by a reset, so that also a tier without a limit drops its keys (up to
    vLLM 0.12 no reset reaches connectors, so such a tier grows). The next round replaces the blocks
    of the second prompt.
    """
    size = scenario.geometry.scheduler_block_size
    length = size * _MANY_BLOCKS + 1
    blocks = sum(-(-length // group.block_size) + 1 for group in scenario.geometry.groups)
    num_gpu_blocks = 2 * blocks  # so that blocks are free and can be held
    first, again, second = (
        (Add(name, family, length, num_shared_blocks=0), Step(8))
        for name, family in (("first", 0), ("again", 0), ("second", 1))
    )
    evicted = HoldBlocks(num_gpu_blocks), HoldBlocks(0)
    return replace(
        scenario,
        num_gpu_blocks=num_gpu_blocks,
        cpu_blocks=blocks,
        events=(*first, *evicted, *again, Reset(), *evicted, *second),
        fates=(),
        max_tokens_per_step=length,
        rounds=_ROUNDS_TO_CONFIRM,
        rounds_until_reuse=_ROUNDS_TO_CONFIRM - 1,
        pin_budget=None,
    )


def with_many_requests(scenario: Scenario) -> Scenario:
    """Make a run with so many requests that a bounded history of requests is full in it."""
    return replace(longer(scenario), rounds=4 * _ROUNDS_TO_CONFIRM)


def grows_with_keys(sizes: Sequence[int]) -> bool:
    """Whether memory grew with the keys of each window after the first two."""
    num_keys = _MANY_BLOCKS * _ROUNDS_TO_CONFIRM // _WINDOWS
    return min(_growth_of_windows(sizes), default=0) >= _BYTES_PER_KEY * num_keys


def _growth(run: SimulationResult, rounds: str) -> InvariantBroken:
    growth = sum(_growth_of_windows(run.kept_bytes)) * _WINDOWS // (_WINDOWS - 2)
    return InvariantBroken(
        "CONN-10",
        f"the halves keep {growth // _ROUNDS_TO_CONFIRM} bytes more with each of "
        f"{_ROUNDS_TO_CONFIRM} {rounds}; delete the entries of requests, jobs and keys when these "
        f"end",
        hint="Remove the entries of a request or a job when it ends, and bound every table.",
    )


def _kept_objects(halves: Iterable[SchedulerConnector | WorkerConnector]) -> Collection[Any]:
    """Find the objects to which the halves refer, without views and tensors."""
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
    return found.values()


def _bytes_of(one: object) -> int:
    # The table of a dictionary doubles, so its size does not show a growth by a few entries.
    # A subclass of an author may count differently.
    if isinstance(one, dict):
        return _BYTES_OF_AN_ENTRY * dict.__len__(one)
    if isinstance(one, set):
        return _BYTES_OF_AN_ENTRY * set.__len__(one)
    return sys.getsizeof(one, 0)


def _parts(one: Any) -> list[Any]:
    if isinstance(one, FunctionType):  # not its globals
        return gc.get_referents(*(one.__closure__ or ()))
    if isinstance(one, dict):  # whose keys are not named by the collector if all are strings
        return [*dict.keys(one), *dict.values(one)]
    return gc.get_referents(one)


def with_rounds_compared(
    result: SimulationResult, play: Callable[[Scenario], SimulationResult]
) -> SimulationResult:
    """Run a scenario, and compare the rounds of a long run."""
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
    """Compare the rounds of a long run with each other, and with rounds of a new connector.

    Args:
        result: The long run.
        play: Runs a scenario with a new connector.

    Returns:
        The coverage of the comparison.

    Raises:
        InvariantBroken: CONN-10 is broken.
    """
    scenario = result.scenario

    def loads_when_new(run: Scenario) -> Sequence[int]:
        return [tokens for new in when_new(run) for tokens in play(new).loads_of_rounds]

    try:
        check_conserved(scenario, result.loads_of_rounds, loads := loads_when_new(scenario))
    except InvariantBroken:  # perhaps by chance: a bad choice of evictions, or a store that paused
        if result.coverage.get(IN_REAL_TIME):  # or loads that pile up, because steps take no time
            return {"left out: the room of a tier whose loads take real time (CONN-10)": 1}
        other = replace(scenario, first_round=scenario.first_round + scenario.rounds)
        check_conserved(other, play(other).loads_of_rounds, loads := loads_when_new(other))
    if grows(result.kept_bytes, scenario.cpu_blocks):
        _confirm_growth(scenario, play)
    if sum(_growth_of_windows(result.kept_requests)) > 0:
        _confirm_requests(scenario, play)
    return {"steady runs to compare": int(is_comparable(loads))}


def _confirm_growth(scenario: Scenario, play: Callable[[Scenario], SimulationResult]) -> None:
    """Require that memory does not grow in longer runs."""
    confirmed = play(longer(scenario))
    if grows(confirmed.kept_bytes, scenario.cpu_blocks):
        raise _growth(confirmed, "equal rounds")
    confirmed = play(with_many_keys(scenario))
    if confirmed.coverage.get("resets of connectors") and grows_with_keys(confirmed.kept_bytes):
        raise _growth(confirmed, f"rounds of {2 * _MANY_BLOCKS} new keys each")


def _confirm_requests(scenario: Scenario, play: Callable[[Scenario], SimulationResult]) -> None:
    """Require that the halves do not keep more and more ids of ended requests."""
    run = with_many_requests(scenario)
    growth = _growth_of_windows(play(run).kept_requests)
    if growth and not _has_a_pause(growth):
        raise InvariantBroken(
            "CONN-10",
            f"the halves keep ids of requests that have ended, {sum(growth)} more in "
            f"{len(growth) * run.rounds // _WINDOWS} equal rounds; delete the entries of a request "
            f"when it ends, also when it is aborted",
            hint="Remove the entries of a request when it ends, and bound every table.",
        )
