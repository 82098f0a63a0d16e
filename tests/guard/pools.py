"""Pools under a guard: the reference's pool, and a pool of an engine that does not check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from typing_extensions import override

from kvview import GPUBlockPoolView, GuardedView
from kvview.keys import OffloadKey
from kvview_reference.harness import ReferenceEnginePool


class GuardedPool(ReferenceEnginePool):
    """The reference's pool with a guard as its view."""

    Guard: ClassVar[type[GuardedView]] = GuardedView

    @override
    def make_view(self) -> GPUBlockPoolView:
        return self.guard_over(super().make_view(), None)

    def guard_over(self, view: GPUBlockPoolView, num_blocks: int | None) -> GuardedView:
        """Make another guard over a view, which may hold this number of blocks."""
        budget = None if num_blocks is None else num_blocks / self.pool.num_blocks
        return self.Guard(view, owner="guard", pin_budget=budget)


class UncheckedView:
    """The view of an engine that does not check its caller, and that fails on request.

    Args:
        num_blocks: Blocks in the pool; block 0 is the null block.
        has_size: Whether the view has ``num_blocks`` and ``null_block_id``.
    """

    def __init__(self, num_blocks: int, *, has_size: bool) -> None:
        if has_size:
            self.num_blocks, self.null_block_id = num_blocks, 0
        self.refs = [0] * num_blocks
        self.queue = list(range(1, num_blocks))
        self.fails_at = ""
        """The method whose calls fail."""

    def touch_blocks(self, block_ids: Sequence[int]) -> None:
        self._begin("touch_blocks")
        for block in block_ids:
            if not self.refs[block]:
                self.queue.remove(block)
            self.refs[block] += 1

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """Release references; like vLLM up to 0.23, queue a block at each mention (vLLM #42571)."""
        self._begin("free_blocks")
        self.queue += self._freed(block_ids)

    def give_back_blocks(self, block_ids: Sequence[int]) -> None:
        self._begin("give_back_blocks")
        self.queue[:0] = self._freed(block_ids)

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
        """Return no key, because no block has a key."""
        return iter(())

    def is_free(self, block_id: int) -> bool:
        return block_id != 0 and not self.refs[block_id]

    def block_keys(self, block_ids: Sequence[int]) -> list[tuple[OffloadKey, ...]]:
        return [() for _ in block_ids]

    def primary_keys(self, block_ids: Sequence[int]) -> list[OffloadKey | None]:
        return [None for _ in block_ids]

    def _freed(self, block_ids: Sequence[int]) -> list[int]:
        for block in block_ids:
            self.refs[block] -= 1
        return [block for block in block_ids if not self.refs[block]]

    def _begin(self, method: str) -> None:
        if method == self.fails_at:
            raise RuntimeError(f"simulated failure of {method}")
