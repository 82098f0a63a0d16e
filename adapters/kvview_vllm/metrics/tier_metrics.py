"""The metrics of a tier: series in vLLM's ``/metrics``, which reads them in 0.25 and later.

``docs/metrics.md`` lists the names.
"""

from __future__ import annotations

from typing import Any

from kvview.bridge import TIER_COUNTERS
from kvview.tier import GuardedTier
from kvview_vllm.releases.compat.tiers import metric_definitions, metric_stats

PREFIX = "vllm:kvview_tier_"  # vLLM removes such series when it builds another engine
LABELS = ("store",)
GAUGES = {"in_use": "1 while the store is used, 0 while it is suspended or closed."}


def definitions() -> dict[str, Any]:
    """Return the series, in the form in which a tier of vLLM declares them."""
    counters = {PREFIX + name: text for name, text in TIER_COUNTERS.items()}
    gauges = {PREFIX + name: text for name, text in GAUGES.items()}
    return metric_definitions(counters, gauges, LABELS)


class TierReporter:
    """Finds the changes of a guarded tier's counters.

    Args:
        guard: The tier.
        store: Target of the store, a label of its metric series.
    """

    def __init__(self, guard: GuardedTier, store: str) -> None:
        self._guard = guard
        self._store = store
        self._sent: dict[str, int] = {}
        self._in_use: bool | None = None

    def news(self) -> Any:
        """Return the changes since the last call as vLLM's stats; None without changes."""
        counters, gauges = self._changed()
        if not counters and not gauges:
            return None
        return metric_stats(
            {PREFIX + name: more for name, more in counters.items()},
            {PREFIX + name: value for name, value in gauges.items()},
            (self._store,),
        )

    def _changed(self) -> tuple[dict[str, int], dict[str, float]]:
        stats, in_use = self._guard.stats, self._guard.is_healthy
        now = {name: getattr(stats, name) for name in TIER_COUNTERS}
        counters = {
            name: value - self._sent.get(name, 0)
            for name, value in now.items()
            if value != self._sent.get(name)  # the first time also zeros
        }
        gauges = {} if in_use == self._in_use else {"in_use": float(in_use)}
        self._sent, self._in_use = now, in_use
        return counters, gauges
