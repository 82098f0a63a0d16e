"""The canary's metrics in vLLM's ``/metrics`` and stats log, around those of the wrapped connector.

- CANARY-9 A series **must** have a sample before its first event, because otherwise an alert on its
  increase would miss this event.

Source: ``KVConnectorStats`` and ``KVConnectorPromMetrics``,
vllm/distributed/kv_transfer/kv_connector/v1/metrics.py, 0.11.0 to 0.33.0.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvview_vllm.canary.wrapper.canary_options import wrapped_class
from kvview_vllm.metrics.connector_metrics import PREFIX
from kvview_vllm.releases import reading
from kvview_vllm.releases.compat.calls import stats_data

with reading("connector", "the stats of a connector"):
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

COUNTERS = {
    "canary_digests": "Blocks that were digested, over all workers.",
    "canary_compared": "Loaded blocks whose digest was compared with that of a computed block.",
    "canary_learnt": "Loaded blocks whose hash was never computed here, so the digest was kept.",
    "canary_changed": "Learnt blocks that a later load brought with other bytes.",
    "canary_incidents": "Wrong loads and broken laws.",
}


class CanaryStats(KVConnectorStats):  # type: ignore[misc]
    """Counters of the canary, and the stats of the wrapped connector.

    Args:
        connector: Name and module path of the wrapped connector, by which the front end finds it.
        counts: Increases of :data:`COUNTERS` since the last stats.
        wrapped: Stats of the wrapped connector, or None.
        incidents: The law of each incident since then and the request of a wrong load, which the
            scheduler's side receives.
    """

    def __init__(
        self,
        connector: Sequence[str | None],
        counts: Mapping[str, int],
        wrapped: Any = None,
        incidents: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.connector = list(connector)
        self.counts = Counter(counts)
        self.wrapped = wrapped
        self.incidents = [*incidents]

    @property
    def data(self) -> dict[str, Any]:
        """Values that vLLM sends to the front end."""
        own = None if self.wrapped is None else stats_data(self.wrapped)
        return {"connector": self.connector, "counts": dict(self.counts), "wrapped": own}

    def to_dict(self) -> dict[str, Any]:
        """Return the values that vLLM sends to the front end (0.32.0)."""
        return self.data

    def reset(self) -> None:
        """Remove all values."""
        self.counts.clear()
        self.wrapped = None

    def aggregate(self, other: CanaryStats) -> CanaryStats:
        """Add the stats of another worker, of the scheduler's side, or of a later time.

        A ``MultiConnector`` adds those of several canaries, which may wrap different connectors;
        the stats of the first of these connectors are kept.
        """
        self.counts.update(other.counts)
        self.incidents += other.incidents
        if self.wrapped is None:
            self.wrapped = other.wrapped
        elif other.wrapped is not None and other.connector == self.connector:
            self.wrapped = self.wrapped.aggregate(other.wrapped)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the values for a line of vLLM's stats log."""
        line: dict[str, int | float] = {} if self.wrapped is None else self.wrapped.reduce()
        return line | {name: number for name, number in self.counts.items() if number}

    def is_empty(self) -> bool:
        """Whether this object has no value."""
        return not self.counts.total() and (self.wrapped is None or self.wrapped.is_empty())


def stats_from(data: Mapping[str, Any] | None) -> CanaryStats:
    """Make stats from the data that the front end has received."""
    if not data:
        return CanaryStats((), {})
    wrapped = None
    if data["wrapped"] is not None:
        name, path = data["connector"]
        config = KVTransferConfig(
            kv_connector=name, kv_connector_module_path=path, kv_role="kv_both"
        )
        kind: Any = wrapped_class(config)
        wrapped = kind.build_kv_connector_stats(data["wrapped"])
    return CanaryStats(data["connector"], data["counts"], wrapped)


class CanaryPromMetrics:
    """The metrics of the front end, in a Prometheus registry.

    Args:
        connector: Name of the wrapped connector.
        wrapped: Metrics of the wrapped connector, or None.
        metric_types: vLLM's classes for ``prometheus_client``'s metrics.
        labelnames: vLLM's labels of every series.
        per_engine_labelvalues: Values of these labels for each engine.
    """

    def __init__(
        self,
        connector: str,
        wrapped: Any,
        metric_types: Mapping[Any, Any],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        types: Any = importlib.import_module("prometheus_client")
        self._wrapped = wrapped
        counter = metric_types[types.Counter]
        self._series: dict[int, dict[str, Any]] = {engine: {} for engine in per_engine_labelvalues}
        for name, text in COUNTERS.items():
            metric = counter(PREFIX + name, text, [*labelnames, "connector"])
            for engine, labels in per_engine_labelvalues.items():
                self._series[engine][name] = metric.labels(*labels, connector)

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Receive the stats of a step."""
        for name, number in transfer_stats_data["counts"].items():
            self._series[engine_idx][name].inc(number)
        if self._wrapped is not None and transfer_stats_data["wrapped"] is not None:
            self._wrapped.observe(transfer_stats_data["wrapped"], engine_idx)
