"""The messages between the two halves of ``KVViewConnector``, sent through vLLM.

The scheduler sends one :class:`KVViewMetadata` per step to the worker. The worker sends job
reports, in the worker metadata if the release has it (0.18 and later), otherwise in the connector
stats. The stats are the only other field of ``KVConnectorOutput`` that every release passes on
completely and aggregates over workers.

- MSG-1 A report **must** be sent again until it is acknowledged, because 0.11.0 drops the output of
  a step that computes nothing.
- MSG-2 Each report **must** be read once; owner, job and worker rank identify a report.

Source: ``KVConnectorOutput``, vllm/v1/outputs.py; ``KVConnectorWorkerMetadata``
(0.18.0), ``KVConnectorStats`` (0.11.0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvview import StepPlan, TransferJob, TransferResult
from kvview_vllm.metrics.connector_metrics import MetricUpdate, as_log_line, merge
from kvview_vllm.releases import installed, reading

with reading("connector", "the messages between the halves of a connector"):
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

    _has_metadata = installed().connector.worker_metadata
    KVConnectorWorkerMetadata: Any = base.KVConnectorWorkerMetadata if _has_metadata else object

_REPORTS, _METRICS = "reports", "metrics"


@dataclass
class KVViewMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The message of one step for the worker half.

    Args:
        owner: Id of the scheduler half, which differs for each child of a ``MultiConnector``.
        plan: The jobs to start.
        wait_for_loads: Whether the step computes on the loaded bytes.
        acknowledged: Jobs whose reports have arrived (MSG-1).
        lost: Loads that have already failed, because their promise ended (SCHED-7, FAULT-2).
    """

    owner: str
    plan: StepPlan
    wait_for_loads: bool
    acknowledged: tuple[int, ...]
    lost: tuple[TransferJob, ...] = ()


@dataclass(frozen=True)
class JobReport:
    """The end of a job on one worker.

    Args:
        owner: Id of the scheduler half that started the job.
        rank: Rank of the worker.
        result: Result of the job on this worker.
    """

    owner: str
    rank: int
    result: TransferResult


@dataclass
class KVViewWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The reports of one step from one or several workers."""

    reports: list[JobReport]

    def aggregate(self, other: KVViewWorkerMetadata) -> KVViewWorkerMetadata:
        """Join the reports of two workers."""
        return KVViewWorkerMetadata([*self.reports, *other.reports])


@dataclass
class KVViewStats(KVConnectorStats):  # type: ignore[misc]
    """Metrics for the front end; up to 0.17 also reports, which the scheduler's side removes."""

    def reset(self) -> None:
        """Remove all values."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVViewStats:
        """Add the stats of another worker, of the scheduler's side, or of a later time."""
        # The stats are changed in place, because the object that the scheduler passes on must have
        # the reports as well.
        if reports := [*self.data.get(_REPORTS, ()), *other.data.get(_REPORTS, ())]:
            self.data[_REPORTS] = reports
        if metrics := merge(self.data.get(_METRICS, {}), other.data.get(_METRICS, {})):
            self.data[_METRICS] = metrics
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the metrics for a line of vLLM's stats log."""
        return as_log_line(self.data.get(_METRICS, {}))

    def is_empty(self) -> bool:
        """Whether this object has neither reports nor metrics."""
        return not (self.data.get(_REPORTS) or self.data.get(_METRICS))

    def __getitem__(self, name: str) -> Any:
        """Return ``data``; up to 0.30 vLLM's MultiConnector indexes stats that were not sent."""
        return {"data": self.data}[name]


def take_reports(connector_output: Any, owner: str, *, from_stats: bool) -> list[JobReport]:
    """Take the reports for one owner out of a ``KVConnectorOutput``.

    Args:
        connector_output: The argument of ``update_connector_output``. Reports are removed from the
            stats of this output, because the front end does not need them.
        owner: Owner of the reports.
        from_stats: Whether this release can only send reports in the stats.
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
        for name, child in [*stats.data.items()]:
            if isinstance(child, KVViewStats) and child.is_empty():
                del stats.data[name]
    return found


def _stats_with_reports(stats: Any) -> list[tuple[dict[str, Any], str]]:
    """Return the dictionaries with reports, of these stats or of their children, with the key."""
    if isinstance(stats, KVViewStats):
        return [(stats.data, _REPORTS)] if _REPORTS in stats.data else []
    if not isinstance(stats, KVConnectorStats):
        return []
    return [place for child in stats.data.values() for place in _stats_with_reports(child)]


def stats_of(reports: list[JobReport], metrics: MetricUpdate | None = None) -> KVViewStats:
    """Wrap reports, or metrics, as connector stats."""
    data: dict[str, Any] = {_REPORTS: list(reports)} if reports else {}
    return KVViewStats(data | ({_METRICS: metrics} if metrics else {}))
