"""The ledger, which checks ids, counts references and undoes calls that fail.

A pool has one :class:`Ledger`, and each owner of references has a :class:`LedgerView`. The ledger
views form a tree: the view of a guard is a child of the view that it guards. A reference is counted
in one ledger view only, so no owner can free another owner's reference, and no reference is counted
twice.

The views of the reference and of the vLLM adapter are ledger views; :class:`CheckedView` makes a
ledger view from a view that does not check.

Source: vLLM issue #42571 (a block that one call names twice was queued twice), #42085.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, count, islice
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
"""A call of the engine, with entries of the ledger's ``blocks`` as arguments."""


Stamp = tuple[float, str | None, str | None]
"""The origin of a reference: time in seconds, request, and the caller's line (with a trace)."""


@dataclass
class GuardStats:
    """Counters since the guard was made, for a metrics exporter.

    Args:
        touched: References taken.
        freed: References released.
        refused: Calls that raised.
        peak_held: Maximum number of references that were held at the same time.
    """

    touched: int = 0
    freed: int = 0
    refused: int = 0
    peak_held: int = 0

    @property
    def held(self) -> int:
        """References held now."""
        return self.touched - self.freed


def check_block_ids(block_ids: Iterable[Any], num_blocks: int | None) -> None:
    """Raise ``UnknownBlockError`` unless each id is an int that names a block (POOL-4)."""
    last = float("inf") if num_blocks is None else num_blocks - 1
    for block_id in block_ids:
        # A negative index would silently mean a block at the end.
        if type(block_id) is not int or not 0 <= block_id <= last:
            raise UnknownBlockError(
                f"POOL-4: {block_id!r} ({type(block_id).__name__}) is not a block of this pool; "
                f"block ids are ints from 0 to {last:.0f}"
            )


class _AnyId:
    """The blocks of a pool of unknown size, in which each id represents its block."""

    def __getitem__(self, block_id: int) -> int:
        return block_id


class Ledger:
    """The state that the ledger views of one pool share.

    Args:
        blocks: The engine's object for each block, by id; None if the pool's size is unknown.
        null_block_id: The block that is skipped (POOL-5).
    """

    def __init__(self, blocks: Sequence[Any] | None, null_block_id: int) -> None:
        self.blocks = _AnyId() if blocks is None else blocks
        self.num_blocks = None if blocks is None else len(blocks)
        self.null_block_id = null_block_id
        self.views: WeakSet[LedgerView] = WeakSet()
        # Callbacks of open walks of all views: called before a view takes blocks out of the queue,
        self.before_touch: list[Move] = []
        self.before_free: list[Move] = []  # and before blocks join the queue.
        # The number of views that hold each block; kept only if a view has a budget.
        self.num_holders: list[int] | None = None
        self.num_pinned = 0
        self.request_id: str | None = None  # the request that the engine named, for reports
        self._token: int | None = None

    def remember(self, pool: object) -> None:
        """Register this ledger as that of a pool.

        Raises:
            TypeError: The pool cannot be weakly referenced or hashed.
        """
        _LEDGERS[pool] = ref(self)
        self._token = next(_tokens)
        _POOLS[self._token] = pool

    @property
    def has_pool(self) -> bool:
        """Whether the pool is alive; correct even while this ledger is being garbage-collected."""
        return self._token is None or self._token in _POOLS

    def count_holders(self) -> None:
        """Start to count the blocks that all views hold together."""
        if self.num_holders is None and self.num_blocks is not None:
            self.num_holders = [0] * self.num_blocks
            for view in self.views:
                for block_id, _, _ in view.references():
                    self.add_holder(block_id, 1)

    def add_holder(self, block_id: int, step: int) -> None:
        """Add ``step``, 1 or -1, to the number of views that hold a block."""
        if self.num_holders is not None:
            before = self.num_holders[block_id]
            self.num_holders[block_id] = before + step
            self.num_pinned += (before + step > 0) - (before > 0)


_LEDGERS: WeakKeyDictionary[object, ref[Ledger]] = WeakKeyDictionary()
# At module level, because the collector also clears the weak references of collected objects.
_POOLS: WeakValueDictionary[int, object] = WeakValueDictionary()
_tokens = count()


def ledger_of(pool: object, make: Callable[[], Ledger]) -> Ledger:
    """Return the ledger that all views of a pool share; ``make`` builds it for the first view."""
    try:
        known = _LEDGERS.get(pool)
        ledger = None if known is None else known()
        if ledger is None:
            ledger = make()
            ledger.remember(pool)
    except TypeError:  # the pool has no weak references or no hash, so each view has its own ledger
        ledger = make()
    return ledger


class LedgerView(NotCopyable):
    """A view that checks each call and counts it in the pool's ledger before it calls the engine.

    1. A call that raises has changed nothing, even if the engine raised (POOL-3).
    2. The engine receives checked blocks only, without the null block.
    3. If one call names a block several times, the engine receives the last mention in a separate
       call, because vLLM up to 0.23 queues the block at every mention (POOL-2).
    4. A subclass adds walks and queries, each of which calls :meth:`check_open`.

    Args:
        ledger: The ledger of the pool.
        owner: Name of the owner, for errors and reports.
        touch: Call of the engine that takes a reference on each block, or on no block if it raises.
        free: Call of the engine that releases a reference on each block.
    """

    def __init__(self, ledger: Ledger, owner: str, touch: Move, free: Move) -> None:
        self.ledger = ledger
        self.max_blocks: int | None = None
        self.clock: Callable[[], float] | None = None  # of stamps; None: no stamps
        self.caller: Callable[[], str] | None = None  # gets the caller's line, if traced
        self.stats: GuardStats | None = None
        self.before_touch = ledger.before_touch
        self._touch, self._free = touch, free
        self._open_account(owner, None)

    def _open_account(self, owner: str, parent: LedgerView | None) -> None:
        self.owner = owner
        self.is_open = True
        self._parent = parent
        self._children: list[LedgerView] = []
        # By block id: the number of references, and the stamp of the first one. Lists if the pool's
        # size is known, because dicts cost a third more. The count of the null block is -1, which
        # the loops test last, because most blocks are not null.
        size, null = self.ledger.num_blocks, self.ledger.null_block_id
        self._held: list[int] | dict[int, int]
        self._since: list[Stamp | None] | dict[int, Stamp | None]
        self._held = defaultdict(int) if size is None else [0] * size
        self._since = {} if size is None else [None] * size
        if size is None or 0 <= null < size:
            self._held[null] = -1
        self._last_held = self._held  # for reports of a closed view
        self.ledger.views.add(self)

    def open_view(self, owner: str, max_blocks: int | None = None) -> Self:
        """Open a view for another owner, with separate references; it is closed with this view.

        Args:
            owner: Name of the owner, for errors and reports.
            max_blocks: Maximum of blocks of the pool that all views together may hold after a touch
                through the new view. The smallest limit of the view and its ancestors applies.
        """
        self.check_open()
        view = object.__new__(type(self))
        for name, value in vars(self).items():
            setattr(view, name, value)  # with a __dict__ update every later call is 7 % slower
        view._open_account(owner, self)
        self._children.append(view)
        if max_blocks is not None:
            view.max_blocks = min(max_blocks, self.max_blocks or max_blocks)
            self.ledger.count_holders()
        return view

    # --- references ---

    def touch_blocks(self, block_ids: Sequence[int]) -> None:  # noqa: PLR0912
        """Take one reference on each block, once per occurrence.

        Raises:
            UnknownBlockError: An id is not a block of this pool.
            PinBudgetExceeded: More than ``max_blocks`` blocks of the pool would be held.
            ViewClosedError: The view was closed.
        """
        # One loop checks, counts and looks up, because sets, Counter and itemgetter cost more
        # for small batches and the same for large ones.
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
                for notify in self.before_touch:
                    notify(found)
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
        """Release one reference on each block, once per occurrence.

        Raises:
            UnknownBlockError: An id is not a block of this pool.
            BlockNotHeldError: The call would release more references than this view holds.
            ViewClosedError: The view was closed.
        """
        self.free_with(self._free, block_ids)

    def free_with(self, move: Move, block_ids: Sequence[int]) -> None:  # noqa: PLR0912
        """Release references like ``free_blocks``, but through another call of the engine."""
        # One loop, as in touch_blocks, because a call for each block costs more.
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
        """Free each block once per mention, the last mentions in a separate call (POOL-11)."""
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
        """Add ``step`` to the counts of the first ``num_done`` blocks; skip the null block."""
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
                f"POOL-10: the view of {self.owner!r} was closed; use the view that was bound last"
            )

    def _refusal(self, block_ids: list[int]) -> KVViewError:
        """Return the error of a call that was refused."""
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
            + (f"; {others} more are held by a guard over it" if others else "")
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
                f"GUARD-3: with this hold of {self.owner!r}, {ledger.num_pinned} blocks of the "
                f"pool would be held, but its budget is {self.max_blocks} of {ledger.num_blocks}; "
                f"check num_pinnable_blocks first, free some blocks, or store later"
            )

    # --- reports ---

    def references(self) -> Iterator[tuple[int, int, Stamp | None]]:
        """Yield ``(block_id, references, stamp)`` of each block that this view itself holds."""
        held = self._last_held
        pairs = held.items() if isinstance(held, dict) else compress(enumerate(held), held)
        for block_id, times in [*pairs]:
            if times > 0:
                yield block_id, times, self._since[block_id]

    def tree(self) -> Iterator[LedgerView]:
        """Yield this view and all views that were opened from it."""
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
        """Return the references of this view and all views opened from it, ``{block_id: count}``.

        Costs O(pool).
        """
        self.check_open()
        return self._references()

    def close(self) -> Mapping[int, int]:
        """Close this view and all views opened from it; returns their references (POOL-10)."""
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
        self._held = []  # so that no id is valid any more
        self._touch = self._free = _closed


def _closed(blocks: list[Any]) -> None:
    raise ViewClosedError("POOL-10: the view was closed; use the view that was bound last")


class CheckedView(LedgerView):
    """A view with a ledger, over a view that may not check or count.

    Args:
        view: The view below; all checked views of this view share one ledger.
        owner: Name of the owner, for errors and reports.
    """

    def __init__(self, view: GPUBlockPoolView, owner: str) -> None:
        size: int | None = getattr(view, "num_blocks", None)
        null: int = getattr(view, "null_block_id", 0)
        ids = None if size is None else list(range(size))
        ledger = ledger_of(view, lambda: Ledger(ids, null))
        super().__init__(ledger, owner, view.touch_blocks, view.free_blocks)
        self._view: Any = view

    def give_back_blocks(self, block_ids: Sequence[int]) -> None:
        """Release blocks to the head of the queue, if the view below supports this (POOL-12)."""
        self.free_with(self._view.give_back_blocks, block_ids)
