"""The calls of an engine, of several views and of walks on one pool, compared with its model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize

from kvview.errors import (
    BlockNotHeldError,
    NotAnOffloadKeyError,
    UnknownBlockError,
    ViewClosedError,
)
from kvview.keys import OffloadKey, make_offload_key
from kvview.testing.pool.draws import NUMBER, any_one, from_state, some, some_of_one, wrong_ids
from kvview.testing.pool.model import PoolModel, key_sets
from kvview.testing.pool.walks import OpenWalk
from kvview.testing.results.law_broken import short_repr
from kvview.testing.suites.capability import Capability as C
from kvview.testing.suites.conformance import ContractMachine, Needs, observable, operation

_SIZES = (16, 20, 24, 40, 64, 300, 700)
_WALK_MOVES = ("read", "hold", "touch", "read 40")
_NOT_KEYS = (bytes(range(32)), b"", bytes(4), b"h\0\1\0\0")

_OPEN_VIEW = any_one(lambda self: self.open_views())
_VICTIMS = from_state(
    st.tuples(st.integers(0, 20), NUMBER),
    lambda self, drawn: self.model.order()[drawn[0] : sum(drawn)],
)
"""Neighbours in the queue, as a connector touches, and a request hits."""
_HOLDS = some_of_one(
    lambda self: self.open_views(),
    lambda self, at: self.with_null(self.model.held[at].elements()),
)


class _Lists:
    """The walks of a view as lists.

    Args:
        view: The view.
        most: Maximum number of items of a walk, because a wrong walk may not end.
    """

    def __init__(self, view: Any, most: int) -> None:
        self._view = view
        self._most = most

    def __getattr__(self, method: str) -> Callable[[], list[Any]]:
        return lambda: list(islice(getattr(self._view, method)(), self._most))


class PoolMachine(ContractMachine):
    """Makes the calls of the engine, of views and of walks on one pool."""

    laws = tuple(f"POOL-{number}" for number in range(1, 13))
    needs: ClassVar[Needs] = {
        "POOL-6": (C.CACHE,),
        "POOL-7": (C.CACHE,),
        "POOL-8": (C.CACHE,),
        "POOL-9": (C.RESET,),
        "POOL-10": (C.CLOSE,),
        "POOL-11": (C.CACHE,),
        "POOL-12": (C.GIVE_BACK,),
    }

    @initialize(
        num_blocks=st.sampled_from(_SIZES),
        cached=st.sampled_from((0.0, 0.5, 1.0)),
    )
    def start(self, num_blocks: int, cached: float = 0.0) -> None:
        """Make a pool in which a share of the blocks are free and have keys."""
        self.num_blocks = num_blocks
        self.pool = self.call(self.suite, "make", num_blocks)
        self.model = PoolModel(num_blocks, self.pool.null_block_id)
        self.model.add_view()
        self.views: list[Any] = [self.pool.view]
        self.walks: list[OpenWalk] = []
        self.num_hashes = 0
        self.recent_keys: deque[OffloadKey] = deque(maxlen=12)
        if self.can(C.CACHE):
            self.serve(int(cached * len(self.model.joined)), True, True, 1)

    # --- the state, for the strategies ---

    def open_views(self) -> list[int]:
        """Return the numbers of the views that are open."""
        return [at for at in range(len(self.views)) if at not in self.model.closed]

    def a_view(self) -> Any:
        """Return the newest open view, for queries whose result is the same in every view."""
        return self.views[self.open_views()[-1]]

    def frees(self) -> list[str]:
        """Return the names of the view's methods that release blocks."""
        return ["free_blocks", *["give_back_blocks"] * self.can(C.GIVE_BACK)]

    def with_null(self, blocks: Iterable[int]) -> list[int]:
        """Return blocks and the null block."""
        return [*blocks, *([] if self.model.null is None else [self.model.null])]

    def listed(self, view: Any, method: str) -> list[Any]:
        """Return all items of a walk."""
        found: list[Any] = self.call(self.lists(view), method)
        return found

    def lists(self, view: Any) -> _Lists:
        """Return the walks of a view as lists."""
        return _Lists(view, 9 * self.num_blocks)

    # --- the engine ---

    @operation(
        "POOL-1",
        when=lambda self: self.model.joined,
        number=NUMBER,
    )
    def allocate(self, number: int) -> None:
        """Allocate, and compare the blocks with the head of the queue."""
        self._allocate(number)

    def _allocate(self, number: int) -> list[int]:
        number, queue = min(number, len(self.model.joined)), None
        if self.can(C.FREE_ORDER):
            queue = self.listed(self.a_view(), "iter_free_block_ids")
        blocks = list(self.call(self.pool, "allocate", number))
        self.equal(len(blocks), number, "an allocation returns as many blocks as requested")
        if queue is not None:
            self.equal(blocks, queue[:number], "the queue is in the order of allocation", "POOL-6")
        self.judge(self.model.allocated(blocks), blocks)
        return blocks

    @operation(
        "POOL-1",
        when=lambda self: self.model.engine,
        blocks=some(lambda self: self.model.engine.elements()),
    )
    def release(self, blocks: Sequence[int]) -> None:
        """Release some references of the engine."""
        self._release(blocks)

    def _release(self, blocks: Sequence[int]) -> None:
        self.blame_blocks(blocks)
        self.call(self.pool, "release", blocks)
        self.model.give(blocks, self.model.engine)

    @operation(
        "POOL-1",
        C.CACHE,
        when=lambda self: self.model.joined,
        number=NUMBER,
        is_new=st.booleans(),
        is_short=st.booleans(),
        step=st.sampled_from((1, -1, 3)),
    )
    def serve(self, number: int, is_new: bool, is_short: bool, step: int) -> None:
        """Run a request with new tokens or with those of others; a short request ends at once."""
        blocks = self._allocate(number)
        first = self.num_hashes if is_new else 0
        self.num_hashes = max(self.num_hashes, first + len(blocks))
        self._cache(blocks, [b"hash %d" % (first + place) for place in range(len(blocks))], 0)
        if is_short:
            blocks = [block for at in range(abs(step)) for block in blocks[at :: abs(step)]]
            blocks = blocks[:: 1 if step > 0 else -1]
            self._release(blocks)

    def can_cache(self) -> list[int]:
        """Return the blocks of the engine that may receive a key."""
        used = sorted(self.model.engine)
        return used if self.can(C.MANY_HASHES) else [b for b in used if b not in self.model.keys]

    def hashed(self, drawn: Mapping[int, int]) -> dict[int, bytes]:
        """Return blocks of the engine with hashes, which are new, or which other blocks have."""
        used = self.can_cache()
        return {used[place % len(used)]: b"hash %d" % number for place, number in drawn.items()}

    @operation(
        "POOL-8",
        C.CACHE,
        when=lambda self: self.can_cache(),
        blocks=from_state(
            st.dictionaries(st.integers(0, 99), st.integers(0, 20), min_size=1, max_size=8),
            lambda self, drawn: self.hashed(drawn),
        ),
        group=st.sampled_from((0, 0, 1, 2, 258)),
    )
    def cache(self, blocks: dict[int, bytes], group: int) -> None:
        """Register keys of blocks, which are new, or which other blocks have."""
        keys = self.model.keys
        blocks = {
            block: block_hash
            for block, block_hash in blocks.items()
            if make_offload_key(block_hash, group) not in keys.get(block, ())
        }
        self._cache([*blocks], [*blocks.values()], group)

    def _cache(self, blocks: list[int], hashes: list[bytes], group: int) -> None:
        self.call(self.pool, "cache", blocks, hashes, group)
        for block, block_hash in zip(blocks, hashes, strict=True):
            key = make_offload_key(block_hash, group)
            self.model.cache(block, key)
            self.recent_keys.append(key)

    @operation(
        "POOL-2",
        C.SHARE,
        blocks=some(lambda self: self.model.blocks, repeat=True) | _VICTIMS,
        is_short=st.booleans(),
    )
    def share(self, blocks: Sequence[int], is_short: bool) -> None:
        """Let another request use some blocks, which are free or in use; a short one ends."""
        self.call(self.pool, "share", blocks)
        self.model.take(blocks, self.model.engine)
        if is_short:
            self._release(blocks)

    @operation(
        "POOL-8",
        C.EVICT,
        when=lambda self: self.model.keys,
        blocks=some(lambda self: self.model.blocks, repeat=True),
    )
    def evict(self, blocks: Sequence[int]) -> None:
        """Drop the keys of some blocks."""
        self.call(self.pool, "evict", blocks)
        self.model.evict(blocks)

    @operation(
        "POOL-9",
        C.RESET,
        when=lambda self: self.model.keys or self.model.engine,
        is_idle=st.booleans(),
    )
    def reset(self, is_idle: bool) -> None:
        """Reset the prefix cache, in an idle engine after the release of every block."""
        if is_idle:
            for at in self.open_views():
                self._free(at, "free_blocks", list(self.model.held[at].elements()))
            self._release(list(self.model.engine.elements()))
            self.begin_operation("POOL-9")
        else:
            self.blame("POOL-9")
        is_done = self.model.reset()
        got = self.call(self.pool, "reset")
        self.equal(got, is_done, "a reset is done unless a block is held")

    # --- the views ---

    def blame_blocks(self, blocks: Sequence[int]) -> None:
        """Set the law that a failure of a call with these blocks breaks, if one applies."""
        if self.model.null in blocks:
            self.blame("POOL-5")
        elif len(set(blocks)) < len(blocks):
            self.blame("POOL-2")

    @operation(
        "POOL-1",
        at=_OPEN_VIEW,
        blocks=some(lambda self: self.with_null(self.model.blocks), repeat=True)
        | some(lambda self: self.held_by_views() or self.model.blocks, repeat=True)
        | _VICTIMS,
    )
    def touch(self, at: int, blocks: Sequence[int]) -> None:
        """Touch any blocks, blocks that are already held, or the next victims."""
        self.blame_blocks(blocks)
        self._hold(at, blocks)

    def held_by_views(self) -> list[int]:
        """Return the blocks that a view holds."""
        return sorted({block for held in self.model.held for block in held})

    def _hold(self, at: int, blocks: Sequence[int]) -> None:
        self.call(self.views[at], "touch_blocks", blocks)
        self.model.take(blocks, self.model.held[at])

    @operation(
        "POOL-1",
        when=lambda self: self.held_by_views(),
        holds=_HOLDS,
        method=any_one(lambda self: self.frees()),
    )
    def free(self, holds: tuple[int, Sequence[int]], method: str) -> None:
        """Release some holds of a view."""
        self._free(holds[0], method, holds[1])

    def _free(self, at: int, method: str, blocks: Sequence[int]) -> None:
        self.blame_blocks(blocks)
        self.call(self.views[at], method, blocks)
        is_to_head = method == "give_back_blocks"
        if is_to_head:
            self.blame("POOL-12")
        self.model.give(blocks, self.model.held[at], to_head=is_to_head)

    @operation("POOL-4", C.VIEWS, when=lambda self: len(self.views) < 3)
    def open_view(self) -> None:
        """Open another view of the pool."""
        self.views.append(self.call(self.pool, "another_view"))
        self.model.add_view()

    @operation(
        "POOL-4",
        holds=_HOLDS,
        wrong=any_one(lambda self: ["num_blocks", *wrong_ids()]),
        block=any_one(lambda self: self.model.blocks),
    )
    def be_refused(self, holds: tuple[int, Sequence[int]], wrong: str, block: int) -> None:
        """Pass an id that does not name a block, and free more references than the view holds."""
        self.blame("POOL-3")
        at, held = holds
        view, value = self.views[at], wrong_ids().get(wrong, self.num_blocks)
        too_many = [block] * (max(self.model.held[at].values(), default=0) + 1)
        for method in ("touch_blocks", *self.frees()):
            for blocks in ([*held, value], [value, *held], [*held[:1], value, *held[1:]]):
                self.refused(UnknownBlockError, view, method, blocks, law="POOL-4")
            if method != "touch_blocks":
                blocks = [*held, *too_many]
                self.refused(BlockNotHeldError, view, method, blocks, law="POOL-4")
        for method, args in self.queries(value):
            if method in ("is_free", "block_keys", "primary_keys"):
                self.refused(UnknownBlockError, view, method, *args, law="POOL-4")
        if self.can(C.FIND_CACHED):
            for key in _NOT_KEYS:
                self.refused(NotAnOffloadKeyError, view, "find_cached_block", key, law="POOL-8")

    def queries(self, block: Any) -> list[tuple[str, list[Any]]]:
        """Return the queries of a view, with a block as the argument if a query takes a block."""
        blocks = [self.model.blocks[0], block]
        calls: dict[str, tuple[C, list[Any]]] = {
            "num_free_blocks": (C.FREE_COUNT, []),
            "is_free": (C.IS_FREE, [block]),
            "block_keys": (C.BLOCK_KEYS, [blocks]),
            "primary_keys": (C.BLOCK_KEYS, [blocks]),
            "find_cached_block": (C.FIND_CACHED, [b"h\0\0\0\0"]),
            "held_blocks": (C.HOLDS, []),
        }
        return [(method, args) for method, (need, args) in calls.items() if self.can(need)]

    @operation(
        "POOL-10",
        C.CLOSE,
        when=lambda self: 0 not in self.model.closed,
        has_walk=st.booleans(),
    )
    def close(self, has_walk: bool) -> None:
        """Close the first view, after which every call is refused, and its walks end.

        Args:
            has_walk: Whether a walk is open that has read blocks ahead.
        """
        if self.open_views() == [0] and self.can(C.VIEWS):
            self.open_view()
        if has_walk and self.can(C.CACHE):
            self.walk(len(self.walks), 0, True, ["read"])
        self.blame("POOL-10")
        what, held = "close reports the holds, once", dict(self.model.held_through(0))
        self.equal(dict(self.call(self.pool, "close")), held, what)
        self.equal(dict(self.call(self.pool, "close")), {}, what)
        self.model.closed.add(0)
        for one in self.walks:
            if one.at == 0:
                self.refused(ViewClosedError, one, "next")
        self.walks = [one for one in self.walks if one.at]
        self.refuse_all(self.views[0])
        if not self.open_views():
            self.start(self.num_blocks)

    def refuse_all(self, view: Any) -> None:
        """Call every method of a closed view."""
        block = self.model.blocks[0]
        for method in ("touch_blocks", *self.frees()):
            for blocks in ([block], []):
                self.refused(ViewClosedError, view, method, blocks)
        for method, args in self.queries(block):
            self.refused(ViewClosedError, view, method, *args)
        lists = self.lists(view)
        self.refused(ViewClosedError, lists, "iter_free_block_ids_with_hash")
        if self.can(C.FREE_ORDER):
            self.refused(ViewClosedError, lists, "iter_free_block_ids")

    # --- walks ---

    @operation(
        "POOL-7",
        C.CACHE,
        number=st.integers(0, 2),
        at=_OPEN_VIEW,
        has_keys=st.booleans(),
        moves=st.lists(st.sampled_from(_WALK_MOVES), min_size=1, max_size=8),
    )
    def walk(self, number: int, at: int, has_keys: bool, moves: list[str]) -> None:
        """Open or continue a walk, and touch some of its blocks, or touch and free them."""
        number = min(number, len(self.walks))
        if number == len(self.walks):
            has_keys = has_keys or not self.can(C.FREE_ORDER)
            order = self.model.order()
            if not has_keys:
                order = self.listed(self.views[at], "iter_free_block_ids")
            walk = self.call(self.views[at], "iter_free_block_ids" + "_with_hash" * has_keys)
            self.walks.append(OpenWalk(self.model, at, walk, order, has_keys))
        one = self.walks[number]
        for move in moves:
            block = None
            for _ in range(40 if move == "read 40" else 1):
                block = one.advance(self)
                if block is None:
                    self.walks.remove(one)
                    return
            if move in ("hold", "touch") and block is not None:
                self._hold(at, [block])
                if move == "touch":
                    self._free(at, "free_blocks", [block])

    # --- observables ---

    @observable("POOL-9", C.HOLDS)
    def holds(self) -> None:
        """Compare the holds of every open view."""
        for at in self.open_views():
            got = dict(self.call(self.views[at], "held_blocks"))
            self.equal(got, dict(self.model.held_through(at)), "held_blocks lists every hold")

    @observable("POOL-6", C.CACHE)
    def walked(self) -> None:
        """Compare the items of a walk over the free blocks that have keys."""
        got = self.listed(self.a_view(), "iter_free_block_ids_with_hash")
        expected = self.model.key_sets(self.model.order())
        got = key_sets(got)
        self.equal(got, expected, "a walk yields every free block with each key, in order")

    @observable("POOL-1", C.FREE_ORDER)
    def queue(self) -> None:
        """Compare the whole free queue."""
        got = self.listed(self.a_view(), "iter_free_block_ids")
        order = self.model.order()
        hashed = set(order)
        self.equal(len(got), len(set(got)), "no block is queued twice", "POOL-2")
        self.true(self.model.null not in got, "the null block is not queued", got, "none", "POOL-5")
        self.equal(set(got), set(self.model.joined), "the queue has every free block")
        got = [block for block in got if block in hashed]
        self.equal(got, order, "blocks with keys are queued in eviction order", "POOL-11")

    @observable("POOL-1", C.FREE_COUNT)
    def free_count(self) -> None:
        """Compare the number of free blocks."""
        got = self.call(self.a_view(), "num_free_blocks")
        self.equal(got, len(self.model.joined), "num_free_blocks counts the free blocks")

    @observable("POOL-1", C.IS_FREE)
    def is_free(self) -> None:
        """Compare whether each block is free; in a large pool, a sample of the blocks."""
        for block in range(0, self.num_blocks, 37 if self.num_blocks > 100 else 1):
            got = self.call(self.a_view(), "is_free", block)
            self.equal(got, self.model.is_free(block), f"is_free({block}) is True for free blocks")

    @observable("POOL-4", C.POOL_SIZE)
    def size(self) -> None:
        """Compare the size of the pool and its null block."""
        view = self.a_view()
        got = view.num_blocks, view.null_block_id
        self.equal(got, (self.num_blocks, self.model.null), "the view has the size of the pool")

    @observable("POOL-8", C.BLOCK_KEYS)
    def block_keys(self) -> None:
        """Compare the keys of every block."""
        view, blocks = self.a_view(), list(range(self.num_blocks))
        known = [self.model.keys.get(block, []) for block in blocks]
        got = [list(keys) for keys in self.call(view, "block_keys", blocks)]
        what = "block_keys returns the keys, primary first"
        if got != known:  # because secondary keys may have another order
            self.equal([keys[:1] for keys in got], [keys[:1] for keys in known], what)
            self.equal([sorted(keys) for keys in got], [sorted(keys) for keys in known], what)
        primaries = list(self.call(view, "primary_keys", blocks))
        first = [keys[0] if keys else None for keys in known]
        self.equal(primaries, first, "primary_keys returns the first key")

    @observable("POOL-8", C.FIND_CACHED)
    def find_cached(self) -> None:
        """Compare the lookups of recently cached keys."""
        for key in dict.fromkeys(self.recent_keys):
            found = self.call(self.a_view(), "find_cached_block", key)
            holders: list[int | None] = [*self.model.holders(key)] or [None]
            what = f"find_cached_block({short_repr(key)}) returns a block that holds the key"
            self.true(found in holders, what, found, f"one of {holders}")
