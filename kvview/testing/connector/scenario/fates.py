"""The fates (delays and outcomes) of the jobs of a run, in the order of their plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from random import Random

from typing_extensions import override

from kvview.testing.connector.scenario.scenario import Fate, Scenario

_MUCH_LATER = 40  # steps until a long run reports a lost job


class Fates(Iterator[Fate]):
    """The fates of a run.

    Each round of a long run has its own order of fates, so that the faults of the rounds differ.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._fates = scenario.fates
        self._ahead = iter(scenario.fates)
        self._is_endless = scenario.rounds > 1 or scenario.first_round > 0
        if self._is_endless:
            self._fates = tuple(map(_reported_later, scenario.fates))

    def begin_round(self, number: int) -> None:
        """Start a round with its own order of fates."""
        if self._is_endless and self._fates:
            self._ahead = cycle(Random(number).sample(self._fates, len(self._fates)))

    @override
    def __next__(self) -> Fate:
        return next(self._ahead)


def _reported_later(fate: Fate) -> Fate:
    if not fate.is_lost:
        return fate
    return replace(fate, is_lost=False, report_after=fate.report_after + _MUCH_LATER)
