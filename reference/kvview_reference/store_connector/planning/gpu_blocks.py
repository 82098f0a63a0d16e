"""The GPU blocks that are being stored, and the computed blocks that the GPU evicts next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Protocol, runtime_checkable

from kvview.connector import EngineFacts, FullBlock
from kvview.pool import (
    GPUBlockPoolView,
    SupportsBlockKeys,
    SupportsFreeCount,
    SupportsFreeOrder,
    SupportsGiveBack,
    SupportsPinBudget,
    SupportsPoolSize,
)

_LOOKAHEAD_STEPS = 4  # a store takes about two steps, in which blocks are allocated
_SMALLEST_SHARE = 16  # of the pool is left to the engine: a small pool is all lookahead


@runtime_checkable
class _ShowsVictims(SupportsFreeOrder, SupportsBlockKeys, SupportsGiveBack, Protocol):
    """A view that shows the order of eviction, and can release blocks to its head."""


class GPUBlocks:
    """Holds blocks while they are stored, and finds computed blocks that are about to be evicted.

    Args:
        view: View of the pool.
        facts: Facts of the engine.
        wants_victims: Whether blocks are stored when they are about to be evicted.
    """

    def __init__(
        self,
        view: GPUBlockPoolView,
        facts: EngineFacts,
        *,
        wants_victims: bool,
    ) -> None:
        self._view = view
        self._lookahead = lookahead = _LOOKAHEAD_STEPS * facts.max_blocks_per_step
        reserved = min(lookahead, facts.num_gpu_blocks // _SMALLEST_SHARE)
        self._limits: list[Callable[[], int]] = []
        if isinstance(view, SupportsFreeCount):
            num_free_blocks = view.num_free_blocks
            self._limits.append(lambda: num_free_blocks() - reserved)
        if isinstance(view, SupportsPinBudget):
            self._limits.append(view.num_pinnable_blocks)
        self.null_block_id = view.null_block_id if isinstance(view, SupportsPoolSize) else 0
        self._victims: _ShowsVictims | None = None
        if wants_victims and isinstance(view, _ShowsVictims):
            self._victims = view
        self._unsaved: dict[int, FullBlock] = {}  # by block id
        self._places: dict[int, int] = {}  # of the victims that were stored or were not added

    @property
    def finds_victims(self) -> bool:
        """Whether the view shows the order of eviction, and can release blocks to its head."""
        return self._victims is not None

    def room(self) -> int:
        """Return the number of blocks that may be held now."""
        return min((limit() for limit in self._limits), default=1 << 30)

    def hold(self, block_ids: Sequence[int]) -> None:
        """Hold each block once."""
        self._view.touch_blocks(block_ids)

    def release(self, block_ids: Sequence[int]) -> None:
        """Release each block once; the end of a prefix is evicted first."""
        if self._victims is not None:
            self._victims.give_back_blocks(block_ids[::-1])
        else:
            self._view.free_blocks(block_ids[::-1])

    def add(self, blocks: Iterable[FullBlock]) -> None:
        """Remember computed or loaded blocks that must be stored before they are evicted."""
        self._unsaved.update((block.block_id, block) for block in blocks)

    def clear(self) -> None:
        """Forget the blocks that were added."""
        self._unsaved.clear()

    def take_victims(self) -> list[FullBlock]:
        """Return the next victims that were added, latest victim first, as many as may be held."""
        view = self._victims
        assert view is not None, "only a view that shows victims is asked for them"
        next_victim = next(iter(view.iter_free_block_ids()), -1)
        num_done = len(self._places) - self._places.get(next_victim, len(self._places))
        room = self.room() if num_done <= self._lookahead // 2 else 0
        if room <= 0:
            return []
        victims: list[int] = []
        self._places = {}
        for block_id in islice(view.iter_free_block_ids(), self._lookahead):
            if block_id in self._unsaved:
                if len(victims) == room:
                    break
                victims.append(block_id)
            self._places[block_id] = len(self._places)
        victims.reverse()
        return [
            block
            for block_id, key in zip(victims, view.primary_keys(victims), strict=True)
            if (block := self._unsaved.pop(block_id)).key == key
        ]
