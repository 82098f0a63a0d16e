"""The metrics of a connector, in vLLM's own ``/metrics`` and stats log.

All metrics are counted on the scheduler's side, which knows every hold and the end of every job.
Changes are sent to the front end with the step's output. The front end adds them to Prometheus
(0.11.1 and later) and to the log line of vLLM's stats.

- METRIC-1 A series **must** have the label ``connector``, the target.
- METRIC-2 The last values of an engine **must** stay true while the engine is idle, because an idle
  engine sends no values. So the age of a hold is exported as the time at which it started, and
  values that are sent once a second are sent at every step when no request is left.
- METRIC-3 A series **must** have a sample before its first event, because otherwise an alert on its
  increase would miss this event. The series of the configured connector start with the front end;
  those of later children of vLLM's ``MultiConnector`` start at the first step.

``docs/metrics.md`` lists the metrics and the questions that they answer.

Source: ``KVConnectorStats`` and ``KVConnectorPromMetrics``,
vllm/distributed/kv_transfer/kv_connector/v1/metrics.py, 0.11.0 to 0.33.0.
"""

from __future__ import annotations

import importlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvview import (
    GPULoadStoreSpec,
    GuardedView,
    SchedulerConnector,
    StepPlan,
    SupportsSkippedBlocks,
)
from kvview.connector.job_tracker import EndedJob

PREFIX = "vllm:kvview_"  # vLLM removes such series when it builds another engine
LABEL = "connector"

GAUGES = {
    "held_references": "References that the connector holds on GPU blocks.",
    "oldest_hold_timestamp_seconds": (
        "Unix time at which the oldest reference still held was taken; 0 without references."
    ),
    "loads_in_flight": "Load jobs that have not ended on every worker.",
    "stores_in_flight": "Store jobs that have not ended on every worker.",
}
COUNTERS = {
    "loads": "Load jobs that ended, failed ones included.",
    "stores": "Store jobs that ended, failed ones included.",
    "failed_loads": "Load jobs that failed; their tokens are computed, or their requests fail.",
    "failed_stores": "Store jobs that failed.",
    "loaded_bytes": "Bytes loaded into the KV cache, over all workers.",
    "stored_bytes": "Bytes stored out of the KV cache, over all workers.",
    "skipped_blocks": "Blocks that were not stored: pin budget, free blocks, or a busy tier.",
    "refused_calls": "Calls of the connector on the pool that were refused.",
    "faults": "Hooks of the connector that raised, or returned an unusable value.",
}

Values = dict[str, float]
"""Values by name: current gauges, and counters since the last update."""

MetricUpdate = dict[str, Any]
"""The message to the front end, ``{scheduler half: {"connector": target, "values": Values}}``."""


class Meter:
    """Counts the outcomes of jobs.

    Args:
        num_workers: Number of workers, each of which moves pages of every job.
    """

    def __init__(self, num_workers: int) -> None:
        self.page_bytes: Sequence[int] = ()
        """Bytes of one block of each group, on one worker."""
        self.begun: dict[int, float] = {}
        """Start of each job in flight, in seconds."""
        self._num_workers = num_workers
        self._counts: Counter[str] = Counter()
        self._held_since: float | None = None

    def begin(self, plan: StepPlan) -> None:
        """Count the jobs of a plan."""
        now = time.monotonic()
        for kind, jobs in (("loads", plan.loads), ("stores", plan.stores)):
            for job in jobs:
                self._counts[f"{kind}_in_flight"] += 1
                self.begun[job.job_id] = now

    def end(self, ended: EndedJob) -> None:
        """Count the end of a job."""
        self.begun.pop(ended.job.job_id, None)
        counts, kind = self._counts, "loads" if ended.is_load else "stores"
        counts[f"{kind}_in_flight"] -= 1
        counts[kind] += 1
        if not ended.result.success:
            counts[f"failed_{kind}"] += 1
            return
        blocks = ended.job.dst if ended.is_load else ended.job.src
        if isinstance(blocks, GPULoadStoreSpec):
            sizes = zip(blocks.group_sizes, self.page_bytes, strict=True)
            moved = sum(number * size for number, size in sizes) * self._num_workers
            counts["loaded_bytes" if ended.is_load else "stored_bytes"] += moved

    def values(self, half: SchedulerConnector, guard: GuardedView | None, oldest: float) -> Values:
        """Return the values of all metrics except faults.

        Args:
            half: The scheduler half, which may count the blocks that it skipped.
            guard: View of the half; None before the half has a view.
            oldest: Unix time of the oldest reference, at the last examination of the holds; 0
                without references.
        """
        found: Values = dict(self._counts)
        if isinstance(half, SupportsSkippedBlocks):
            found["skipped_blocks"] = half.num_skipped_blocks
        if guard is None:
            return found
        accounts = [each for some in guard.accounts().values() for each in some]
        held = sum(each.held for each in accounts)
        if not held:
            self._held_since = None
        elif self._held_since is None:
            self._held_since = time.time()
        return found | {
            "held_references": held,
            "refused_calls": sum(each.refused for each in accounts),
            # Both times may be too early, because the examination is some seconds old.
            "oldest_hold_timestamp_seconds": max(self._held_since or 0.0, oldest if held else 0.0),
        }


class Reporter:
    """Finds the changes of the metrics since the last update.

    Args:
        owner: Id of the scheduler half.
        connector: Target of the connector.
    """

    def __init__(self, owner: str, connector: str) -> None:
        self._owner = owner
        self._connector = connector
        self._sent: Values = {}

    def update(self, values: Mapping[str, float]) -> MetricUpdate | None:
        """Return the changes since the last update; None without changes.

        Args:
            values: All values; counters count from the start.
        """
        is_first = not self._sent
        sent = self._sent = self._sent or dict.fromkeys((*GAUGES, *COUNTERS), 0.0)
        new = {
            name: value - sent[name] if name in COUNTERS else value
            for name, value in values.items()
            if value != sent[name]
        }
        sent.update(values)
        if not (new or is_first):  # METRIC-3
            return None
        return {self._owner: {"connector": self._connector, "values": new}}


def merge(before: MetricUpdate, after: MetricUpdate) -> MetricUpdate:
    """Merge an earlier and a later update, or the updates of two halves."""
    merged = {**before}
    for owner, update in after.items():
        old = merged.get(owner, {}).get("values", {})
        values = {
            name: value + old.get(name, 0.0) if name in COUNTERS else value
            for name, value in update["values"].items()
        }
        merged[owner] = {**update, "values": old | values}
    return merged


def as_log_line(update: MetricUpdate) -> dict[str, float]:
    """Return the nonzero values for the stats log, by connector and name."""
    line: dict[str, float] = {}
    for one in update.values():
        for name, value in one["values"].items():
            if name == "oldest_hold_timestamp_seconds" and value:
                name, value = "oldest_hold_seconds", round(time.time() - value, 1)
            if value:
                key = f"{one['connector']} {name}"
                line[key] = line.get(key, 0) + (int(value) if value == int(value) else value)
    return line


class PromMetrics:
    """The metrics of the front end, in a Prometheus registry.

    Args:
        metric_types: vLLM's classes for ``prometheus_client``'s Gauge and Counter.
        labelnames: vLLM's labels of every series.
        per_engine_labelvalues: Values of these labels for each engine.
    """

    def __init__(
        self,
        metric_types: Mapping[Any, Any],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        types: Any = importlib.import_module("prometheus_client")
        self.per_engine_labelvalues = per_engine_labelvalues
        labels = [*labelnames, LABEL]
        gauge = metric_types[types.Gauge]
        counter = metric_types[types.Counter]
        self._metrics = {
            name: gauge(PREFIX + name, text, labels, multiprocess_mode="mostrecent")
            for name, text in GAUGES.items()
        } | {name: counter(PREFIX + name, text, labels) for name, text in COUNTERS.items()}
        # Two connectors with one target share a series, which has the last value of each half.
        self._last: dict[tuple[Any, ...], dict[str, float]] = {}
        self._started: set[tuple[Any, ...]] = set()

    def start(self, connector: str) -> None:
        """Set a first sample for every series of a connector, in every engine (METRIC-3)."""
        for labels in self.per_engine_labelvalues.values():
            self._start((*labels, connector))

    def _start(self, labels: tuple[Any, ...]) -> None:
        if labels not in self._started:
            self._started.add(labels)
            for metric in self._metrics.values():
                metric.labels(*labels)

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Receive the update in a step's output."""
        engine_labels = self.per_engine_labelvalues[engine_idx]
        for owner, update in (transfer_stats_data.get("metrics") or {}).items():
            labels = (*engine_labels, update["connector"])
            self._start(labels)
            for name, value in update["values"].items():
                series = self._metrics[name].labels(*labels)
                if name in COUNTERS:
                    series.inc(value)
                    continue
                last = self._last.setdefault((engine_idx, *labels, name), {})
                last[owner] = value
                series.set(_together(name, last.values()))


def _together(name: str, values: Any) -> float:
    if name == "oldest_hold_timestamp_seconds":
        return min(filter(None, values), default=0.0)
    return float(sum(values))
