"""The execution of a scenario's events, round after round."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from kvview import ConfigError
from kvview.testing.connector.run.state import RunState
from kvview.testing.connector.scenario.scenario import (
    Abort,
    AbortLoading,
    Add,
    Event,
    HoldBlocks,
    Reset,
    Scenario,
    SecondHash,
    Step,
)

_FAMILIES_PER_ROUND = 1000


class EventPlayer:
    """Plays events on a stage.

    A request has a new id in each round, except within a round if the scenario reuses its id and
    ``unique_ids`` is False.

    Args:
        stage: The engine and its connectors.
        scenario: The run.
        unique_ids: Whether a reused request id is replaced by another id.
    """

    def __init__(self, stage: RunState, scenario: Scenario, *, unique_ids: bool) -> None:
        self._stage = stage
        self._scenario = scenario
        self._unique_ids = unique_ids
        self.num_begun = 0
        """Largest number of events that were started in one round."""
        self.ids: set[str] = set()
        """Ids of all requests in the engine, so far."""
        self._is_first_round = False
        self._first_family = 0
        self._num_renamed = 0
        self._names: dict[str, str] = {}  # from request ids of the scenario to ids in the engine
        self._names_of_round: set[str] = set()

    def begin_round(self, number: int) -> None:
        """Start a round with its own prompts."""
        self._is_first_round = number == self._scenario.first_round
        families = number % self._scenario.rounds_until_reuse
        self._first_family = families * _FAMILIES_PER_ROUND
        # With a reused id a connector finds its old entries, which hides that it kept them, so ids
        # are reused in every second round only.
        if number % 2 == 0:
            self._names_of_round.clear()

    def play(self, number: int, event: Event) -> None:
        """Play an event; ``number`` counts from 1."""
        stage = self._stage
        self.num_begun = max(self.num_begun, number)
        match event:
            case Add():
                self._add(event, number)
            case Abort(request_id):
                stage.abort(self._names.get(request_id, request_id))
            case AbortLoading():
                unfinished = stage.engine.unfinished()
                if loading := next((r for r, s in unfinished.items() if s == "loading"), None):
                    stage.abort(loading)
            case Step(count):
                for _ in range(count):
                    stage.step()
            case HoldBlocks(num_blocks):
                stage.engine.squeeze(num_blocks)
            case SecondHash():
                stage.coverage["second hashes"] += stage.engine.alias()
            case Reset(after_reports):
                stage.reset(after_reports=after_reports)

    def _add(self, add: Add, serial: int) -> None:
        """Queue a request; its generated tokens are the same in each round."""
        engine, coverage = self._stage.engine, self._stage.coverage
        name = self._names.get(add.request_id)
        unfinished = engine.unfinished()
        if name in unfinished:
            return
        if add.continues is not None:
            before = self._names.get(add.continues)
            if before is None or before in unfinished:
                return
            add = replace(add, continues=before)
        is_reused = name in self._names_of_round
        if name is None or not is_reused or self._unique_ids:
            self._num_renamed += 1
            is_first = name is None and self._is_first_round
            name = add.request_id if is_first else f"{add.request_id}.{self._num_renamed}"
        self._names[add.request_id] = name
        self._names_of_round.add(name)
        self.ids.add(name)
        with suppress(ConfigError):  # no engine queues a request that can never fit
            family = self._first_family + add.family
            engine.add(replace(add, request_id=name, family=family), serial)
            coverage["ids again"] += is_reused
            coverage["next turns"] += add.continues is not None
