"""The operations of the pool contract, which run on a pool and on its model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, ClassVar

from typing_extensions import override

from kvview.errors import ViewClosedError
from kvview.events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored
from kvview.keys import OffloadKey, make_offload_key
from kvview.testing.harness import Capability as C
from kvview.testing.pool.model import Walk, key_sets
from kvview.testing.pool.moves import NOTICE, PoolMoves
from kvview.testing.search import Label, check_by_search, observable, operation


def _first_of(view: Any, name: str) -> object:
    return next(getattr(view, name)())


@dataclass
class _OneShot:
    """An open walk, and the state from which the model computes the items of the walk."""

    view: int
    walk: Iterator[Any]
    ahead: Walk
    has_keys: bool
    began: int
    """The model's time at which the walk was opened."""
    at: int | None = None
    """The block whose keys the walk is yielding, and the keys that it has yielded."""
    yielded: list[OffloadKey] = field(default_factory=list)


@dataclass
class _Resumed:
    """A resumable walk, and its position in the queue."""

    view: int
    walk: Any
    passed: float = -inf
    last: dict[int, int] = field(default_factory=dict)
    """The free blocks at the walk's last call, with the times at which they joined the queue."""
    choices: dict[int, int] = field(default_factory=dict)
    """The blocks that other owners took and released since then; the walk may yield them or not."""


@check_by_search
class PoolPlayer(PoolMoves):
    """Plays the engine, views and walks of one pool, and compares all results."""

    labels: ClassVar[Mapping[str, Label]] = {
        "POOL-1": Label("A block is free exactly when neither the engine nor a view holds it."),
        "POOL-2": Label("N touches need N frees, and no block is queued twice."),
        "POOL-3": Label("A call that raises has changed nothing."),
        "POOL-4": Label("An id that names no block is refused, and so is a free without a hold."),
        "POOL-5": Label("The null block is skipped, and never yielded or allocated."),
        "POOL-6": Label(
            "A walk yields each free block with each key, next victim first.", (C.CACHE,)
        ),
        "POOL-7": Label(
            "A walk continues while blocks come and go, and its items are true.", (C.CACHE,)
        ),
        "POOL-8": Label(
            "A key is found while a block holds the key; bytes that are not a key are refused.",
            (C.CACHE,),
        ),
        "POOL-9": Label("A reset waits for holds, which the view lists.", (C.RESET,)),
        "POOL-10": Label("A closed view refuses every call, and reports its holds.", (C.CLOSE,)),
        "POOL-11": Label(
            "Blocks with keys are evicted in the order in which they became free.", (C.CACHE,)
        ),
        "POOL-12": Label(
            "Blocks that are released to the head are the next victims.", (C.GIVE_BACK,)
        ),
        "POOL-13": Label(
            "A resumed walk misses no block and repeats no block.", (C.RESUMABLE_WALK,)
        ),
        "POOL-14": Label("A notice comes once, when its block is reused.", (C.REUSE_NOTICE,)),
        "EVENT-1": Label("No event removes a key that was not stored.", (C.GPU_EVENTS,)),
        "EVENT-2": Label("The fold of the events is the prefix cache.", (C.GPU_EVENTS,)),
    }

    @override
    def begin(self) -> None:
        self.one_shots: list[_OneShot] = []
        self.resumed: list[_Resumed] = []
        super().begin()

    @operation("POOL-10", C.CLOSE, weight=0.3)
    def close(self) -> None:
        """Close the first view, after which every call is refused, and its walks end."""
        if 0 in self.model.closed:
            return
        if len(self.model.closed | self.closing(0)) == len(self.views) and self.can(C.VIEWS):
            self.open_view()
        self.blame("POOL-10")
        if self.can(C.CACHE) and self.rng.random() < 0.7:  # open walks, in any state
            self.step_walk()
        if self.can(C.REUSE_NOTICE) and self.rng.random() < 0.5:  # leave notices pending
            self.give(0, NOTICE, self.some(self.model.held[0].elements()))
        what = "close reports the holds, once"
        held = dict(self.model.held_through(0))
        self.equal(dict(self.call(self.harness, "close")), held, what)
        self.equal(dict(self.call(self.harness, "close")), {}, what)
        self.end_views(self.closing(0))
        if not self.is_over and self.rng.random() < 0.5:
            self.allocate(len(self.model.joined))

    def closing(self, at: int) -> set[int]:
        """Return the views that are closed with a view."""
        return {at}

    def end_views(self, ended: set[int]) -> None:
        """Check that closed views refuse calls, end their walks, and receive no notice."""
        self.model.closed |= ended
        self.is_over = len(self.views) == len(self.model.closed)
        for at in ended:
            self.model.watched[at].clear()
        for one in self.one_shots:
            if one.view in ended:
                code = f"next({self._names[id(one.walk)]})"
                self.refuses(ViewClosedError, code, partial(next, one.walk))
        for other in self.resumed:
            if other.view in ended:
                self.refused(ViewClosedError, other.walk, "take", 1)
                self.refused(ViewClosedError, other.walk, "restart")
        for at in sorted(ended):
            self._refuse_all(self.views[at])
        if self.is_over:  # no view is left to compare, but a closed view must not be notified
            self.call(self.harness, "allocate", len(self.model.joined))
            self.equal(self.notified, [], "a closed view is not notified", "POOL-14")
        self.one_shots = [one for one in self.one_shots if one.view not in ended]
        self.resumed = [other for other in self.resumed if other.view not in ended]

    def _refuse_all(self, view: Any) -> None:
        block = self.model.blocks[0]
        for method in ("touch_blocks", *self.frees()):
            more = self.other_arguments(method)
            for blocks in ([block], []):
                self.refused(ViewClosedError, view, method, blocks, *more)
        for method, args in self.queries(block):
            self.refused(ViewClosedError, view, method, *args)
        for name in ("iter_free_block_ids_with_hash", "iter_free_block_ids"):
            if name.endswith("_hash") or self.can(C.FREE_ORDER):
                first = partial(_first_of, view, name)
                self.refuses(ViewClosedError, f"next(view.{name}())", first)

    # --- walks ---

    @operation("POOL-7", C.CACHE)
    def open_walk(self) -> None:
        """Open a walk and take its first item; at most three walks are open."""
        at = self.draw_view()
        has_keys = not self.can(C.FREE_ORDER) or self.rng.random() < 0.7
        order = self.model.order()
        if not has_keys:
            with self.unrecorded():
                order = self.listed(self.views[at], "iter_free_block_ids")
        walk = self.call(self.views[at], "iter_free_block_ids" + "_with_hash" * has_keys)
        self.name(walk, f"walk_{len(self._kept)}")
        self.one_shots = self.one_shots[-2:]
        ahead = [(block, self.model.joined[block]) for block in order]
        self.one_shots.append(_OneShot(at, walk, ahead, has_keys, self.model.now))
        self._advance(self.one_shots[-1])

    def _next(self, one: _OneShot) -> tuple[int | None, list[OffloadKey]]:
        """Return the next block of a walk, and the keys of this block that may come next."""
        block = self.model.next_block(one.ahead)
        while one.has_keys and block is not None and block not in self.model.keys:
            one.ahead.pop(0)
            block = self.model.next_block(one.ahead)
        if block != one.at:
            one.at = block
            one.yielded.clear()
        return block, [] if block is None else self.model.next_keys(block, one.yielded)

    def _advance(self, one: _OneShot) -> int | None:
        """Take one item and compare it; returns the block of the item, or None at the end."""
        block, keys = self._next(one)
        if one.yielded and not keys:  # the walk has yielded every key of its block
            one.ahead.pop(0)
            block, keys = self._next(one)
        got = self.step(one.walk)
        if got is None:
            item = (block, keys[0]) if one.has_keys and block is not None else block
            self.equal(got, item, "a walk continues to its end", "POOL-7")
            self.one_shots.remove(one)
            return None
        found = int(got[0]) if one.has_keys else int(got)
        if found != block and self.model.was_moved_since(found, one.began, one.view):
            return found
        expected = [(block, key) for key in keys] if one.has_keys else [block]
        self.true(got in expected, "a walk yields the truth", got, f"one of {expected}", "POOL-7")
        if one.has_keys:
            one.yielded.append(got[1])
        else:
            one.ahead.pop(0)
        return found

    @operation("POOL-7", C.CACHE, weight=4)
    def step_walk(self) -> None:
        """Take an item from an open walk, and sometimes touch the yielded block."""
        if not self.one_shots:
            self.open_walk()
        if not self.one_shots:
            return
        one = self.rng.choice(self.one_shots)
        for _ in range(self.rng.choice((1, 1, 2, self.most, 100))):
            if (block := self._advance(one)) is None:
                break
            if self.rng.random() < 0.3:
                self._touch_around([block])
            elif one.has_keys and one.ahead and self.rng.random() < 0.1:
                self._touch_around(self.some(block for block, _ in one.ahead[:100]))

    def _touch_around(self, blocks: list[int]) -> None:
        at = self.draw_view()
        if self.hold(at, blocks) and self.rng.random() < 0.5:
            self.give(at, "free_blocks", blocks)

    @operation("POOL-13", C.CACHE, C.RESUMABLE_WALK, weight=4)
    def resume_walk(self) -> None:
        """Take items from a resumed walk; at most three such walks are open."""
        if len(self.resumed) < 3 and self.rng.random() < 0.4:
            at = self.draw_view()
            walk = self.call(self.views[at], "walk_free_blocks")
            self.name(walk, f"resumed_{len(self._kept)}")
            self.resumed.append(_Resumed(at, walk))
        if self.resumed:
            one = self.rng.choice(self.resumed)
            number = self.rng.choice((0, 1, 2, self.most, 40, 100))
            self._take(one, number)

    def _take(self, one: _Resumed, number: int) -> None:
        got = key_sets(tuple(item) for item in self.call(one.walk, "take", number))
        joined = self.model.joined
        for block, before in one.last.items():
            if self.model.was_moved_since(block, before, one.view):
                one.choices[block] = joined[block]
        choices = {block for block, then in one.choices.items() if joined.get(block) == then}
        kept = [item for item in got if item[0] not in choices]
        promised = [block for block in self.model.behind(one.passed) if block not in choices]
        expected = self.model.key_sets(promised[: number - (len(got) - len(kept))])
        self.equal(kept, expected, "a resumed walk takes the next blocks")
        for block, *_ in got:
            self.true(self.model.is_free(block), "a taken block is free", block, "a free block")
        one.passed = max([one.passed, *(self.model.place[block] for block, *_ in got)])
        one.last = dict(joined)

    @operation("POOL-13", C.CACHE, C.RESUMABLE_WALK)
    def restart_walk(self) -> None:
        """Restart a walk between two reads, or drop or close it."""
        if not self.resumed:
            return
        one = self.rng.choice(self.resumed)
        if self.rng.random() < 0.5:
            self._take(one, self.most)
            self.call(one.walk, "restart")
            one.passed = -inf
            self._take(one, self.rng.choice((1, self.most)))
            return
        self.resumed.remove(one)
        if self.rng.random() < 0.5:
            self.call(one.walk, "close")
            self.call(one.walk, "close")
            self.refused(ViewClosedError, one.walk, "take", 1)
            self.refused(ViewClosedError, one.walk, "restart")

    # --- observables ---

    @observable("POOL-14")
    def notices(self) -> None:
        """Compare the notices since the last operation."""
        got, expected = sorted(self.notified), sorted(self.expected)
        self.notified.clear()
        self.expected.clear()
        self.equal(got, expected, "a notice comes once, when its block is reused")

    @observable("POOL-9", C.HOLDS)
    def holds(self) -> None:
        """Compare the holds of every open view."""
        for at, view in enumerate(self.views):
            if at not in self.model.closed:
                got = dict(self.call(view, "held_blocks"))
                self.equal(got, dict(self.model.held_through(at)), "held_blocks lists every hold")

    @observable("POOL-6", C.CACHE)
    def walk(self) -> None:
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
        blocks = range(0, self.num_blocks, 37 if self.is_large else 1)
        view = self.a_view()
        got = [block for block in blocks if self.call(view, "is_free", block)]
        expected = [block for block in blocks if self.model.is_free(block)]
        self.equal(got, expected, "is_free is True for free blocks only")

    @observable("POOL-4", C.POOL_SIZE)
    def size(self) -> None:
        """Compare the size of the pool and its null block."""
        view = self.a_view()
        got = self.read(view, "num_blocks"), self.read(view, "null_block_id")
        self.equal(got, (self.num_blocks, self.model.null), "the view has the size of the pool")

    @observable("POOL-8", C.BLOCK_KEYS)
    def block_keys(self) -> None:
        """Compare the keys of every block."""
        blocks = list(range(self.num_blocks))
        known = [self.model.keys.get(block, []) for block in blocks]
        got = [list(keys) for keys in self.call(self.a_view(), "block_keys", blocks)]
        what = "block_keys returns the keys, primary first"
        self.equal([keys[:1] for keys in got], [keys[:1] for keys in known], what)
        self.equal([sorted(keys) for keys in got], [sorted(keys) for keys in known], what)
        primaries = list(self.call(self.a_view(), "primary_keys", blocks))
        first = [keys[0] if keys else None for keys in known]
        self.equal(primaries, first, "primary_keys returns the first key")

    @observable("POOL-8", C.FIND_CACHED)
    def find_cached(self) -> None:
        """Compare the lookups of recently cached keys."""
        for key in dict.fromkeys(self.recent_keys):
            holders: list[int | None] = [*self.model.holders(key)] or [None]
            found = self.call(self.a_view(), "find_cached_block", key)
            what = f"find_cached_block({key!r}) returns a block that holds the key"
            self.true(found in holders, what, found, f"one of {holders}")

    @observable("EVENT-2", C.GPU_EVENTS)
    def events(self) -> None:
        """Compare the keys that follow from the engine's events."""
        if not self.has_events:
            return
        for event in self.call(self.harness, "take_events"):
            if isinstance(event, AllBlocksCleared):
                self.folded.clear_gpu()
                continue
            assert isinstance(event, BlockStored | BlockRemoved), "the engine has no other events"
            for one in event.block_hashes:
                key = make_offload_key(one, event.group_idx)
                is_removal = isinstance(event, BlockRemoved)
                is_allowed = self.folded.change(event.medium, key, removed=is_removal)
                self.true(is_allowed, "a removed key was stored", key, "a stored key", "EVENT-1")
        got = self.folded.held.get(MEDIUM_GPU, Counter())
        self.equal(got, self.model.cached(), "the events add up to the prefix cache")
