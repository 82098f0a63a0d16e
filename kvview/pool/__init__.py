"""The pool contract: a connector's view of the engine's block pool."""

from kvview.pool.leases import Lease, SupportsLeases, SupportsPinBudget
from kvview.pool.queries import (
    SupportsBlockKeys,
    SupportsClose,
    SupportsFindCachedBlock,
    SupportsFreeCount,
    SupportsGiveBack,
    SupportsHolds,
    SupportsIsFree,
    SupportsPoolSize,
    SupportsReuseNotice,
)
from kvview.pool.view import GPUBlockPoolView
from kvview.pool.walks import FreeBlockWalk, SupportsFreeOrder, SupportsResumableWalk

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
