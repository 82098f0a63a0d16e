"""The pool contract: a connector's view of the engine's block pool."""

from kvview.pool.queries import (
    SupportsBlockKeys as SupportsBlockKeys,
    SupportsClose as SupportsClose,
    SupportsFindCachedBlock as SupportsFindCachedBlock,
    SupportsFreeCount as SupportsFreeCount,
    SupportsFreeOrder as SupportsFreeOrder,
    SupportsGiveBack as SupportsGiveBack,
    SupportsHolds as SupportsHolds,
    SupportsIsFree as SupportsIsFree,
    SupportsPinBudget as SupportsPinBudget,
    SupportsPoolSize as SupportsPoolSize,
)
from kvview.pool.view import GPUBlockPoolView as GPUBlockPoolView
