"""The guarded tier that each bridge to an engine builds from a user's settings.

``import kvview`` does not import this module, because it needs pydantic.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kvview.errors import ConfigError
from kvview.options import make_with_options
from kvview.targets import is_connector, load_target
from kvview.tier import GuardedTier, Namespace, is_tier_store


class TierOptions(BaseModel):
    """A user's settings of a tier, the same for every engine.

    Args:
        store: Target of a store class, which is called with the namespace and the options, or
            target of a connector whose class method ``tier_store`` returns such a class.
        options: Options of the store.
        weights: Revision or digest of the model's weights, or any text that you change when the
            weights change (TIER-10).
        deadline: Seconds until a job without a report counts as failed.
        lookup_deadline: Seconds until a key without a lookup result counts as a miss.
        checksum: ``"xxh3"``, ``"crc32"``, or ``"none"`` if the store has its own checksums.
        trip_after: Number of consecutive failures after which the guard stops using the store.
        retry_after: Seconds until the guard tries the store again.
        zero_copy: Pass the engine's own pages to the store; see
            :class:`~kvview.tier.GuardedTier`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    store: str
    options: dict[str, Any] = Field(default_factory=dict)
    weights: str = ""
    deadline: float = Field(30.0, gt=0)
    lookup_deadline: float = Field(2.0, gt=0)
    checksum: str = "xxh3"
    trip_after: int = Field(3, gt=0)
    retry_after: float = Field(5.0, gt=0)
    zero_copy: bool = False


TIER_COUNTERS = {
    "puts": "Pages stored.",
    "gets": "Pages loaded.",
    "failed": "Pages whose put or get failed, for any reason.",
    "damaged": "Pages whose bytes differed from the bytes that were put.",
    "refused": "Jobs that did not reach the store, because it was closed or on trial.",
    "raised": "Calls of the store that raised.",
    "late": "Jobs that were not reported within their deadline.",
    "malformed": "Reports that were not valid.",
    "unknown": "Reports of jobs that were not in flight.",
    "unanswered": "Lookups without a result in time.",
    "trips": "Times that the store was not used for a while.",
}
"""The counters of :class:`~kvview.tier.TierStats` that every bridge exports, with help texts."""


def open_tier(options: TierOptions, namespace: Namespace) -> GuardedTier:
    """Make the store and its guard.

    Raises:
        ConfigError: The store does not exist, or refuses its options.
        NamespaceMismatchError: The store has entries that belong to other weights or another
            layout.
    """
    return GuardedTier(
        make_with_options(_store_of(options.store), options.options, namespace, flag="options"),
        namespace,
        deadline=options.deadline,
        lookup_deadline=options.lookup_deadline,
        checksum=options.checksum,
        trip_after=options.trip_after,
        retry_after=options.retry_after,
        zero_copy=options.zero_copy,
    )


def _store_of(target: str) -> Any:
    """Return a class of stores: the target itself, or the store of a connector."""
    found = load_target(target)
    if is_connector(found) and hasattr(found, "tier_store"):
        found = found.tier_store()
    if not is_tier_store(found):
        raise ConfigError(
            f"store {target!r} is not a class of tier stores; name a class such as "
            f"my_store.py:MyStore"
        )
    return found
