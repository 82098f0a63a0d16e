"""The pool contract: a connector's view of the engine's block pool."""

from kvview.pool.queries import (
    SupportsBlockKeys,
    SupportsClose,
    SupportsFindCachedBlock,
    SupportsFreeCount,
    SupportsFreeOrder,
    SupportsGiveBack,
    SupportsHolds,
    SupportsIsFree,
    SupportsPinBudget,
    SupportsPoolSize,
)
from kvview.pool.view import GPUBlockPoolView

__all__ = [
    "GPUBlockPoolView",
    "SupportsBlockKeys",
    "SupportsClose",
    "SupportsFindCachedBlock",
    "SupportsFreeCount",
    "SupportsFreeOrder",
    "SupportsGiveBack",
    "SupportsHolds",
    "SupportsIsFree",
    "SupportsPinBudget",
    "SupportsPoolSize",
]
