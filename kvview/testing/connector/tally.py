"""The results of many seeds of a connector, added up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from kvview.testing.connector.exercised.author_code import AuthorCode
from kvview.testing.connector.exercised.coverage import (
    failed_by_themselves,
    is_headline,
    notes_on,
)
from kvview.testing.connector.exercised.unrun_code import UnrunCode
from kvview.testing.connector.result import ConnectorFailure, ConnectorRuns
from kvview.testing.results.law_broken import Gap


class Tally:
    """The results of seeds: failures, coverage, and the author's code that ran.

    Args:
        connector_class: The connector.
        options: Its options.
        code: The author's code; None if kvview cannot read it.
    """

    def __init__(
        self, connector_class: type, options: Mapping[str, Any], code: AuthorCode | None
    ) -> None:
        self._connector_class = connector_class
        self._options = options
        self.code = UnrunCode(code)
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
    ) -> ConnectorRuns:
        """Make the results.

        Args:
            engine: Name of the engine.
            first_seed: The first seed.
            seconds: Duration.
            is_interrupted: Whether an interrupt ended the check before the last seed.
            steps: Requested minimum of steps in a run.
            num_asked: Number of seeds that were requested.
        """
        gaps = self._gaps()
        return ConnectorRuns(
            self._connector_class.__name__,
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
            self.laws,
        )

    def _gaps(self) -> list[Gap]:
        """List the missing parts of the check that the coverage does not count; causes first."""
        failed = [one for one in self._failed() if is_headline(one, self.coverage)]
        return [*failed, *self.code.gaps(self.num_seeds)]

    def _failed(self) -> Iterator[Gap]:
        has_store = getattr(self._connector_class, "store", None) is not None
        may_evict = has_store and "store_blocks" not in self._options
        return failed_by_themselves(self.coverage, self.first_error, may_evict=may_evict)

    def _more_notes(self, gaps: Sequence[Gap]) -> Iterator[str]:
        others = len(self.of_chance) - 1
        more = f" ({others} more seeds are not deterministic)" if others > 0 else ""
        yield from (note + more for note in self.of_chance[:1])
        if not self.failures:
            yield from self.code.notes(gaps)
        yield from notes_on(self.coverage)
        for failed in self._failed():
            if self.failures or not is_headline(failed, self.coverage):
                yield failed.what
