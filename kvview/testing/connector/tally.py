"""The results of many seeds of a connector, added up, on one machine or over the shards of several.

A shard is every n-th seed of a check, in the order in which the seeds run, so that the seeds that
detect the most faults are divided among all shards.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvview.errors import ConfigError
from kvview.targets import has_store
from kvview.testing.connector.exercised.author_code import AuthorCode
from kvview.testing.connector.exercised.coverage import (
    failed_by_themselves,
    is_headline,
    notes_on,
)
from kvview.testing.connector.exercised.lines import Lines
from kvview.testing.connector.result import ConnectorFailure, ConnectorRuns
from kvview.testing.connector.scenario.seed_order import in_order
from kvview.testing.results.law_broken import Gap

if TYPE_CHECKING:
    from kvview.testing.results.schema import RunsModel, ShardModel


class Tally:
    """The results of seeds: failures, coverage, and the author's code that ran.

    Args:
        connector_class: The connector.
        options: Its options.
        code: The author's code.
    """

    def __init__(self, connector_class: type, options: Mapping[str, Any], code: AuthorCode) -> None:
        self._connector_class = connector_class
        self._options = options
        self.code = code
        self.num_seeds = 0
        self.failures: list[ConnectorFailure] = []
        self.coverage: Counter[str] = Counter()
        self.notes: list[str] = []
        self.of_chance: list[str] = []
        """One note for each seed whose two runs differed."""
        self.first_error = ""
        """The exception behind the first job that failed without an injected failure."""
        self.laws: Collection[str] | None = None
        """The laws that a run can break; None for all laws of connectors."""

    def runs(
        self,
        engine: str,
        first_seed: int,
        seconds: float,
        is_interrupted: bool,
        steps: int | None,
        num_asked: int,
        shard: tuple[int, int] = (1, 1),
    ) -> ConnectorRuns:
        """Make the results.

        Args:
            engine: Name of the engine.
            first_seed: The first seed.
            seconds: Duration.
            is_interrupted: Whether an interrupt ended the check before the last seed.
            steps: Requested minimum of steps in a run.
            num_asked: Number of seeds that were requested.
            shard: Number of the shard, from 1, and number of shards.
        """
        gaps = self._gaps()
        return ConnectorRuns(
            engine,
            first_seed,
            self.num_seeds,
            self.failures,
            seconds,
            dict(self.coverage),
            is_interrupted,
            steps,
            [*self.notes, *self._more_notes(gaps)],
            num_asked,
            gaps,
            self.code.num_statements,
            self.code.unrun,
            None if shard == (1, 1) else self._shard(*shard),
            self.laws,
        )

    def _shard(self, number: int, of: int) -> ShardModel:
        from kvview.testing.results.schema import FailedSeedModel, ShardModel

        return ShardModel(
            number=number,
            of=of,
            options=dict(self._options),
            failures=[FailedSeedModel.model_validate(one) for one in self.failures],
            notes=self.notes,
            lines={os.path.relpath(path): sorted(ran) for path, ran in self.code.ran.items()},
            of_chance=self.of_chance,
            first_error=self.first_error,
            laws=None if self.laws is None else [*self.laws],
        )

    def add_shard(self, runs: RunsModel) -> None:
        """Add the results of a shard."""
        shard = runs.shard
        assert shard is not None, "the report is one of a shard"
        self.num_seeds += runs.num_seeds
        self.coverage.update(runs.coverage)
        self.code.add({os.path.abspath(path): ran for path, ran in shard.lines.items()})
        self.failures += [ConnectorFailure(**dict(one)) for one in shard.failures]
        self.notes += shard.notes
        self.of_chance += shard.of_chance
        self.first_error = self.first_error or shard.first_error
        self.laws = shard.laws

    def _gaps(self) -> list[Gap]:
        """List the missing parts of the check that the coverage does not count; causes first."""
        failed = [one for one in self._failed() if is_headline(one, self.coverage)]
        return [*failed, *self.code.gaps(self.num_seeds)]

    def _failed(self) -> Iterator[Gap]:
        limits_store = "store_blocks" in self._options and not self._options.get("weights")
        may_evict = has_store(self._connector_class) and not limits_store
        return failed_by_themselves(self.coverage, self.first_error, may_evict=may_evict)

    def _more_notes(self, gaps: Sequence[Gap]) -> Iterator[str]:
        for failed in self._failed():
            if self.failures or not is_headline(failed, self.coverage):
                yield failed.what
        others = len(self.of_chance) - 1
        more = f" ({others} more seeds are not deterministic)" if others > 0 else ""
        yield from (note + more for note in self.of_chance[:1])
        if not self.failures:
            yield from self.code.notes(gaps)
        yield from notes_on(self.coverage)


def merge_shards(connector_class: type, shards: Sequence[RunsModel], lines: Lines) -> ConnectorRuns:
    """Add up the runs of all shards of a check.

    Args:
        connector_class: The connector.
        shards: The runs of each shard, in any order.
        lines: Lines of the author's files that other checks have run.

    Raises:
        ConfigError: The runs are not all shards of one check.
    """
    options = _options_of_all(shards)
    first, *_ = shards
    tally = Tally(connector_class, options, AuthorCode(connector_class))
    tally.code.add(lines)
    for runs in shards:
        tally.add_shard(runs)
    num_asked = sum(runs.num_asked for runs in shards)
    places = {seed: place for place, seed in enumerate(in_order(first.first_seed, num_asked))}
    tally.failures.sort(key=lambda failure: places[failure.seed])
    seconds = max(runs.seconds for runs in shards)
    is_interrupted = any(runs.is_interrupted for runs in shards)
    return tally.runs(
        first.engine, first.first_seed, seconds, is_interrupted, first.steps, num_asked
    )


def _options_of_all(shards: Sequence[RunsModel]) -> Mapping[str, Any]:
    """Return the options of a check, of which all shards are given."""
    found = {runs.shard.number for runs in shards if runs.shard is not None}
    checks = {(runs.engine, runs.first_seed, runs.steps) for runs in shards}
    first = shards[0].shard if shards else None
    if first is None or len(checks) > 1 or len(found) < len(shards):
        raise ConfigError(
            "--merge needs one report of each shard of one check; run kvview check TARGET --shard "
            "1/2 --json 1.json, then 2/2 with the same other arguments"
        )
    if missing := sorted(set(range(1, first.of + 1)) - found):
        names = ", ".join(f"{one}/{first.of}" for one in missing)
        raise ConfigError(f"--merge needs every shard, and {names} is missing; give its report too")
    if any(runs.shard is None or runs.shard.options != first.options for runs in shards):
        raise ConfigError("--merge needs shards with equal options; run them with the same command")
    return first.options
