"""The metrics of a connector, in vLLM's own ``/metrics`` and stats log.

All metrics are counted on the scheduler's side, which knows every hold and the end of every job.
Changes are sent to the front end with the step's output. The front end adds them to Prometheus
(0.11.1 and later) and to the log line of vLLM's stats.

- METRIC-1 A series **must** have the labels ``connector`` (the target) and ``child`` (the name of a
  child; empty for the connector itself).
- METRIC-2 The last values of an engine **must** stay true while the engine is idle, because an idle
  engine sends no values. So the age of a hold is exported as the time at which it started, and
  values that are sent once a second are sent at every step when no request is left.
- METRIC-3 A series **must** have a sample before its first event, because otherwise an alert on its
  increase would miss this event. The series of children that the configuration names start with the
  front end; the series of any other child start at the first step.

``docs/metrics.md`` lists the metrics and the questions that they answer.

Source: ``KVConnectorStats`` and ``KVConnectorPromMetrics``,
vllm/distributed/kv_transfer/kv_connector/v1/metrics.py, 0.11.0 to 0.33.0.
"""

from __future__ import annotations

import importlib
import time
from collections import Counter, defaultdict
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
LABELS = ("connector", "child")

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
"""Values of one child by name: current gauges, and counters since the last update."""

MetricUpdate = dict[str, Any]
"""The message to the front end, ``{scheduler half: {"connector": target, "children": {child:
Values}}}``."""


class Meter:
    """Counts the outcomes of jobs, by child.

    Args:
        num_workers: Number of workers, each of which moves pages of every job.
    """

    def __init__(self, num_workers: int) -> None:
        self.page_bytes: Sequence[int] = ()
        """Bytes of one block of each group, on one worker."""
        self.begun: dict[int, float] = {}
        """Start of each job in flight, in seconds."""
        self._num_workers = num_workers
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._held_since: dict[str, float] = {}

    def begin(self, plan: StepPlan) -> None:
        """Count the jobs of a plan."""
        now = time.monotonic()
        for kind, jobs in (("loads", plan.loads), ("stores", plan.stores)):
            for job in jobs:
                self._counts[job.owner][f"{kind}_in_flight"] += 1
                self.begun[job.job_id] = now

    def end(self, ended: EndedJob) -> None:
        """Count the end of a job."""
        self.begun.pop(ended.job.job_id, None)
        counts, kind = self._counts[ended.job.owner], "loads" if ended.is_load else "stores"
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

    def values(
        self, half: SchedulerConnector, guard: GuardedView | None, oldest: Mapping[str, float]
    ) -> dict[str, Values]:
        """Return the values of all metrics except faults, by child.

        Args:
            half: The scheduler half, which may count the blocks that it skipped.
            guard: View of the half; None before the half has a view.
            oldest: Unix time of each owner's oldest reference, at the last examination of the
                holds.
        """
        found: dict[str, Values] = {child: dict(counts) for child, counts in self._counts.items()}
        if isinstance(half, SupportsSkippedBlocks):
            found.setdefault("", {})["skipped_blocks"] = half.num_skipped_blocks
        if guard is None:
            return found
        for owner, accounts in guard.accounts().items():
            values = found.setdefault("" if owner == guard.owner else owner, {})
            held = sum(each.held for each in accounts)
            values["held_references"] = held
            values["refused_calls"] = sum(each.refused for each in accounts)
            if held:  # both times may be too early, because the examination is some seconds old
                since = self._held_since.setdefault(owner, time.time())
                values["oldest_hold_timestamp_seconds"] = max(since, oldest.get(owner, 0.0))
            else:
                self._held_since.pop(owner, None)
                values["oldest_hold_timestamp_seconds"] = 0.0
        return found


class Reporter:
    """Finds the changes of the metrics since the last update.

    Args:
        owner: Id of the scheduler half.
        connector: Target of the connector.
    """

    def __init__(self, owner: str, connector: str) -> None:
        self._owner = owner
        self._connector = connector
        self._sent: dict[str, Values] = {}

    def update(self, children: Mapping[str, Mapping[str, float]]) -> MetricUpdate | None:
        """Return the changes since the last update; None without changes.

        Args:
            children: All values of each child; counters count from the start.
        """
        news: dict[str, Values] = {}
        for child, values in children.items():
            is_first = child not in self._sent
            sent = self._sent.setdefault(child, dict.fromkeys((*GAUGES, *COUNTERS), 0.0))
            new = {
                name: value - sent[name] if name in COUNTERS else value
                for name, value in values.items()
                if value != sent[name]
            }
            if new or is_first:  # METRIC-3
                news[child] = new
                sent.update(values)
        return {self._owner: {"connector": self._connector, "children": news}} if news else None


def merge(before: MetricUpdate, after: MetricUpdate) -> MetricUpdate:
    """Merge an earlier and a later update, or the updates of two halves."""
    merged = {**before}
    for owner, update in after.items():
        children = dict(merged.get(owner, {}).get("children", {}))
        for child, values in update["children"].items():
            old = children.get(child, {})
            children[child] = old | {
                name: value + old.get(name, 0.0) if name in COUNTERS else value
                for name, value in values.items()
            }
        merged[owner] = {**update, "children": children}
    return merged


def as_log_line(update: MetricUpdate) -> dict[str, float]:
    """Return the nonzero values for the stats log, by connector, child and name."""
    line: dict[str, float] = {}
    for one in update.values():
        for child, values in one["children"].items():
            owner = "/".join(filter(None, (one["connector"], child)))
            for name, value in values.items():
                if name == "oldest_hold_timestamp_seconds" and value:
                    name, value = "oldest_hold_seconds", round(time.time() - value, 1)
                if value:
                    key = f"{owner} {name}"
                    line[key] = line.get(key, 0) + (int(value) if value == int(value) else value)
    return line


def configured_children(extra: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the values of the label ``child``, for a connector with the option ``connectors``.

    Args:
        extra: ``kv_connector_extra_config``; a wrong form is ignored, because the engine reports
            it.
    """
    options = extra.get("options")
    children = options.get("connectors") if isinstance(options, Mapping) else None
    targets = [
        each["connector"]
        for each in (children if isinstance(children, Sequence) else ())
        if isinstance(each, Mapping) and "connector" in each
    ]
    return ("", *(f"{index}: {target}" for index, target in enumerate(targets)))


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
        labels = [*labelnames, *LABELS]
        gauge = metric_types[types.Gauge]
        counter = metric_types[types.Counter]
        self._metrics = {
            name: gauge(PREFIX + name, text, labels, multiprocess_mode="mostrecent")
            for name, text in GAUGES.items()
        } | {name: counter(PREFIX + name, text, labels) for name, text in COUNTERS.items()}
        # Two connectors with one target share a series, which has the last value of each half.
        self._last: dict[tuple[Any, ...], dict[str, float]] = {}
        self._started: set[tuple[Any, ...]] = set()

    def start(self, connector: str, children: Sequence[str]) -> None:
        """Set a first sample for every series of these children, in every engine (METRIC-3)."""
        for labels in self.per_engine_labelvalues.values():
            for child in children:
                self._start((*labels, connector, child))

    def _start(self, labels: tuple[Any, ...]) -> None:
        if labels not in self._started:
            self._started.add(labels)
            for metric in self._metrics.values():
                metric.labels(*labels)

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Receive the update in a step's output."""
        engine_labels = self.per_engine_labelvalues[engine_idx]
        for owner, update in (transfer_stats_data.get("metrics") or {}).items():
            for child, values in update["children"].items():
                labels = (*engine_labels, update["connector"], child)
                self._start(labels)
                for name, value in values.items():
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
