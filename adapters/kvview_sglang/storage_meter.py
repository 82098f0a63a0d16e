"""The metrics of a tier under SGLang, with ``--enable-metrics``.

Each job is recorded in SGLang's own histograms (``sglang:prefetch_pgs``, ``sglang:backup_pgs``, and
their bandwidths). The guard's counters are exported as ``sglang:kvview_tier_...``.

Source: ``StorageMetrics``, sglang/srt/observability/metrics_collector.py, 0.5.23.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any

from kvview.bridge import TIER_COUNTERS
from kvview.tier import GuardedTier

PREFIX = "sglang:kvview_tier_"
_GIB = 1 << 30
_counters: dict[str, Any] = {}  # one per name, because a process may register a name only once


class StorageMeter:
    """Exports the jobs of one tier, and the counters of its guard.

    Args:
        guard: The tier.
        store: Target of the store, a label of its metric series.
        config: ``HiCacheStorageConfig``; its ranks are labels too.
    """

    def __init__(self, guard: GuardedTier, store: str, config: Any) -> None:
        self._guard = guard
        self._sent = dict.fromkeys(TIER_COUNTERS, 0)
        self._lock = threading.Lock()
        self._new: dict[str, list[float]] = {}
        prometheus: Any = importlib.import_module("prometheus_client")
        labels = {"store": store, "tp_rank": config.tp_rank, "pp_rank": config.pp_rank}
        for name, text in TIER_COUNTERS.items():
            if name not in _counters:
                _counters[name] = prometheus.Counter(PREFIX + name, text, [*labels])
        self._series = {name: _counters[name].labels(**labels) for name in TIER_COUNTERS}

    def count(self, num_pages: int, num_bytes: int, seconds: float, *, is_get: bool) -> None:
        """Count the pages of an ended job that did not fail."""
        name = "prefetch" if is_get else "backup"
        if num_pages:
            with self._lock:
                self._new.setdefault(f"{name}_pgs", []).append(num_pages)
                rate = num_bytes / _GIB / max(seconds, 1e-9)
                self._new.setdefault(f"{name}_bandwidth", []).append(rate)

    def take(self) -> Any:
        """Return the jobs since the last call as SGLang's ``StorageMetrics``."""
        stats = self._guard.stats
        for name, series in self._series.items():
            if more := getattr(stats, name) - self._sent[name]:
                series.inc(more)
                self._sent[name] += more
        with self._lock:
            new, self._new = self._new, {}
        if not new:
            return None
        collector: Any = importlib.import_module("sglang.srt.observability.metrics_collector")
        return collector.StorageMetrics(**new)
