"""The calls of an engine and of several views, which run on a pool and on its model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, ClassVar

from typing_extensions import override

from kvview.errors import (
    BlockNotHeldError,
    NoFreeBlocksError,
    NotAnOffloadKeyError,
    UnknownBlockError,
)
from kvview.events.fold import FoldedEvents
from kvview.keys import OffloadKey, make_offload_key
from kvview.testing.harness import Capability as C
from kvview.testing.pool.model import PoolModel
from kvview.testing.search import Player, operation


class _Index:
    def __index__(self) -> int:
        return 1

    def __repr__(self) -> str:
        return "AnIndex()"


_NOT_BLOCKS = (-1, -2, 10**12, True, 1.0, "1", None, b"1")
_NOT_KEYS = (bytes(range(32)), b"", bytes(4), b"h\0\1\0\0")
_GROUPS = (0, 0, 1, 2, 258)
NOTICE = "free_blocks_with_notice"


@cache
def wrong_ids() -> tuple[Any, ...]:
    """Return wrong ids that no Python literal can express, such as numpy scalars."""
    try:
        import numpy as np
    except ModuleNotFoundError:  # without numpy, no caller can pass its scalars
        return (_Index(),)
    return _Index(), np.int64(1), np.int32(1), np.uint8(1)


class PoolMoves(Player):
    """Plays the calls of the engine and of several views on one pool."""

    contract = "pool"
    subject_name = "view"
    first_moves = ("warm", "allocate", "cache", "release")
    Model: ClassVar[type[PoolModel]] = PoolModel
    sizes: ClassVar[tuple[int, ...]] = (16, 20, 24, 40, 64, 300, 700, 2500)

    @override
    def start(self) -> None:
        self.has_events = False
        self.resize(self.sizes[0] if self.plan.is_small else self.rng.choice(self.sizes))
        if self.can(C.GPU_EVENTS) and self.rng.random() < 0.5:
            self.has_events = True
            self.use(self.call(self.harness, "telling"), "view")
            self.views[:] = [self.subject]

    def resize(self, num_blocks: int) -> None:
        """Continue with a new pool, of another size if the harness supports it."""
        if self.can(C.SIZED):
            self.use(self.call(self.harness, "sized", num_blocks), "view")
        self.begin()

    def begin(self) -> None:
        """Make the model of a new harness."""
        self.num_blocks: int = self.harness.num_blocks
        self.is_large = self.num_blocks > 100
        self.not_blocks: tuple[Any, ...] = (*_NOT_BLOCKS, *wrong_ids(), self.num_blocks)
        self.max_listed = 9 * self.num_blocks
        self.model = self.Model(self.num_blocks, self.harness.null_block_id)
        self.model.add_view()
        self.views: list[Any] = [self.subject]
        self.notified: list[tuple[int, int]] = []
        self.expected: list[tuple[int, int]] = []
        self.num_tags = self.num_hashes = 0
        self.recent_keys: deque[OffloadKey] = deque(maxlen=24)
        self.folded: FoldedEvents[OffloadKey] = FoldedEvents()

    @override
    def draw_most(self) -> int:
        few: tuple[int, ...] = (6, 40) if self.is_large else (3, 6, 6)
        return self.rng.choice((*few, self.num_blocks // 2))

    @override
    def num_moves(self, longest: int) -> int:
        return longest if not self.is_large else longest // 3

    # --- draws ---

    def some(self, blocks: Iterable[int], *, repeat: bool = False) -> list[int]:
        """Draw at least one of some blocks; empty if there are no blocks."""
        return self.some_of(list(blocks), repeat=repeat)

    def with_null(self, blocks: list[int]) -> list[int] | tuple[int, ...]:
        """Return the blocks, sometimes with the null block among them, sometimes as a tuple."""
        if self.model.null is not None and self.rng.random() < 0.3:
            blocks.insert(self.rng.randint(0, len(blocks)), self.model.null)
        return tuple(blocks) if self.rng.random() < 0.2 else blocks

    def draw_wrong_id(self) -> Any:
        """Draw an id that does not name a block."""
        wrong = self.rng.choice(self.not_blocks)
        if any(wrong is one for one in wrong_ids()):
            at = [one is wrong for one in wrong_ids()].index(True)
            line = "from kvview.testing.pool.moves import wrong_ids"
            self.give_name(wrong, f"wrong_ids()[{at}]", line)
        return wrong

    def frees(self) -> list[str]:
        """Return the names of the view's methods that release blocks."""
        methods = {"give_back_blocks": C.GIVE_BACK, NOTICE: C.REUSE_NOTICE}
        return ["free_blocks", *(name for name, need in methods.items() if self.can(need))]

    def other_arguments(self, method: str) -> list[Any]:
        """Return the arguments of a method that releases blocks, except the blocks."""
        return [self._callback(0)] if method == NOTICE else []

    def queries(self, block: Any) -> list[tuple[str, list[Any]]]:
        """Return the queries of a view, with a block as the argument if a query takes a block."""
        calls: dict[str, tuple[C, list[Any]]] = {
            "num_free_blocks": (C.FREE_COUNT, []),
            "is_free": (C.IS_FREE, [block]),
            "block_keys": (C.BLOCK_KEYS, [[self.model.blocks[0], block]]),
            "primary_keys": (C.BLOCK_KEYS, [[self.model.blocks[0], block]]),
            "find_cached_block": (C.FIND_CACHED, [b"h\0\0\0\0"]),
            "walk_free_blocks": (C.RESUMABLE_WALK, []),
            "held_blocks": (C.HOLDS, []),
        }
        return [(method, args) for method, (need, args) in calls.items() if self.can(need)]

    def draw_view(self) -> int:
        """Draw a view that is open."""
        return self.rng.choice([at for at in range(len(self.views)) if at not in self.model.closed])

    def a_view(self) -> Any:
        """Return the newest open view, for queries whose result is the same in every view."""
        return next(
            self.views[at] for at in reversed(range(len(self.views))) if at not in self.model.closed
        )

    # --- the engine ---

    @operation("POOL-1", weight=4)
    def allocate(self, number: int | None = None) -> None:
        """Allocate, and compare the blocks with the head of the queue."""
        free = len(self.model.joined)
        number = min(self.rng.randint(1, self.most) if number is None else number, free)
        queue = None
        if self.can(C.FREE_ORDER):
            with self.unrecorded():
                queue = self.listed(self.a_view(), "iter_free_block_ids")
        blocks = list(self.call(self.harness, "allocate", number))
        self.equal(len(blocks), number, "an allocation returns as many blocks as requested")
        if queue is not None:
            self.equal(blocks, queue[:number], "the queue is in the order of allocation", "POOL-6")
        self.judge(self.model.allocated(blocks), blocks)
        self.expected += self.model.notices(blocks)

    @operation("POOL-1", weight=4)
    def release(self) -> None:
        """Release some references of the engine."""
        blocks = self.some(self.model.engine.elements())
        self.blame_blocks(blocks)
        self.call(self.harness, "release", blocks)
        self.model.give(blocks, self.model.engine)

    @operation("POOL-2", C.SHARE)
    def share(self) -> None:
        """Let another request use some blocks, which are free or in use."""
        self._share(self.some(self.model.blocks, repeat=True))

    def _share(self, blocks: Sequence[int]) -> None:
        self.call(self.harness, "share", blocks)
        self.model.take(blocks, self.model.engine)

    @operation("POOL-2", C.SHARE, C.CACHE)
    def hit(self) -> None:
        """Let a request hit neighbours in the queue, and sometimes end, which keeps their order."""
        order = self.model.order()
        first, last = sorted(self.rng.choices(range(len(order) + 1), k=2))
        if blocks := order[first:last]:
            self._share(blocks)
            if self.rng.random() < 0.7:
                self.call(self.harness, "release", blocks)
                self.model.give(blocks, self.model.engine)

    @operation("POOL-8", C.CACHE, weight=5)
    def cache(self) -> None:
        """Register keys of blocks, which are new, or which other blocks have."""
        used = sorted(self.model.engine)
        if not self.can(C.MANY_HASHES):
            used = [block for block in used if block not in self.model.keys]
        blocks = self.some(used)
        times = self.rng.choice((1, 1, 2)) if self.can(C.MANY_HASHES) else 1
        for _ in range(times):  # because the groups of a hybrid model may share a block
            self._cache(blocks, self.rng.choice(_GROUPS))

    def _cache(self, blocks: list[int], group: int) -> None:
        hashes = []
        share = 0.3 if len(blocks) <= self.most else 0.0
        for block in blocks:
            self.num_hashes += 1
            block_hash = b"h%05d" % self.num_hashes
            if self.recent_keys and self.rng.random() < share:
                known = self.rng.choice(self.recent_keys)[:-4]
                is_held = make_offload_key(known, group) in self.model.keys.get(block, ())
                if self.can(C.GPU_EVENTS) or not is_held:
                    block_hash = known
            hashes.append(block_hash)
        self.call(self.harness, "cache", blocks, hashes, group)
        for block, block_hash in zip(blocks, hashes, strict=True):
            key = make_offload_key(block_hash, group)
            self.model.cache(block, key)
            self.recent_keys.append(key)

    @operation("POOL-8", C.EVICT)
    def evict(self) -> None:
        """Drop the keys of some blocks."""
        blocks = self.some(self.model.blocks, repeat=True)
        self.call(self.harness, "evict", blocks)
        self.model.evict(blocks)

    @operation("POOL-9", C.RESET)
    def reset(self) -> None:
        """Reset the prefix cache."""
        self.blame("POOL-9")
        is_done = self.model.reset()
        self.equal(
            self.call(self.harness, "reset"), is_done, "a reset is done unless a block is held"
        )
        if is_done:
            self.expected += self.model.notices(self.model.blocks)

    @operation("POOL-1", weight=0.7)
    def run_full(self) -> None:
        """Allocate nearly every block, and sometimes release some blocks."""
        self.allocate(max(0, len(self.model.joined) - self.rng.choice((0, 0, 1, 3))))
        if self.rng.random() < 0.5:
            self.release()

    @operation("POOL-1", C.CACHE, weight=0.7)
    def warm(self) -> None:
        """Cache many blocks under new keys and release them, in any order."""
        before = set(self.model.engine)
        most = len(self.model.joined)
        self.allocate(self.rng.choice((most, self.rng.randint(0, most))))
        blocks = [block for block in self.model.engine if block not in before]
        self.rng.shuffle(blocks)
        self.cache_and_release(blocks)

    def cache_and_release(self, blocks: list[int]) -> None:
        """Cache the blocks of a request under new keys, and let the request end."""
        self._cache(blocks, 0)
        self.call(self.harness, "release", blocks)
        self.model.give(blocks, self.model.engine)

    @operation("POOL-1", weight=0.7)
    def idle(self) -> None:
        """Release every block, and sometimes reset the prefix cache."""
        for at, held in enumerate(self.model.held):
            if at not in self.model.closed:
                self.give(at, "free_blocks", list(held.elements()))
        blocks = list(self.model.engine.elements())
        self.blame_blocks(blocks)
        self.call(self.harness, "release", blocks)
        self.model.give(blocks, self.model.engine)
        if self.can(C.RESET) and self.rng.random() < 0.3:
            self.reset()

    @operation("POOL-11", weight=0.7)
    def churn(self) -> None:
        """Touch and free blocks many times without an allocation."""
        for _ in range(self.rng.randint(1, 24)):
            at = self.draw_view()
            blocks = self.some(self.model.joined)
            if self.hold(at, blocks):
                self.give(at, "free_blocks", blocks)

    # --- the views ---

    @operation("POOL-1", weight=5)
    def touch(self) -> None:
        """Touch any blocks, the next victims, or blocks that are already held."""
        at = self.draw_view()
        among = (self.model.blocks, self.model.order() or self.model.blocks, self.model.held[at])
        blocks = self.with_null(self.some(self.rng.choice(among), repeat=self.rng.random() < 0.3))
        self.blame_blocks(blocks)
        self.hold(at, blocks)

    def hold(self, at: int, blocks: Sequence[int]) -> bool:
        """Touch blocks through a view; returns whether the view accepted the touch."""
        self.call(self.views[at], "touch_blocks", blocks)
        self.model.take(blocks, self.model.held[at])
        return True

    def blame_blocks(self, blocks: Sequence[int]) -> None:
        """Set the law that a failure of a call with these blocks breaks, if one applies."""
        if self.model.null in blocks:
            self.blame("POOL-5")
        elif len(set(blocks)) < len(blocks):
            self.blame("POOL-2")

    def give(self, at: int, method: str, blocks: Sequence[int]) -> None:
        """Release blocks through a view, with one of its methods."""
        self.blame_blocks(blocks)
        if method == "give_back_blocks":
            self.blame("POOL-12")
        more: list[Callable[[int], None]] = []
        if method == NOTICE:
            self.num_tags += 1
            more = [self._callback(self.num_tags)]
        self.call(self.views[at], method, blocks, *more)
        self.model.give(blocks, self.model.held[at], to_head=method == "give_back_blocks")
        if more:
            real = [block for block in blocks if block != self.model.null]
            self.model.watched[at].update(dict.fromkeys(real, self.num_tags))

    def _callback(self, tag: int) -> Callable[[int], None]:
        def on_reuse(block: int) -> None:
            self.notified.append((tag, block))
            if tag % 4 == 0:
                raise RuntimeError("an error of the connector")

        raises = ", raises=True" if tag % 4 == 0 else ""
        self.give_name(on_reuse, f"notice({tag}{raises})", NOTICE_LINES)
        return on_reuse

    def _free_by(self, method: str) -> None:
        at = self.draw_view()
        self.give(at, method, self.with_null(self.some(self.model.held[at].elements())))

    @operation("POOL-1", weight=4)
    def free(self) -> None:
        """Release some holds of a view."""
        self._free_by("free_blocks")

    @operation("POOL-12", C.GIVE_BACK, weight=2)
    def give_back(self) -> None:
        """Release some holds of a view to the head of the queue."""
        self._free_by("give_back_blocks")

    @operation("POOL-14", C.REUSE_NOTICE, weight=2)
    def free_with_notice(self) -> None:
        """Release some holds of a view, with a callback."""
        self._free_by(NOTICE)

    @operation("POOL-4", C.VIEWS, weight=0.3)
    def open_view(self) -> None:
        """Open another view of the pool."""
        view = self.call(self.harness, "another_view")
        self.name(view, f"view_{len(self.views)}")
        self.views.append(view)
        self.model.add_view()

    @operation("POOL-4", weight=2)
    def be_refused(self) -> None:
        """Pass ids that do not name a block, and free more references than the view holds."""
        self.blame("POOL-3")
        at = self.draw_view()
        view, held = self.views[at], self.model.held[at]
        wrong = self.draw_wrong_id()
        for method in ("touch_blocks", *self.frees()):
            more = self.other_arguments(method)
            good = list(self.with_null(self.some(held.elements())))
            bad = [*good, wrong]
            self.refused(UnknownBlockError, view, method, bad, *more, law="POOL-4")
            self.rng.shuffle(bad)
            self.refused(UnknownBlockError, view, method, bad, *more, law="POOL-4")
            if method != "touch_blocks":
                block = self.rng.choice(self.model.blocks)
                too_many = [block] * (max(held.values(), default=0) + 1)
                self.refused(
                    BlockNotHeldError, view, method, [*good, *too_many], *more, law="POOL-4"
                )
        for method, args in self.queries(wrong):
            if method in ("is_free", "block_keys", "primary_keys"):
                self.refused(UnknownBlockError, view, method, *args, law="POOL-4")
        if self.can(C.FIND_CACHED):
            for key in _NOT_KEYS:
                self.refused(NotAnOffloadKeyError, view, "find_cached_block", key, law="POOL-8")

    @operation("POOL-3", C.ENGINE_REFUSES)
    def refuse_the_engine(self) -> None:
        """Let the engine name a mixture of wrong and right blocks."""
        self.blame("POOL-3")
        harness, free = self.harness, self.some(self.model.joined)
        used = self.some(self.model.engine.elements())
        far = self.rng.choice((self.num_blocks, -1))
        mixed = [*used, *free, far, *self.some(self.model.blocks)]
        hashes = [b"no"] * (len(used) + 1)
        self.refused(UnknownBlockError, harness, "share", mixed)
        self.refused(UnknownBlockError, harness, "release", [*used, far])
        self.refused(NoFreeBlocksError, harness, "allocate", len(self.model.joined) + 1)
        if self.can(C.EVICT):
            self.refused(UnknownBlockError, harness, "evict", mixed)
        if self.can(C.CACHE):
            self.refused(UnknownBlockError, harness, "cache", [*used, far], hashes, 0)
            self.refused(ValueError, harness, "cache", used, hashes, 0)
        if free:
            self.refused(BlockNotHeldError, harness, "release", [*used, free[0]])
            if self.can(C.CACHE):
                self.refused(BlockNotHeldError, harness, "cache", [*used, free[0]], hashes, 0)


NOTICE_LINES = "\n".join(
    (
        "notified = []",
        "def notice(tag, raises=False):",
        "    def on_reuse(block):",
        "        notified.append((tag, block))",
        "        if raises: raise RuntimeError('an error of the connector')",
        "    return on_reuse",
    )
)
