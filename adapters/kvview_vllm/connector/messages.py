"""What the two halves of ``KVViewConnector`` send each other through vLLM.

Scheduler to worker: one :class:`KVViewMetadata` a step. Worker to scheduler: job
reports, in the worker metadata where the release has it (0.18 and later), else in
the connector stats, the one other field of ``KVConnectorOutput`` that every
release passes through whole and aggregates over workers.

- MSG-1 A report **must** be sent again until it was acknowledged: 0.11.0 drops the
  output of a step that computes nothing.
- MSG-2 Reports **must** be read once: by owner, job and worker rank.

Source: ``KVConnectorOutput``, vllm/v1/outputs.py; ``KVConnectorWorkerMetadata``
(0.18.0), ``KVConnectorStats`` (0.11.0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvview import StepPlan, TransferJob, TransferResult
from kvview_vllm.metrics import Said, as_log_line, merge
from kvview_vllm.releases import installed, reading

if TYPE_CHECKING:

    class KVConnectorMetadata:  # noqa: D101 - stands in for vLLM's, which mypy does not see
        pass

    class KVConnectorWorkerMetadata:  # noqa: D101
        pass

    @dataclass
    class KVConnectorStats:  # noqa: D101
        data: dict[str, Any]

else:
    with reading("connector", "what the halves of a connector send each other"):
        from vllm.distributed.kv_transfer.kv_connector.v1 import base
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
        from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

        _answers = installed().connector.worker_metadata
        KVConnectorWorkerMetadata = base.KVConnectorWorkerMetadata if _answers else object

_REPORTS, _METRICS = "reports", "metrics"


@dataclass
class KVViewMetadata(KVConnectorMetadata):
    """One step, for the worker half.

    Args:
        owner: Names the scheduler half; children of one ``MultiConnector`` differ.
        plan: What to start.
        wait_for_loads: Whether the step computes on what is loaded.
        acknowledged: Jobs whose reports have arrived (MSG-1).
        lost: Loads that have failed already: their promise has ended (SCHED-7, FAULT-2).
    """

    owner: str
    plan: StepPlan
    wait_for_loads: bool
    acknowledged: tuple[int, ...]
    lost: tuple[TransferJob, ...] = ()


@dataclass(frozen=True)
class JobReport:
    """How a job ended on one worker.

    Args:
        owner: As in the metadata that brought the job.
        rank: The worker.
        result: The end of the job there.
    """

    owner: str
    rank: int
    result: TransferResult


@dataclass
class KVViewWorkerMetadata(KVConnectorWorkerMetadata):
    """Reports of one step, of one worker or of several."""

    reports: list[JobReport]

    def aggregate(self, other: KVViewWorkerMetadata) -> KVViewWorkerMetadata:
        """Join the reports of two workers."""
        return KVViewWorkerMetadata([*self.reports, *other.reports])


@dataclass
class KVViewStats(KVConnectorStats):
    """Metrics for the front end, and up to 0.17 reports, taken out before they get there."""

    def reset(self) -> None:
        """Forget all."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVViewStats:
        """Take in those of another worker, of the scheduler's side, or of a later time."""
        # In place: the reports must be found in what the scheduler passes on as well.
        if reports := [*self.data.get(_REPORTS, ()), *other.data.get(_REPORTS, ())]:
            self.data[_REPORTS] = reports
        if said := merge(self.data.get(_METRICS, {}), other.data.get(_METRICS, {})):
            self.data[_METRICS] = said
        return self

    def reduce(self) -> dict[str, int | float]:
        """The metrics, for the log of an interval."""
        return as_log_line(self.data.get(_METRICS, {}))

    def is_empty(self) -> bool:
        """Whether there is neither report nor metric."""
        return not (self.data.get(_REPORTS) or self.data.get(_METRICS))

    def __getitem__(self, name: str) -> Any:
        """``data``, as vLLM's MultiConnector up to 0.30 asks what it has not sent anywhere."""
        return {"data": self.data}[name]


def take_reports(connector_output: Any, owner: str, *, from_stats: bool) -> list[JobReport]:
    """Take the reports for one owner out of a ``KVConnectorOutput``.

    Args:
        connector_output: As given to ``update_connector_output``. Taken out of the stats,
            as the front end needs none.
        owner: Whose reports to take.
        from_stats: Whether this release has no other place for them.
    """
    if not from_stats:
        metadata = connector_output.kv_connector_worker_meta
        reports = metadata.reports if isinstance(metadata, KVViewWorkerMetadata) else ()
        return [report for report in reports if report.owner == owner]
    found: list[JobReport] = []
    stats = connector_output.kv_connector_stats
    for data, key in _stats_with_reports(stats):
        found += [report for report in data[key] if report.owner == owner]
        data[key] = [report for report in data[key] if report.owner != owner]
        if not data[key]:
            del data[key]
    if stats is not None:
        for name in [name for name, child in stats.data.items() if _is_emptied(child)]:
            del stats.data[name]
    return found


def _stats_with_reports(stats: Any) -> list[tuple[dict[str, Any], str]]:
    """Where the reports are: in the stats themselves, or one level down (MultiConnector)."""
    if isinstance(stats, KVViewStats):
        return [(stats.data, _REPORTS)] if _REPORTS in stats.data else []
    if not isinstance(stats, KVConnectorStats):
        return []
    return [place for child in stats.data.values() for place in _stats_with_reports(child)]


def _is_emptied(child: Any) -> bool:
    return isinstance(child, KVViewStats) and child.is_empty()


def stats_of(reports: list[JobReport], said: Said | None = None) -> KVViewStats:
    """Wrap reports, or metrics, as connector stats."""
    data: dict[str, Any] = {_REPORTS: list(reports)} if reports else {}
    return KVViewStats(data | ({_METRICS: said} if said else {}))
