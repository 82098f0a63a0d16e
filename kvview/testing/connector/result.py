"""Results of simulated runs, as plain data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvview.testing.checks import EXCEPTIONS
from kvview.testing.connector.exercised.coverage import not_exercised, replaced_parts
from kvview.testing.connector.scenario.scenario import Scenario
from kvview.testing.results.law_broken import Gap, Unrun

if TYPE_CHECKING:
    from kvview.testing.results.schema import ShardModel


@dataclass(frozen=True)
class Snapshot:
    """Numbers of blocks after a step; ``free``, ``engine`` and ``held`` add up to the pool.

    Args:
        step: Number of the step, from 1.
        free: Blocks in the free queue.
        engine: Blocks that requests and other users of the GPU hold.
        held: Blocks that only the connector holds.
        in_flight: Jobs that are not reported yet.
    """

    step: int
    free: int
    engine: int
    held: int
    in_flight: int


@dataclass(frozen=True)
class Failure:
    """The failure of a run.

    Args:
        law: Number of the law that was broken.
        message: The event that broke the law.
        step: Number of steps before the failure.
        num_events: Number of events of the scenario that had started before the failure.
        is_timeout: Whether a hook did not return.
        is_hook_error: Whether a hook raised an exception, or returned a value that no engine can
            use.
        log: The last hooks, transfers and holds before the failure.
        hint: The remedy; None for the hint of the law.
    """

    law: str
    message: str
    step: int
    num_events: int
    is_timeout: bool = False
    is_hook_error: bool = False
    log: Sequence[str] = field(default=(), compare=False)
    hint: str | None = None

    def __str__(self) -> str:
        law = EXCEPTIONS if self.is_hook_error else self.law
        return f"{law}: {self.message} (step {self.step})"


@dataclass(frozen=True)
class SimulationResult:
    """The result of a run.

    Args:
        scenario: The scenario that was run.
        failure: The failure; None if no law was broken.
        timeline: One snapshot for each of the last steps.
        coverage: Number of occurrences of each event: loads, stores, preemptions and so on.
        loads_of_rounds: Number of tokens that requests were to load, round by round.
        kept_bytes: Minimum number of bytes to which the halves refer in each sixth of a long run,
            without the bytes of pages that the tier holds.
        kept_requests: Minimum number of ids of ended requests to which the halves refer in each
            sixth of a long run.
        first_error: Error of the first job that failed without an injected failure.
    """

    scenario: Scenario
    failure: Failure | None
    timeline: tuple[Snapshot, ...]
    coverage: Mapping[str, int] = field(default_factory=dict)
    loads_of_rounds: tuple[int, ...] = ()
    kept_bytes: tuple[int, ...] = ()
    kept_requests: tuple[int, ...] = ()
    first_error: str = ""


def failure_at_the_end(
    result: SimulationResult, law: str, message: str, hint: str | None = None
) -> Failure:
    """Make a failure that was found after the end of a run."""
    steps, events = result.coverage.get("steps", 0), len(result.scenario.events)
    return Failure(law, message, steps, events, hint=hint)


@dataclass(frozen=True)
class ConnectorFailure:
    """A seed whose run broke a law.

    Args:
        seed: Seed with which the run can be repeated exactly.
        law: Number of the law that was broken, ``"CONN-4"`` for example.
        message: The event that broke the law, in the smallest run that was found.
        script: Python code that reproduces the failure.
        filed_under: The broken law, or :data:`EXCEPTIONS` if the connector raised.
        hint: The remedy; None for the hint of the law.
        log: The last hooks, transfers and holds of the script's run.
        result: The simulated run of the script; None for a run of a real model or of a shard.
    """

    seed: int
    law: str
    message: str
    script: str
    filed_under: str
    hint: str | None = None
    log: Sequence[str] = ()
    result: SimulationResult | None = None


@dataclass(frozen=True)
class ConnectorRuns:
    """The results of many seeds of a connector.

    Args:
        engine: Name of the engine that ran the connector, with its version if known.
        first_seed: The first seed; seeds are consecutive.
        num_seeds: Number of seeds that were run.
        failures: One failure for each seed that broke a law; the first failure of each law is
            shrunk.
        seconds: Duration.
        coverage: Number of occurrences of each event, over all seeds.
        is_interrupted: Whether an interrupt ended the check before the last seed.
        steps: Minimum number of scheduler steps in a run; None for the numbers of the scenarios.
        notes: Notes for the reader on facts that break no law, one line each.
        num_asked: Number of seeds that were requested.
        gaps: Missing parts of the check that the coverage does not show.
        num_statements: Number of statements in the functions of the author's code that the
            connector uses.
        unrun: Statements of these functions that no run reached.
        shard: Data for the merge of all shards; None if the runs are no shard of a check.
        laws: Laws that a run can break; None for all laws of connectors.
    """

    engine: str
    first_seed: int
    num_seeds: int
    failures: Sequence[ConnectorFailure]
    seconds: float
    coverage: Mapping[str, int] = field(default_factory=dict)
    is_interrupted: bool = False
    steps: int | None = None
    notes: Sequence[str] = ()
    num_asked: int = 0
    gaps: Sequence[Gap] = ()
    num_statements: int = 0
    unrun: Sequence[Unrun] = ()
    shard: ShardModel | None = None
    laws: Collection[str] | None = None

    @property
    def is_cut_short(self) -> bool:
        """Whether a failure or Ctrl-C ended the check before the last seed."""
        return self.num_seeds < self.num_asked

    def progress(self) -> str:
        """Progress in words: ``29 of 200 seeds, 0 failed``."""
        return f"{self.num_seeds} of {self.num_asked} seeds, {len(self.failures)} failed"

    @property
    def not_exercised(self) -> Sequence[Gap]:
        """Jobs that failed by themselves, events that no run exercised, and code that never ran."""
        causes = [gap for gap in self.gaps if gap.name.startswith("failed ")]
        others = [gap for gap in self.gaps if gap not in causes]
        return [*causes, *not_exercised(self.coverage), *others]

    @property
    def replaced(self) -> Sequence[str]:
        """Parts of the connector that were not checked, because the engine replaced them."""
        return replaced_parts(self.coverage)

    @property
    def left_out(self) -> Sequence[str]:
        """Parts of scenarios that were skipped, because the engine cannot simulate them."""
        prefix = "left out: "
        found = (name for name in sorted(self.coverage) if name.startswith(prefix))
        return [name.removeprefix(prefix) for name in found]
