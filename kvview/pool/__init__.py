"""The pool contract: a connector's view of the engine's block pool."""

from kvview.pool.leases import Lease, SupportsLeases, SupportsPinBudget
from kvview.pool.queries import (
    FreeBlockWalk,
    SupportsBlockKeys,
    SupportsClose,
    SupportsFindCachedBlock,
    SupportsFreeCount,
    SupportsFreeOrder,
    SupportsGiveBack,
    SupportsHolds,
    SupportsIsFree,
    SupportsPoolSize,
    SupportsResumableWalk,
    SupportsReuseNotice,
)
from kvview.pool.view import GPUBlockPoolView

__all__ = [
    "FreeBlockWalk",
    "GPUBlockPoolView",
    "Lease",
    "SupportsBlockKeys",
    "SupportsClose",
    "SupportsFindCachedBlock",
    "SupportsFreeCount",
    "SupportsFreeOrder",
    "SupportsGiveBack",
    "SupportsHolds",
    "SupportsIsFree",
    "SupportsLeases",
    "SupportsPinBudget",
    "SupportsPoolSize",
    "SupportsResumableWalk",
    "SupportsReuseNotice",
]
