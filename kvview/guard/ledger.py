"""The ledger: the one place where ids are checked, references counted and calls undone.

A pool has one :class:`Ledger`; who holds blocks of it has a :class:`LedgerView`. These
form a tree: a view, under it those that guards opened from it, under each the one of
its leases. A reference stands in one of them only, so that nobody gives back what
another holds, and nothing is counted twice.

The views of the reference and of the vLLM adapter are such views; :class:`CheckedView`
makes one of a view that does not check.

Source: vLLM issue #42571 (a block that one call names twice was queued twice), #42085.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Self
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary, ref

from kvview.errors import (
    BlockNotHeldError,
    KVViewError,
    PinBudgetExceeded,
    UnknownBlockError,
    ViewClosedError,
)
from kvview.guard.not_copyable import NotCopyable
from kvview.pool import GPUBlockPoolView

Move = Callable[[list[Any]], object]
"""Tells the engine; takes what the ledger's ``blocks`` has for each id."""


Stamp = tuple[float, str | None, str | None]
"""Of a reference: when it was taken, in seconds, for which request, and where if that is traced."""


@dataclass
class GuardStats:
    """Counters since the guard was made, for a metrics exporter.

    Args:
        touched: References taken.
        freed: References given back.
        leases: Leases taken.
        active_leases: Leases whose blocks are held now.
        expired: Leases that ended by expiry.
        refused: Calls that raised.
        peak_held: Most references held at once.
    """

    touched: int = 0
    freed: int = 0
    leases: int = 0
    active_leases: int = 0
    expired: int = 0
    refused: int = 0
    peak_held: int = 0

    @property
    def held(self) -> int:
        """References held now."""
        return self.touched - self.freed


def check_block_ids(block_ids: Iterable[Any], num_blocks: int | None) -> None:
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
    """What the views of one pool share.

    Args:
        blocks: What the engine calls each block, by id; None if by an id of any size.
        null_block_id: The block that is skipped (POOL-5).
    """

    def __init__(self, blocks: Sequence[Any] | None, null_block_id: int) -> None:
        self.blocks = _AnyId() if blocks is None else blocks
        self.num_blocks = None if blocks is None else len(blocks)
        self.null_block_id = null_block_id
        self.views: WeakSet[LedgerView] = WeakSet()
        # Walks of all views: each is called before a view takes blocks out of the queue.
        self.before_touch: list[Move] = []
        self.before_free: list[Move] = []  # the same for blocks that join the queue
        self.resumed_walks: WeakSet[Any] = WeakSet()
        # For budgets, and kept only where there is one: how many views hold each block.
        self.num_holders: list[int] | None = None
        self.num_pinned = 0
        self.request_id: str | None = None  # whom the engine speaks of now, for reports
        self._token: int | None = None

    def remember(self, pool: object) -> None:
        """Be the ledger of this pool from now on.

        Raises:
            TypeError: There are no weak references to it, or it has no hash.
        """
        _LEDGERS[pool] = ref(self)
        self._token = next(_tokens)
        _POOLS[self._token] = pool

    @property
    def has_pool(self) -> bool:
        """Whether the pool is there still, also when this ledger is being collected."""
        return self._token is None or self._token in _POOLS

    def count_holders(self) -> None:
        """Know from now on how many blocks all views together hold."""
        if self.num_holders is None and self.num_blocks is not None:
            self.num_holders = [0] * self.num_blocks
            for view in self.views:
                for block_id, _, _ in view.references():
                    self.add_holder(block_id, 1)

    def add_holder(self, block_id: int, step: int) -> None:
        """Count one view more, or one less, that holds a block."""
        if self.num_holders is not None:
            before = self.num_holders[block_id]
            self.num_holders[block_id] = before + step
            self.num_pinned += (before + step > 0) - (before > 0)


_LEDGERS: WeakKeyDictionary[object, ref[Ledger]] = WeakKeyDictionary()
# Here, because the collector clears also the weak references that it collects.
_POOLS: WeakValueDictionary[int, object] = WeakValueDictionary()
_tokens = count()


def ledger_of(pool: object, make: Callable[[], Ledger]) -> Ledger:
    """The ledger of a pool, one for all its views; made when nobody has it any more."""
    try:
        known = _LEDGERS.get(pool)
        ledger = None if known is None else known()
        if ledger is None:
            ledger = make()
            ledger.remember(pool)
    except TypeError:  # no weak references, or no hash: each view has a ledger of its own
        ledger = make()
    return ledger


class LedgerView(NotCopyable):
    """A view that checks, counts in the pool's ledger, and only then tells the engine.

    1. A call that raises, whoever raises, has changed nothing (POOL-3).
    2. What reaches the engine is checked, without the null block, and held.
    3. A block that one call gives back several times reaches the engine so that its
       last mention goes alone: releases up to vLLM 0.23 queue each (POOL-2).
    4. Who subclasses it brings the walks and queries, and asks :meth:`check_open`.

    Args:
        ledger: The pool's.
        owner: Named in errors and reports.
        touch: Takes a reference on each block, all or nothing.
        free: Gives a reference back on each block.
    """

    def __init__(self, ledger: Ledger, owner: str, touch: Move, free: Move) -> None:
        self.ledger = ledger
        self.max_blocks: int | None = None
        self.clock: Callable[[], float] | None = None  # of stamps; None: none are noted
        self.caller: Callable[[], str] | None = None  # where stamps are traced: who calls
        self.stats: GuardStats | None = None
        self.leases: Collection[Any] | None = None  # of a guard's lease view: each with its job
        self.before_touch = ledger.before_touch
        self._touch, self._free = touch, free
        self._open_account(owner, None)

    def _open_account(self, owner: str, parent: LedgerView | None) -> None:
        self.owner = owner
        self.is_open = True
        self._parent = parent
        self._children: list[LedgerView] = []
        # By block id: references, and the stamp of the first. Lists where the size is
        # known: dicts cost a third more. The null block has -1, which the loops meet
        # only after they have asked for what most blocks are (benchmarks/guard.py).
        size, null = self.ledger.num_blocks, self.ledger.null_block_id
        self._held: list[int] | dict[int, int]
        self._since: list[Stamp | None] | dict[int, Stamp | None]
        self._held = defaultdict(int) if size is None else [0] * size
        self._since = {} if size is None else [None] * size
        if size is None or 0 <= null < size:
            self._held[null] = -1
        self._last_held = self._held  # what a closed view still tells
        self.ledger.views.add(self)

    def open_view(self, owner: str, max_blocks: int | None = None) -> Self:
        """The same view for another owner, who holds apart; closed together with this one.

        Args:
            owner: Named in errors and reports.
            max_blocks: How many blocks of the pool may be held, through any view, after
                a touch through this one; what the views under it allow at most.
        """
        self.check_open()
        view = object.__new__(type(self))
        for name, value in vars(self).items():
            setattr(view, name, value)  # a __dict__ filled at once makes every call 7 % slower
        view._open_account(owner, self)
        self._children.append(view)
        if max_blocks is not None:
            view.max_blocks = min(max_blocks, self.max_blocks or max_blocks)
            self.ledger.count_holders()
        return view

    # --- references ---

    def touch_blocks(self, block_ids: Sequence[int]) -> None:
        """Take one reference on each block named, once per occurrence.

        Raises:
            UnknownBlockError: An id is no block of this pool.
            PinBudgetExceeded: More than ``max_blocks`` blocks of the pool would be held.
            ViewClosedError: The view was closed.
        """
        # One loop that checks, counts and looks up; sets, Counter and itemgetter cost
        # more for small batches and as much for large ones (benchmarks/guard.py).
        ledger, held, since, stats = self.ledger, self._held, self._since, self.stats
        blocks, num_holders = ledger.blocks, ledger.num_holders
        stamp: Stamp | None = None
        if self.clock is not None:
            stamp = self.clock(), ledger.request_id, self.caller and self.caller()
        if type(block_ids) is not list:
            block_ids = list(block_ids)
        found: list[Any] = []
        num_new = 0
        try:
            for block_id in block_ids:
                if type(block_id) is not int or block_id < 0:
                    raise IndexError
                if not (times := held[block_id]):
                    held[block_id] = 1
                    if stamp is not None:
                        since[block_id] = stamp
                    if num_holders is not None:
                        if others := num_holders[block_id]:
                            num_holders[block_id] = others + 1
                        else:
                            num_holders[block_id] = 1
                            num_new += 1
                elif times > 0:
                    held[block_id] = times + 1
                else:
                    continue
                found.append(blocks[block_id])
        except IndexError:
            ledger.num_pinned += num_new
            self._undo(block_ids, len(found), -1)
            raise self._refusal(block_ids) from None
        try:
            if num_new:
                ledger.num_pinned += num_new
                self._check_budget()
            if found:
                for hear in self.before_touch:
                    hear(found)
                self._touch(found)
            else:
                self.check_open()
        except BaseException:
            self._undo(block_ids, len(found), -1)
            raise
        if stats is not None:
            stats.touched = touched = stats.touched + len(found)
            if touched - stats.freed > stats.peak_held:
                stats.peak_held = touched - stats.freed

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """Give back one reference on each block named, once per occurrence.

        Raises:
            UnknownBlockError: An id is no block of this pool.
            BlockNotHeldError: More frees than this view holds.
            ViewClosedError: The view was closed.
        """
        self.free_with(self._free, block_ids)

    def free_with(self, move: Move, block_ids: Sequence[int]) -> None:
        """Give back as ``free_blocks`` does, to an engine that takes it with ``move``."""
        ledger, held = self.ledger, self._held
        blocks, num_holders = ledger.blocks, ledger.num_holders
        if type(block_ids) is not list:
            block_ids = list(block_ids)
        found: list[Any] = []
        may_repeat = False
        num_gone = 0
        try:
            for block_id in block_ids:
                if type(block_id) is not int or block_id < 0:
                    raise IndexError
                if (times := held[block_id]) == 1:
                    held[block_id] = 0
                    if num_holders is not None:
                        if (others := num_holders[block_id]) == 1:
                            num_gone += 1
                        num_holders[block_id] = others - 1
                elif times > 1:
                    held[block_id] = times - 1
                    may_repeat = True
                elif times:
                    continue
                else:
                    raise IndexError
                found.append(blocks[block_id])
        except IndexError:
            ledger.num_pinned -= num_gone
            self._undo(block_ids, len(found), 1)
            raise self._refusal(block_ids) from None
        if num_gone:
            ledger.num_pinned -= num_gone
        try:
            for notify in ledger.before_free:
                notify(found)
            if not found:
                self.check_open()
            elif may_repeat:
                self._free_repeated(move, block_ids)
            else:
                move(found)
        except BaseException:
            self._undo(block_ids, len(found), 1)
            raise
        if self.stats is not None:
            self.stats.freed += len(found)

    def _free_repeated(self, move: Move, block_ids: list[int]) -> None:
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
            self.count_refused()
            raise ViewClosedError(
                f"POOL-10: the view of {self.owner!r} was closed; ask the engine for a new one"
            )

    def _refusal(self, block_ids: list[int]) -> KVViewError:
        """Why a call was refused."""
        try:
            self.check_open()
            self.count_refused()
            check_block_ids(block_ids, self.ledger.num_blocks)
        except KVViewError as error:
            return error
        for block_id, freed in Counter(block_ids).items():
            held = self._held[block_id]
            if block_id != self.ledger.null_block_id and freed > held:
                break
        others = self._references().get(block_id, 0) - held
        return BlockNotHeldError(
            f"POOL-4: {self.owner!r} frees block {block_id} {freed}x and holds it {held}x"
            + (f", beside {others} leased or held by a guard over it" if others else "")
        )

    def count_refused(self) -> None:
        """Count a call that raises."""
        if self.stats is not None:
            self.stats.refused += 1

    def _check_budget(self) -> None:
        ledger = self.ledger
        if self.max_blocks is not None and ledger.num_pinned > self.max_blocks:
            self.count_refused()
            raise PinBudgetExceeded(
                f"GUARD-5: with this hold of {self.owner!r} {ledger.num_pinned} blocks of the pool "
                f"would be held, its budget is {self.max_blocks} of {ledger.num_blocks}: ask "
                f"num_pinnable_blocks, free some first, or store later"
            )

    # --- reports ---

    def references(self) -> Iterator[tuple[int, int, Stamp | None]]:
        """``(block_id, references, stamp)`` of each block held, without what others hold."""
        held = self._last_held
        pairs = list(held.items()) if isinstance(held, dict) else enumerate(held)
        for block_id, times in pairs:
            if times > 0:
                yield block_id, times, self._since[block_id]

    def tree(self) -> Iterator[LedgerView]:
        """This view and all that were opened from it."""
        yield self
        for child in self._children:
            yield from child.tree()

    def _references(self) -> dict[int, int]:
        held: dict[int, int] = {}
        for view in self.tree():
            for block_id, times, _ in view.references():
                held[block_id] = held.get(block_id, 0) + times
        return held

    def held_blocks(self) -> Mapping[int, int]:
        """References of this view and all opened from it, ``{block_id: count}``.

        Costs O(pool).
        """
        self.check_open()
        return self._references()

    def close(self) -> Mapping[int, int]:
        """Close it and all opened from it, and report what they held (POOL-10)."""
        if not self.is_open:
            return {}
        still_held = self._references()
        for view in self.tree():
            if view.is_open:
                view._shut()
        if self._parent is not None and not still_held:
            self._parent._children.remove(self)
        return still_held

    def _shut(self) -> None:
        for block_id, _, _ in self.references():
            self.ledger.add_holder(block_id, -1)
        self.ledger.views.discard(self)
        self.is_open = False
        self._held = []  # no id passes from here on
        self._touch = self._free = _closed


def _closed(blocks: list[Any]) -> None:
    raise ViewClosedError("POOL-10: the view was closed; ask the engine for a new one")


class CheckedView(LedgerView):
    """A view that keeps a ledger over one that need not check or count anything.

    Args:
        view: The view below; two of it share one ledger.
        owner: Named in errors and reports.
    """

    def __init__(self, view: GPUBlockPoolView, owner: str) -> None:
        size: int | None = getattr(view, "num_blocks", None)
        null: int = getattr(view, "null_block_id", 0)
        ids = None if size is None else list(range(size))
        ledger = ledger_of(view, lambda: Ledger(ids, null))
        super().__init__(ledger, owner, view.touch_blocks, view.free_blocks)
        self._view: Any = view

    def give_back_blocks(self, block_ids: Sequence[int]) -> None:
        """As ``free_blocks``, to the head of the queue, if the view below can."""
        self.free_with(self._view.give_back_blocks, block_ids)

    def free_blocks_with_notice(
        self, block_ids: Sequence[int], on_reuse: Callable[[int], None]
    ) -> None:
        """As ``free_blocks``, and hear of each block once, if the view below can."""
        tell = self._view.free_blocks_with_notice
        self.free_with(lambda blocks: tell(blocks, on_reuse), block_ids)
