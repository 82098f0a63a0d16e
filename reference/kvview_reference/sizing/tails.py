"""The ends of prompts, for which sliding windows and states are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tail:
    """The end of a prompt, for which some layers store KV.

    Args:
        tokens: Number of stored tokens before the end; 1 for a state.
        alignment: Number of tokens; the end is rounded down to a multiple of it.
    """

    tokens: int
    alignment: int = 1


def blocks_in_tail(tail: Tail, block_size: int, num_blocks: int) -> range:
    """Return the numbers of the blocks in the tail of a prompt.

    Args:
        tail: The tail.
        block_size: Tokens of a block.
        num_blocks: Number of full blocks of the prompt.
    """
    tokens = num_blocks * block_size // tail.alignment * tail.alignment
    last = tokens // block_size
    return range(max(0, last * block_size - tail.tokens) // block_size, last)


class TailCount:
    """Counts the distinct blocks in tails.

    Args:
        tails: The tails, each counted separately.
        block_size: Tokens of a block.
    """

    def __init__(self, tails: Sequence[Tail], block_size: int) -> None:
        self._block_size = block_size
        self._held: list[tuple[Tail, set[int]]] = [(tail, set()) for tail in tails]
        self._num_blocks = 0

    def add(self, blocks: Sequence[int]) -> None:
        """Count the full blocks of a prompt, in prefix order; blocks are numbered from 0."""
        if not self._held or not blocks:
            return
        self._num_blocks = max(self._num_blocks, max(blocks) + 1)
        for tail, held in self._held:
            ends = blocks_in_tail(tail, self._block_size, len(blocks))
            held.update(blocks[ends.start : ends.stop])

    def shares(self) -> tuple[float, ...]:
        """Compute the share of the distinct blocks that are in each tail."""
        return tuple(len(held) / max(1, self._num_blocks) for _, held in self._held)
