"""The counters of a tier among LMCache's own metrics: ``lmcache_mp.kvview_tier_...``.

LMCache exports its metrics through OpenTelemetry, to Prometheus or another configured exporter. If
OpenTelemetry is not installed, no counter is exported; ``report_status`` has the same numbers.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from kvview.bridge import TIER_COUNTERS
from kvview.tier import GuardedTier

PREFIX = "lmcache_mp.kvview_tier_"

_tiers: WeakKeyDictionary[GuardedTier, str] = WeakKeyDictionary()
_instruments: list[Any] = []


def export(guard: GuardedTier, store: str) -> None:
    """Export the counters of a tier during its lifetime.

    Args:
        guard: The tier.
        store: Target of the store, a label of its metric series.
    """
    _tiers[guard] = store
    if _instruments:
        return
    try:
        metrics: Any = importlib.import_module("opentelemetry.metrics")
    except ImportError:
        return
    meter = metrics.get_meter("kvview")
    for name, text in TIER_COUNTERS.items():
        callback = partial(_observed, metrics.Observation, name)
        _instruments.append(
            meter.create_observable_counter(PREFIX + name, [callback], description=text)
        )


def _observed(observation: Any, name: str, _: Any) -> Iterator[Any]:
    """Return one number for each store, summed over all of its tiers."""
    sums: dict[str, int] = {}
    for guard, store in [*_tiers.items()]:
        sums[store] = sums.get(store, 0) + getattr(guard.stats, name)
    for store, value in sums.items():
        yield observation(value, {"store": store})
