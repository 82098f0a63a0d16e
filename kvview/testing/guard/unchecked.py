"""A pool without checks that fails on request, for tests of the guard over it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvview.keys import OffloadKey
from kvview.testing.harness import Capability as C


class UncheckedView:
    """The view of an engine that does not check its caller.

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

    def touch_blocks(self, block_ids: Sequence[int]) -> None:
        """Take references."""
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
        """Release references to the head of the queue."""
        self._begin("give_back_blocks")
        self.queue[:0] = self._freed(block_ids)

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
        """Return no key, because no block has a key."""
        return iter(())

    def is_free(self, block_id: int) -> bool:
        """Whether a block has no reference."""
        return block_id != 0 and not self.refs[block_id]

    def block_keys(self, block_ids: Sequence[int]) -> list[tuple[OffloadKey, ...]]:
        """Return no key, because no block has a key."""
        return [() for _ in block_ids]

    def primary_keys(self, block_ids: Sequence[int]) -> list[OffloadKey | None]:
        """Return no key, because no block has a key."""
        return [None for _ in block_ids]

    def _freed(self, block_ids: Sequence[int]) -> list[int]:
        for block in block_ids:
            self.refs[block] -= 1
        return [block for block in block_ids if not self.refs[block]]

    def _begin(self, method: str) -> None:
        if method == self.fails_at:
            raise RuntimeError(f"simulated failure of {method}")


class UncheckedPool:
    """A harness whose view is a guard over an :class:`UncheckedView`.

    Args:
        harness: Harness that makes the guards and has their clock.
        num_blocks: Blocks in the pool.
        has_size: Whether the view has the size of the pool.
    """

    null_block_id = 0

    def __init__(self, harness: Any, num_blocks: int, *, has_size: bool) -> None:
        self._harness = harness
        self.num_blocks = num_blocks
        self.engine = UncheckedView(num_blocks, has_size=has_size)
        self.view: Any = harness.guard_over(self.engine, None)
        known = {C.LEASES, C.LEAKS, C.STATS, C.HOLDS, C.GUARDS, C.ENGINE_SIDE, C.ONE_THREAD}
        self.capabilities = {
            C.GIVE_BACK,
            C.IS_FREE,
            C.BLOCK_KEYS,
            *known.intersection(harness.capabilities),
        }

    def fail(self, method: str) -> None:
        """Let all calls of a method of the engine fail; an empty name ends the failures."""
        self.engine.fails_at = method

    def allocate(self, num_blocks: int) -> list[int]:
        """Allocate from the head of the queue."""
        blocks, self.engine.queue = self.engine.queue[:num_blocks], self.engine.queue[num_blocks:]
        for block in blocks:
            self.engine.refs[block] += 1
        return blocks

    def release(self, block_ids: Sequence[int]) -> None:
        """Release the engine's references."""
        self.engine.queue += self.engine._freed(block_ids)

    def guard_over(self, view: Any, num_blocks: int | None) -> Any:
        """Make another guard over a view, with a budget."""
        return self._harness.guard_over(view, num_blocks)

    def advance(self, seconds: float) -> None:
        """Move the clock of the guards."""
        self._harness.advance(seconds)

    def close(self) -> Mapping[int, int]:
        """Close the view."""
        held: Mapping[int, int] = self.view.close()
        return held
