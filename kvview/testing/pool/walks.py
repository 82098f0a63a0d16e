"""The open walks of a run, each with the state from which the model computes its items."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvview.keys import OffloadKey
from kvview.testing.pool.model import PoolModel
from kvview.testing.suites.conformance import ContractMachine


class OpenWalk:
    """A walk over the free queue, which the operations of an example continue.

    Args:
        model: The model of the pool.
        at: Number of the view that opened the walk.
        walk: The walk.
        order: The free blocks at the start, next victim first.
        has_keys: Whether the walk yields only blocks with keys, with each key.
    """

    def __init__(
        self, model: PoolModel, at: int, walk: Iterator[Any], order: list[int], has_keys: bool
    ) -> None:
        self.at = at
        self.ahead = [(block, model.joined[block]) for block in order]
        self._model = model
        self._walk = walk
        self._has_keys = has_keys
        self._began = model.now
        self._block: int | None = None  # whose keys the walk is yielding
        self._yielded: list[OffloadKey] = []

    def next(self) -> Any:
        """Take one item of the walk; None at its end."""
        return next(self._walk, None)

    def _next_block(self) -> tuple[int | None, list[OffloadKey]]:
        """Return the next block of the walk, and the keys of this block that may come next."""
        model = self._model
        block = model.next_block(self.ahead)
        while self._has_keys and block is not None and block not in model.keys:
            self.ahead.pop(0)
            block = model.next_block(self.ahead)
        if block != self._block:
            self._block = block
            self._yielded.clear()
        return block, [] if block is None else model.next_keys(block, self._yielded)

    def advance(self, machine: ContractMachine) -> int | None:
        """Take one item and compare it; returns the block of the item, or None at the end."""
        block, keys = self._next_block()
        if self._yielded and not keys:  # the walk has yielded every key of its block
            self.ahead.pop(0)
            block, keys = self._next_block()
        got = machine.call(self, "next")
        if got is None:
            item = (block, keys[0]) if self._has_keys and block is not None else block
            machine.equal(got, item, "a walk continues to its end", "POOL-7")
            return None
        found = int(got[0]) if self._has_keys else int(got)
        if found != block and self._model.was_moved_since(found, self._began, self.at):
            return found
        expected = [(block, key) for key in keys] if self._has_keys else [block]
        is_true = got in expected
        machine.true(is_true, "a walk yields the truth", got, f"one of {expected}", "POOL-7")
        if self._has_keys:
            self._yielded.append(got[1])
        else:
            self.ahead.pop(0)
        return found
