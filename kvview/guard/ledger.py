"""The ledger: the one place where ids are checked, references counted and calls undone.

A pool has one :class:`Ledger`, and everyone who holds blocks of it an :class:`Account`.
Accounts form a tree: a view's, under it those of the guards over that view, under
each the one of its leases. A reference stands in one account only, so that nobody
gives back what another holds, and nothing is counted twice.

``BlockPoolView`` of the reference, ``VLLMBlockPoolView`` and, over a view that counts
nothing itself, :class:`CountedView` use it.

Source: vLLM issue #42571 (a block that one call names twice was queued twice), #42085.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn, Protocol, Self, SupportsIndex
from weakref import WeakKeyDictionary, WeakSet, ref

from kvview.errors import (
    BlockNotHeldError,
    KVViewError,
    NotCopyableError,
    PinBudgetExceeded,
    UnknownBlockError,
    ViewClosedError,
)
from kvview.pool import GPUBlockPoolView

Move = Callable[[list[Any]], object]
"""Tells the engine; takes what the ledger's ``blocks`` has for each id."""

Stamp = float | tuple[float, str]
"""When a reference was taken, and where if that is traced."""


@dataclass
class GuardStats:
    """Counters since the guard was made, for a metrics exporter.

    Args:
        touched: References taken.
        freed: References given back.
        leases: Leases taken.
        expired: Leases that ended by expiry.
        refused: Calls that raised.
        peak_held: Most references held at once.
    """

    touched: int = 0
    freed: int = 0
    leases: int = 0
    expired: int = 0
    refused: int = 0
    peak_held: int = 0


def check_block_ids(block_ids: Iterable[object], num_blocks: int | None) -> None:
    """Raise ``UnknownBlockError`` unless each is an int that names a block (POOL-4)."""
    last = float("inf") if num_blocks is None else num_blocks - 1
    for block_id in block_ids:
        # A negative id would silently name a block from the end.
        if type(block_id) is not int or not 0 <= block_id <= last:
            raise UnknownBlockError(
                f"POOL-4: {block_id!r} ({type(block_id).__name__}) is no block of this pool; "
                f"block ids are ints from 0 to {last:.0f}"
            )


class _AnyId:
    """Stands for the blocks of a pool whose size nobody knows."""

    def __getitem__(self, block_id: int) -> int:
        return block_id


class Ledger:
    """What the accounts of one pool share.

    Args:
        blocks: What the engine calls each block, by id; None if by an id of any size.
        null_block_id: The block that is skipped (POOL-5).
    """

    def __init__(self, blocks: Sequence[Any] | None, null_block_id: int) -> None:
        self.blocks = _AnyId() if blocks is None else blocks
        self.num_blocks = None if blocks is None else len(blocks)
        self.null_block_id = null_block_id
        self.accounts: WeakSet[Account] = WeakSet()
        # For budgets, and kept only where there is one: accounts that hold each block.
        self.num_holders: list[int] | None = None
        self.num_pinned = 0

    def count_holders(self) -> None:
        """Know from now on how many blocks all accounts together hold."""
        if self.num_holders is None and self.num_blocks is not None:
            self.num_holders = [0] * self.num_blocks
            for account in self.accounts:
                for block_id, _, _ in account.references():
                    self.add_holder(block_id, 1)

    def add_holder(self, block_id: int, step: int) -> None:
        """Count one account more, or one less, that holds a block."""
        if self.num_holders is not None:
            before = self.num_holders[block_id]
            self.num_holders[block_id] = before + step
            self.num_pinned += (before + step > 0) - (before > 0)


_LEDGERS: WeakKeyDictionary[object, ref[Ledger]] = WeakKeyDictionary()


def ledger_of(pool: object, make: Callable[[], Ledger]) -> Ledger:
    """The ledger of a pool, one for all its views; made when nobody has it any more."""
    try:
        known = _LEDGERS.get(pool)
        ledger = None if known is None else known()
        if ledger is None:
            ledger = make()
            _LEDGERS[pool] = ref(ledger)
    except TypeError:  # no weak references, or no hash: each view has a ledger of its own
        ledger = make()
    return ledger


class NotCopyable:
    """What can not be copied or pickled: a copy would give back what it never took."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise NotCopyableError(
            f"GUARD-6: a {type(self).__name__} can not be copied or pickled, since one reference "
            f"is given back once: hand block ids on, and open a guard of its own there"
        )


class Account(NotCopyable):
    """What one owner holds.

    1. A call that raises, whoever raises, leaves the account as it was (POOL-3).
    2. What reaches the engine is checked, without the null block, and held.
    3. A block that one call gives back several times reaches the engine so that its
       last mention goes alone: releases up to vLLM 0.23 queue each (POOL-2).

    Args:
        ledger: The pool's.
        owner: Named in errors and reports.
        touch: Takes a reference on each block, all or nothing.
        free: Gives a reference back on each block.
        parent: The account of the view or guard under it.
        max_blocks: How many blocks the pool's accounts together may hold after a touch
            through this one; None for its parent's limit.
    """

    def __init__(
        self,
        ledger: Ledger,
        owner: str,
        touch: Move,
        free: Move,
        *,
        parent: Account | None = None,
        max_blocks: int | None = None,
    ) -> None:
        self.ledger = ledger
        self.owner = owner
        self.is_open = True
        self.parent = parent
        self.stamp: Callable[[], Stamp] | None = None if parent is None else parent.stamp
        self.stats = GuardStats()
        self.children: list[Account] = []
        limits = [max_blocks, None if parent is None else parent.max_blocks]
        self.max_blocks: int | None = min((limit for limit in limits if limit is not None), default=None)
        self._touch: Move = touch
        self._free: Move = free
        # By block id: references, and the stamp of the first. Lists where the size is
        # known: dicts cost a third more. The null block has -1, which no test of the
        # loops has to ask for as long as blocks are real (benchmarks/guard.py).
        size, null = ledger.num_blocks, ledger.null_block_id
        self._held: list[int] | dict[int, int]
        self._since: list[Stamp | None] | dict[int, Stamp | None]
        self._held = defaultdict(int) if size is None else [0] * size
        self._since = {} if size is None else [None] * size
        if size is None or 0 <= null < size:
            self._held[null] = -1
        self._last_held = self._held  # what a closed account still tells
        if self.max_blocks is not None:
            ledger.count_holders()
        ledger.accounts.add(self)
        if parent is not None:
            parent.children.append(self)

    def open(self, owner: str, max_blocks: int | None = None) -> Account:
        """An account under this one, which it closes with itself."""
        self.check_open()
        return Account(
            self.ledger, owner, self._touch, self._free, parent=self, max_blocks=max_blocks
        )

    # --- references ---

    def touch(self, block_ids: Sequence[int]) -> None:
        """Take one reference on each block named, once per occurrence.

        Raises:
            UnknownBlockError: An id is no block of this pool.
            PinBudgetExceeded: The pool's accounts would hold more than ``max_blocks``.
            ViewClosedError: The account was closed.
        """
        # One loop that checks, counts and looks up; sets, Counter and itemgetter cost
        # more for small batches and as much for large ones (benchmarks/guard.py).
        ledger, held, since = self.ledger, self._held, self._since
        blocks, num_holders = ledger.blocks, ledger.num_holders
        stamp = None if self.stamp is None else self.stamp()
        block_ids = list(block_ids)
        found: list[Any] = []
        num_new = 0
        try:
            for block_id in block_ids:
                if type(block_id) is not int or block_id < 0:
                    raise IndexError
                if not (count := held[block_id]):
                    held[block_id] = 1
                    since[block_id] = stamp
                    if num_holders is not None:
                        if not num_holders[block_id]:
                            num_new += 1
                        num_holders[block_id] += 1
                elif count > 0:
                    held[block_id] = count + 1
                else:
                    continue
                found.append(blocks[block_id])
        except IndexError:
            ledger.num_pinned += num_new
            self._undo(block_ids, len(found), -1)
            raise self._refusal(block_ids) from None
        ledger.num_pinned += num_new
        try:
            if num_new and self.num_pinnable_blocks() < 0:
                raise self._over_budget()
            if found:
                self._touch(found)
            else:
                self.check_open()
        except BaseException:
            self._undo(block_ids, len(found), -1)
            raise
        stats = self.stats
        stats.touched += len(found)
        if stats.touched - stats.freed > stats.peak_held:
            stats.peak_held = stats.touched - stats.freed

    def free(self, block_ids: Sequence[int], move: Move | None = None) -> None:
        """Give back one reference on each block named, once per occurrence.

        Args:
            block_ids: Blocks in eviction order: the first is evicted first.
            move: How the engine takes them, if not as ``free`` does.

        Raises:
            UnknownBlockError: An id is no block of this pool.
            BlockNotHeldError: More than this account holds.
            ViewClosedError: The account was closed.
        """
        ledger, held = self.ledger, self._held
        blocks, num_holders = ledger.blocks, ledger.num_holders
        block_ids = list(block_ids)
        found: list[Any] = []
        may_repeat = False
        num_gone = 0
        try:
            for block_id in block_ids:
                if type(block_id) is not int or block_id < 0:
                    raise IndexError
                if (count := held[block_id]) == 1:
                    held[block_id] = 0
                    if num_holders is not None:
                        num_holders[block_id] -= 1
                        if not num_holders[block_id]:
                            num_gone += 1
                elif count > 1:
                    held[block_id] = count - 1
                    may_repeat = True
                elif count:
                    continue
                else:
                    raise IndexError
                found.append(blocks[block_id])
        except IndexError:
            ledger.num_pinned -= num_gone
            self._undo(block_ids, len(found), 1)
            raise self._refusal(block_ids) from None
        ledger.num_pinned -= num_gone
        try:
            if not found:
                self.check_open()
            elif may_repeat:
                self._free_repeated(block_ids, move or self._free)
            else:
                (move or self._free)(found)
        except BaseException:
            self._undo(block_ids, len(found), 1)
            raise
        self.stats.freed += len(found)

    def _free_repeated(self, block_ids: list[int], move: Move) -> None:
        """Surplus mentions go first, none of them the last; then the last ones (POOL-11)."""
        blocks, null = self.ledger.blocks, self.ledger.null_block_id
        last = dict.fromkeys(reversed(block_ids))
        last.pop(null, None)
        counts = Counter(block_ids)
        counts.subtract(list(last))
        del counts[null]
        surplus = [blocks[block_id] for block_id in counts.elements()]
        if surplus:
            self._free(surplus)
        try:
            move([blocks[block_id] for block_id in reversed(last)])
        except BaseException:
            if surplus:
                self._touch(surplus)
            raise

    def _undo(self, block_ids: list[int], num_done: int, step: int) -> None:
        """Count the first ``num_done`` blocks, the null block aside, back by ``step``."""
        null, held = self.ledger.null_block_id, self._held
        for block_id in islice((b for b in block_ids if b != null), num_done):
            held[block_id] += step
            if held[block_id] == max(step, 0):
                self.ledger.add_holder(block_id, step)

    # --- refusals ---

    def check_open(self) -> None:
        """Raise ``ViewClosedError`` after :meth:`close` (POOL-10)."""
        if not self.is_open:
            self.stats.refused += 1
            raise ViewClosedError(
                f"POOL-10: the view of {self.owner!r} was closed; ask the engine for a new one"
            )

    def _refusal(self, block_ids: list[int]) -> KVViewError:
        """Why a call was refused."""
        try:
            self.check_open()
            self.stats.refused += 1
            check_block_ids(block_ids, self.ledger.num_blocks)
        except KVViewError as error:
            return error
        for block_id, freed in Counter(block_ids).items():
            held = self._held[block_id]
            if block_id != self.ledger.null_block_id and freed > held:
                break
        others = self.held_blocks().get(block_id, 0) - held
        return BlockNotHeldError(
            f"POOL-4: {self.owner!r} frees block {block_id} {freed}x and holds it {held}x"
            + (f", beside {others} leased or held by a guard over it" if others else "")
        )

    def num_pinnable_blocks(self) -> int:
        """Blocks that no account holds and this one may; negative: too many are held."""
        return 0 if self.max_blocks is None else self.max_blocks - self.ledger.num_pinned

    def _over_budget(self) -> PinBudgetExceeded:
        self.stats.refused += 1
        return PinBudgetExceeded(
            f"GUARD-5: with this hold of {self.owner!r} {self.ledger.num_pinned} blocks would be "
            f"held of the pool, the budget is {self.max_blocks} of {self.ledger.num_blocks}: "
            f"ask num_pinnable_blocks, free some first, or store later"
        )

    # --- reports ---

    def references(self) -> Iterator[tuple[int, int, Stamp | None]]:
        """``(block_id, references, stamp)`` of each block that this account alone holds."""
        held = self._last_held
        pairs = list(held.items()) if isinstance(held, dict) else enumerate(held)
        for block_id, count in pairs:
            if count > 0:
                yield block_id, count, self._since[block_id]

    def tree(self) -> Iterator[Account]:
        """This account and all under it."""
        yield self
        for child in self.children:
            yield from child.tree()

    def held_blocks(self) -> dict[int, int]:
        """References of this account and all under it, ``{block_id: count}``; costs O(pool)."""
        held: dict[int, int] = {}
        for account in self.tree():
            for block_id, count, _ in account.references():
                held[block_id] = held.get(block_id, 0) + count
        return held

    def close(self) -> dict[int, int]:
        """Close it and all under it, and report what they held (POOL-10)."""
        if not self.is_open:
            return {}
        still_held = self.held_blocks()
        for account in self.tree():
            if account.is_open:
                account._shut()
        if self.parent is not None and not still_held:
            self.parent.children.remove(self)
        return still_held

    def _shut(self) -> None:
        for block_id, _, _ in self.references():
            self.ledger.add_holder(block_id, -1)
        self.ledger.accounts.discard(self)
        self.is_open = False
        self._held = []  # no id passes from here on
        self._touch = self._free = _closed


def _closed(blocks: list[Any]) -> None:
    raise ViewClosedError("POOL-10: the view was closed; ask the engine for a new one")


class LedgerView(GPUBlockPoolView, Protocol):
    """A view that counts in a ledger, and opens others beside it in the same one."""

    @property
    def account(self) -> Account:
        """What is held through this view, and through those opened from it."""
        ...

    def open_view(self, owner: str, max_blocks: int | None = None) -> LedgerView:
        """The same view with an account of its own, under this one's."""
        ...


class CountedView:
    """A view that keeps a ledger over one that does not check or count.

    Args:
        view: The view below.
        owner: Named in errors and reports.
    """

    def __init__(self, view: GPUBlockPoolView, owner: str) -> None:
        size: int | None = getattr(view, "num_blocks", None)
        null: int = getattr(view, "null_block_id", 0)
        ids = None if size is None else list(range(size))
        ledger = ledger_of(view, lambda: Ledger(ids, null))
        self.account = Account(ledger, owner, view.touch_blocks, view.free_blocks)
        self._view: Any = view

    def open_view(self, owner: str, max_blocks: int | None = None) -> Self:
        view = copy(self)
        view.account = self.account.open(owner, max_blocks)
        return view

    def touch_blocks(self, block_ids: Sequence[int]) -> None:
        self.account.touch(block_ids)

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        self.account.free(block_ids)

    def give_back_blocks(self, block_ids: Sequence[int]) -> None:
        self.account.free(block_ids, self._view.give_back_blocks)

    def free_blocks_with_notice(
        self, block_ids: Sequence[int], on_reuse: Callable[[int], None]
    ) -> None:
        self.account.free(
            block_ids, lambda blocks: self._view.free_blocks_with_notice(blocks, on_reuse)
        )

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, Any]]:
        found: Iterator[tuple[int, Any]] = self._view.iter_free_block_ids_with_hash()
        return found
