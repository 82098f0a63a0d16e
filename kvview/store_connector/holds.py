"""Blocks that are held until they are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvview.pool import GPUBlockPoolView, SupportsFreeCount, SupportsGiveBack, SupportsPinBudget


class Holds:
    """Holds blocks through a view, and leaves enough of them to the engine.

    Args:
        view: Of the pool.
    """

    def __init__(self, view: GPUBlockPoolView) -> None:
        self.view = view
        self.num_reserved = 0
        """Free blocks that are left to the engine."""
        self.keeps_order = False
        """Whether a released block returns to its place in the order of eviction."""
        self._limits: list[Callable[[], int]] = []
        if isinstance(view, SupportsFreeCount):
            num_free_blocks = view.num_free_blocks
            self._limits.append(lambda: num_free_blocks() - self.num_reserved)
        if isinstance(view, SupportsPinBudget):
            self._limits.append(view.num_pinnable_blocks)

    def room(self) -> int:
        """The number of blocks that may be held now."""
        return min((limit() for limit in self._limits), default=1 << 30)

    def hold(self, block_ids: Sequence[int]) -> None:
        """Hold each block once."""
        self.view.touch_blocks(block_ids)

    def release(self, block_ids: Sequence[int]) -> None:
        """Release each block once; the end of a prefix is evicted first."""
        if self.keeps_order and isinstance(self.view, SupportsGiveBack):
            self.view.give_back_blocks(block_ids[::-1])
        else:
            self.view.free_blocks(block_ids[::-1])
