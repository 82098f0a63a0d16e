"""What every bridge makes of a user's settings: a guarded tier.

Not imported by ``import kvview``: it needs pydantic.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kvview.errors import ConfigError
from kvview.options import make_with_options
from kvview.targets import load_target
from kvview.tier import GuardedTier, Namespace, is_tier_store


class TierOptions(BaseModel):
    """A tier, as a user names it under any engine.

    Args:
        store: Target of the store, called with the namespace and its options.
        options: Its own options.
        weights: Revision or digest of the model's weights; any text that you change when
            they change (TIER-10).
        deadline: Seconds until a job that the store does not report has failed.
        lookup_deadline: Seconds until a key that nothing is said of is a miss.
        checksum: ``"xxh3"``, ``"crc32"``, or ``"none"`` where the store's own is enough.
        trip_after: Strikes in a row after which the store is left alone.
        retry_after: Seconds until it is tried again.
        zero_copy: Give the store the engine's own pages; see :class:`~kvview.tier.GuardedTier`.
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
    "failed": "Pages whose put or get failed, for whatever reason.",
    "damaged": "Pages whose bytes were not what was put.",
    "refused": "Jobs that did not reach the store: it was closed, or on trial.",
    "raised": "Calls of the store that raised.",
    "late": "Jobs that were not reported within their deadline.",
    "malformed": "Reports that were none.",
    "unknown": "Reports of jobs that were not in flight.",
    "unanswered": "Lookups without an answer in time.",
    "trips": "Times that the store was left alone for a while.",
}
"""What every bridge exports of :class:`~kvview.tier.TierStats`, and what it means."""


def open_tier(options: TierOptions, namespace: Namespace) -> GuardedTier:
    """The store, with the guard in front.

    Raises:
        ConfigError: There is no such store, or it cannot be made of these options.
        NamespaceMismatchError: It holds other KV.
    """
    make = load_target(options.store)
    if not is_tier_store(make):
        raise ConfigError(f"store {options.store!r} is no class of tier stores")
    return GuardedTier(
        make_with_options(make, options.options, namespace, flag="options"),
        namespace,
        deadline=options.deadline,
        lookup_deadline=options.lookup_deadline,
        checksum=options.checksum,
        trip_after=options.trip_after,
        retry_after=options.retry_after,
        zero_copy=options.zero_copy,
    )
