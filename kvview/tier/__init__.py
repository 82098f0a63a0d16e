"""The tier contract: a store below the host memory, written once for any engine.

``store`` defines the interface of a store, and ``namespace`` the model and layout to which the
bytes of a store belong. ``Threaded`` is the base of stores whose author writes blocking reads and
writes, and ``Polled`` the base of stores that poll for ended jobs. ``GuardedTier`` is a guard
between any store and any engine.
"""

from kvview.tier.bases.async_store import AsyncStore as AsyncStore
from kvview.tier.bases.polled import Polled as Polled
from kvview.tier.bases.threaded import Threaded as Threaded
from kvview.tier.guard.guarded import GuardedTier as GuardedTier, TierStats as TierStats
from kvview.tier.namespace import Namespace as Namespace
from kvview.tier.store import (
    SupportsDamageReports as SupportsDamageReports,
    SupportsDelete as SupportsDelete,
    SupportsEvictions as SupportsEvictions,
    SupportsTouch as SupportsTouch,
    SupportsUsage as SupportsUsage,
    SupportsWakeUp as SupportsWakeUp,
    TierStore as TierStore,
    TierUsage as TierUsage,
    is_tier_store as is_tier_store,
    require_tier_job as require_tier_job,
)
from kvview.tier.tier_events import TierEvents as TierEvents
