"""The reduction of a failing scenario to a smaller scenario that breaks the same law.

Delta debugging removes events. After that, the reduction tries simpler fates, requests and sizes.
Both steps are repeated until no part can be removed, or the budget of runs is used up.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import MISSING, fields, replace
from typing import TypeVar

from kvview import CacheGeometry
from kvview.testing.connector.result import SimulationResult
from kvview.testing.connector.run.long_runs import FEWEST_ROUNDS
from kvview.testing.connector.scenario.scenario import Add, Event, Fate, Scenario, Step

_Item = TypeVar("_Item", Event, Fate, Scenario)

PlayAll = Callable[[Iterable[Scenario]], Generator[tuple[Scenario, SimulationResult], None, None]]
"""Plays scenarios, some of them in advance, and yields each with its result, in order."""

MAX_RUNS = 400
"""Default number of scenarios that are tried."""
_STEPS_THAT_COUNT = 50  # count as one more run, so that long runs are shrunk in time


class Shrinker:
    """Finds the smallest run that breaks the same law as a failing run.

    Args:
        result: A run that failed.
        play_all: Plays scenarios.
        max_runs: Maximum number of scenarios to try; a long scenario counts as several.
    """

    def __init__(self, result: SimulationResult, play_all: PlayAll, max_runs: int) -> None:
        assert result.failure is not None, "only what fails is shrunk"
        self.best = result
        self.runs_left = max_runs
        self._law = result.failure.law
        self._play_all = play_all

    def shrink(self) -> None:
        """Shrink :attr:`best` until no part can be removed or all runs are used up."""
        failure = self.best.failure
        assert failure is not None, "the best run fails"
        rounds = self._scenario.rounds
        fewest = FEWEST_ROUNDS if failure.law == "CONN-10" else 1  # fewer rounds are not compared
        while rounds // 2 >= fewest and self._takes(replace(self._scenario, rounds=rounds // 2)):
            rounds //= 2
        if rounds >= FEWEST_ROUNDS:  # each run costs seconds, so little else is tried
            self._drop_events()
            self._takes(replace(self._scenario, fates=()))
            return
        self._takes(replace(self._scenario, events=self._scenario.events[: failure.num_events]))
        self._takes(replace(self._scenario, fates=()))
        self._takes(replace(self._scenario, num_connectors=1))
        before = None
        while self.runs_left > 0 and self._scenario != before:
            before = self._scenario
            self._drop_events()
            self._take_all(simpler_geometries)
            self._take_all(_simpler_fates)
            self._take_all(_simpler_events)
            self._take_all(simpler_sizes)

    @property
    def _scenario(self) -> Scenario:
        return self.best.scenario

    def _takes(self, scenario: Scenario) -> bool:
        return self._take_first([scenario]) is not None

    def _take_first(self, scenarios: Iterable[Scenario]) -> int | None:
        """Take the first candidate that still fails; returns its index, or None."""
        if self.runs_left <= 0:
            return None
        others = (scenario for scenario in scenarios if scenario != self._scenario)
        with closing(self._play_all(others)) as results:
            for place, (asked, result) in enumerate(results):
                self.runs_left -= 1 + result.coverage.get("steps", 0) // _STEPS_THAT_COUNT
                if self._is_smaller(asked, result):
                    self.best = result
                    return place
                if self.runs_left <= 0:
                    break
        return None

    def _is_smaller(self, asked: Scenario, result: SimulationResult) -> bool:
        if result.failure is None or result.failure.law != self._law:
            return False
        before, after = self._scenario, result.scenario
        is_other = asked.geometry != before.geometry
        # Other results mean that the engine cannot play the simpler scenario.
        return after != before and not (is_other and after.geometry == before.geometry)

    def _drop_events(self) -> None:
        size = max(1, len(self._scenario.events) // 2)
        while size:
            start = 0
            while (place := self._take_first(_without(self._scenario, start, size))) is not None:
                start += place * size
            size //= 2

    def _take_all(self, candidates: Callable[[Scenario], Iterator[Scenario]]) -> None:
        """Take the first candidate that still fails, and make new candidates, until none fails."""
        while self._take_first(candidates(self._scenario)) is not None:
            pass


def _without(scenario: Scenario, start: int, size: int) -> Iterator[Scenario]:
    """Yield scenarios without ``size`` consecutive events, for each position of these events."""
    events = scenario.events
    for at in range(start, len(events), size):
        yield replace(scenario, events=events[:at] + events[at + size :])


def simpler_geometries(scenario: Scenario) -> Iterator[Scenario]:
    """Yield the same run with fewer KV-cache groups."""
    geometry = scenario.geometry
    single = CacheGeometry.single(4)
    if geometry != single:
        yield replace(scenario, geometry=single, group_pages=(), ranks=())
    for index in range(len(geometry.groups)):
        groups = geometry.groups[:index] + geometry.groups[index + 1 :]
        if groups:
            pages = scenario.group_pages[:index] + scenario.group_pages[index + 1 :]
            pages = pages if all(map(any, zip(*pages, strict=True))) else ()
            smaller = replace(geometry, groups=groups)
            ranks = scenario.ranks if pages else ()
            yield replace(scenario, geometry=smaller, group_pages=pages, ranks=ranks)


def _plainer(item: _Item) -> Iterator[_Item]:
    """Yield the item several times, each time with one of its fields set to the default."""
    for field in fields(item):
        if field.default is not MISSING and getattr(item, field.name) != field.default:
            yield replace(item, **{field.name: field.default})


def _simpler_fates(scenario: Scenario) -> Iterator[Scenario]:
    fates, usual = scenario.fates, Fate()
    if fates and fates[-1] == usual:
        yield replace(scenario, fates=fates[:-1])
    if len(fates) > 1:
        yield replace(scenario, fates=fates[: len(fates) // 2])
    for index, fate in enumerate(fates):
        for other in (usual, *_plainer(fate)):
            if other != fate:
                yield replace(scenario, fates=(*fates[:index], other, *fates[index + 1 :]))


def _simpler_events(scenario: Scenario) -> Iterator[Scenario]:
    size = scenario.geometry.scheduler_block_size
    for index, event in enumerate(scenario.events):
        others: list[Event] = [*_plainer(event)]
        if isinstance(event, Add):
            lengths = [n * size + 1 for n in (1, 2, 3) if n * size + 1 < event.num_prompt_tokens]
            others += [replace(event, num_prompt_tokens=length) for length in lengths]
            others += [replace(event, family=1)] if event.family > 1 else []
        elif isinstance(event, Step) and event.count > 2:
            others.append(Step(event.count - 1))
        for other in others:
            events = (*scenario.events[:index], other, *scenario.events[index + 1 :])
            yield replace(scenario, events=events)


def simpler_sizes(scenario: Scenario) -> Iterator[Scenario]:
    """Yield the same run several times, each time with one of its sizes set to the default."""
    for plainer in _plainer(scenario):
        # The pages describe the tensors that the ranks share.
        if plainer.fates == scenario.fates and (plainer.group_pages or not plainer.ranks):
            yield plainer
    for num_gpu_blocks in (scenario.num_gpu_blocks // 2, scenario.num_gpu_blocks - 1):
        if num_gpu_blocks > 2:
            yield replace(scenario, num_gpu_blocks=num_gpu_blocks)
