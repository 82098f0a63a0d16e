"""The blocks that the GPU evicts next and that no level holds."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from kvview.connector import FullBlock
from kvview.pool import GPUBlockPoolView, SupportsBlockKeys, SupportsFreeOrder, SupportsGiveBack


class GPUVictims:
    """Remembers computed blocks, and finds them again when they are about to be evicted.

    Args:
        view: One for which :meth:`are_visible` is true.
        lookahead: Blocks at the head of the free queue that count as about to be evicted.
    """

    def __init__(self, view: GPUBlockPoolView, lookahead: int) -> None:
        self._view = view
        self._lookahead = lookahead
        self._unsaved: dict[int, FullBlock] = {}  # by block id
        self._num_ahead = 0  # next victims that need nothing more

    @staticmethod
    def are_visible(view: GPUBlockPoolView) -> bool:
        """Whether a view shows the free queue, and takes blocks back where they were."""
        return (
            isinstance(view, SupportsGiveBack)
            and isinstance(view, SupportsFreeOrder)
            and isinstance(view, SupportsBlockKeys)
        )

    def add(self, blocks: Iterable[FullBlock]) -> None:
        """Blocks were computed or loaded, and are to be stored before they are evicted."""
        self._unsaved.update((block.block_id, block) for block in blocks)

    def allocated(self, num_blocks: int) -> None:
        """The engine has taken so many blocks from the head of the free queue."""
        self._num_ahead -= num_blocks

    def clear(self) -> None:
        """Forget all blocks."""
        self._unsaved.clear()

    @property
    def are_near(self) -> bool:
        """Whether it is time to look; half of the lookahead is used up before."""
        return self._num_ahead <= self._lookahead // 2

    def take(self, room: int) -> list[FullBlock]:
        """The next victims that were added, at most ``room``; the last of them first."""
        view = self._view
        assert isinstance(view, SupportsFreeOrder)
        assert isinstance(view, SupportsBlockKeys)
        victims: list[int] = []
        self._num_ahead = 0
        for block_id in islice(view.iter_free_block_ids(), self._lookahead):
            if block_id in self._unsaved:
                if len(victims) == room:
                    break
                victims.append(block_id)
            self._num_ahead += 1
        victims.reverse()
        return [
            block
            for block_id, keys in zip(victims, view.block_keys(victims), strict=True)
            if (block := self._unsaved.pop(block_id)).key in keys
        ]
