"""The tier contract: a store below the host memory, written once for any engine.

``store`` defines the interface of a store, and ``namespace`` the model and layout to which the
bytes of a store belong. ``Threaded`` is the base of stores whose author writes blocking reads and
writes, and ``Polled`` the base of stores that poll for ended jobs. ``GuardedTier`` is a guard
between any store and any engine.
"""

from kvview.tier.bases.async_store import AsyncStore
from kvview.tier.bases.polled import Polled
from kvview.tier.bases.threaded import Threaded
from kvview.tier.guard.guarded import GuardedTier, TierStats
from kvview.tier.namespace import Namespace
from kvview.tier.store import (
    SupportsDamageReports,
    SupportsDelete,
    SupportsEvictions,
    SupportsTouch,
    SupportsUsage,
    SupportsWakeUp,
    TierStore,
    TierUsage,
    is_tier_store,
    require_tier_job,
)
from kvview.tier.tier_events import TierEvents

__all__ = [
    "AsyncStore",
    "GuardedTier",
    "Namespace",
    "Polled",
    "SupportsDamageReports",
    "SupportsDelete",
    "SupportsEvictions",
    "SupportsTouch",
    "SupportsUsage",
    "SupportsWakeUp",
    "Threaded",
    "TierEvents",
    "TierStats",
    "TierStore",
    "TierUsage",
    "is_tier_store",
    "require_tier_job",
]
