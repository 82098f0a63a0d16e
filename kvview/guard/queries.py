"""The optional queries of a guard, which has the queries of the view under it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvview.errors import KVViewError
from kvview.guard.home import AtHome
from kvview.guard.ledger import LedgerView, check_block_ids
from kvview.keys import OffloadKey

_QUERIES = (
    "num_free_blocks",
    "is_free",
    "block_keys",
    "find_cached_block",
    "primary_keys",
    "iter_free_block_ids",
    "give_back_blocks",
)


class GuardedQueries(AtHome):
    """The queries of :class:`~kvview.GuardedView` beyond the core.

    For a type checker, a guard has all queries. At run time, ``isinstance(guard, Supports...)`` is
    True only for the queries of the view below.
    """

    num_blocks: int
    null_block_id: int
    _below: Any  # the view that was guarded

    if TYPE_CHECKING:

        def num_free_blocks(self) -> int: ...
        def is_free(self, block_id: int) -> bool: ...
        def block_keys(self, block_ids: Sequence[int]) -> list[tuple[OffloadKey, ...]]: ...
        def primary_keys(self, block_ids: Sequence[int]) -> list[OffloadKey | None]: ...
        def find_cached_block(self, key: OffloadKey) -> int | None: ...
        def iter_free_block_ids(self) -> Iterator[int]: ...
        def give_back_blocks(self, block_ids: Sequence[int]) -> None: ...
        def num_pinnable_blocks(self) -> int: ...

    def _offer_queries(self) -> None:
        # Set on the instance, because isinstance also finds methods of the class.
        names = [name for name in _QUERIES if hasattr(self._below, name)]
        if self._view.max_blocks is not None or hasattr(self._below, "num_pinnable_blocks"):
            names.append("num_pinnable_blocks")
        for name in names:
            setattr(self, name, getattr(self, f"_{name}", partial(self._query, name)))
        ledger = self._view.ledger
        if ledger.num_blocks is not None:
            self.num_blocks, self.null_block_id = ledger.num_blocks, ledger.null_block_id

    def _query(self, name: str, *args: Any, **named: Any) -> Any:
        self._enter()
        try:
            return self._ask(name, *args, **named)
        except KVViewError:
            self.stats.refused += 1
            raise

    def _ask(self, name: str, *args: Any, **named: Any) -> Any:
        """Check the ids (POOL-4), because the view below may not do so, and query that view."""
        below = self._below
        if isinstance(below, GuardedQueries):
            below._enter()
            return below._ask(name, *args, **named)
        if not isinstance(below, LedgerView):
            num_blocks = self._view.ledger.num_blocks
            if name == "is_free":
                check_block_ids([*args, *named.values()], num_blocks)
            elif name in ("block_keys", "primary_keys"):
                check_block_ids([*args, *named.values()][0], num_blocks)
        return getattr(below, name)(*args, **named)

    def _give_back_blocks(self, block_ids: Sequence[int]) -> None:
        self._enter()
        view: Any = self._view  # of the same class as the view below
        view.give_back_blocks(block_ids)

    def _iter_free_block_ids(self) -> Iterator[int]:
        self._enter()
        for block_id in self._below.iter_free_block_ids():
            if block_id != self._view.ledger.null_block_id:
                yield block_id
                self._enter()

    def _num_pinnable_blocks(self) -> int:
        self._enter()
        allowed = []
        if self._view.max_blocks is not None:
            allowed.append(self._view.max_blocks - self._view.ledger.num_pinned)
        if hasattr(self._below, "num_pinnable_blocks"):
            allowed.append(self._below.num_pinnable_blocks())
        return max(0, min(allowed))
