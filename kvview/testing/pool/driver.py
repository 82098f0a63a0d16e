"""The oracle of the pool checks: who holds what, kept in plain counters and lists."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import count
from math import inf
from typing import Any

from kvview.errors import ViewClosedError
from kvview.keys import make_offload_key
from kvview.testing.checks import checks_driving
from kvview.testing.harness import Capability, Factory
from kvview.testing.recorder import Recorder


class PoolDriver(Recorder):
    """Makes the engine's and the view's moves, and knows what must come of them.

    What an allocation returns is always compared with the blocks that must be
    free; in which order hashed blocks come, only with ``has_order``.

    Args:
        factory: Makes the harness.
        law: The law that is checked.
        has_order: Whether to compare the eviction order too (POOL-11).
    """

    def __init__(self, factory: Factory, law: str, *, has_order: bool = False) -> None:
        super().__init__(factory, law, "view")
        self.has_order = has_order
        self._serial, self._times = count(1), count()
        self._start()

    def _start(self) -> None:
        self.num_blocks: int = self.harness.num_blocks
        self.null: int | None = self.harness.null_block_id
        self.engine: Counter[int] = Counter()
        self.held: Counter[int] = Counter()
        self.hashes: dict[int, list[bytes]] = {}
        self.last_keys: deque[bytes] = deque(maxlen=32)  # cached last, held still or not
        self.hashed_free: list[int] = []  # in the order in which they must be evicted
        self.joined: dict[int, int] = {}  # of each of them: a number that grows along the queue
        self.passed: dict[int, float] = {}  # of each resumed walk: how far along it is
        self.watched: set[int] = set()
        self.told: list[int] = []

    @property
    def view(self) -> Any:
        """The view under test."""
        return self.subject

    def can(self, capability: Capability) -> bool:
        """Whether the harness declares a capability."""
        return capability in self.harness.capabilities

    @property
    def blocks(self) -> list[int]:
        """All blocks but the null block."""
        return [block for block in range(self.num_blocks) if block != self.null]

    @property
    def free_blocks(self) -> set[int]:
        """Blocks that nobody holds."""
        return set(self.blocks) - self.engine.keys() - self.held.keys()

    def resize(self, num_blocks: int) -> None:
        """Go on with a new pool of another size."""
        self.use(self.call(self.harness, "sized", num_blocks), "view")
        self._start()

    # --- the engine's moves ---

    def allocate(self, num_blocks: int) -> list[int]:
        """Allocate for a request, and compare with what must be free."""
        blocks: list[int] = list(self.call(self.harness, "allocate", num_blocks))
        known, seen = set(self.blocks), set[int]()
        for block in blocks:
            what = f"an allocation returns free blocks only, and each once, not block {block}"
            self.true(block != self.null, f"{what} (null)", blocks, "no null block", "POOL-5")
            self.true(block not in seen, f"{what} again", blocks, "no repeat", "POOL-2")
            self.true(block not in self.held, f"{what} (held)", blocks, "not held", "POOL-1")
            self.true(block not in self.engine, f"{what} (in use)", blocks, "not used", "POOL-4")
            self.true(block in known, f"{what} (unknown)", blocks, "a block", "POOL-4")
            seen.add(block)
        self.equal(len(blocks), num_blocks, "an allocation returns as many blocks as asked for")
        hashed = set(self.hashed_free)
        victims = [block for block in blocks if block in hashed]
        if self.has_order:
            self.equal(
                victims,
                self.hashed_free[: len(victims)],
                "hashed blocks are evicted in the order in which they were freed",
                "POOL-11",
            )
        for block in blocks:
            self.engine[block] = 1
            self.hashes.pop(block, None)
        self.hashed_free = [block for block in self.hashed_free if block not in seen]
        self.check_told(self.watched & seen, "when its block is handed out again")
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Let the engine give back one reference on each block."""
        self.call(self.harness, "release", list(blocks))
        self.engine = +(self.engine - Counter(blocks))
        self._queue(blocks)

    def cache(self, blocks: Sequence[int], group_idx: int = 0) -> list[bytes]:
        """Let the engine cache blocks under new hashes; returns the keys."""
        # Padded: the order of a block's further keys is the engine's affair, and some sort.
        hashes = [b"h%04d" % next(self._serial) for _ in blocks]
        self.call(self.harness, "cache", list(blocks), hashes, group_idx)
        keys = [make_offload_key(block_hash, group_idx) for block_hash in hashes]
        for block, key in zip(blocks, keys, strict=True):
            self.hashes.setdefault(block, []).append(key)
        self.last_keys.extend(keys)
        return [bytes(key) for key in keys]

    def cache_as(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Let the engine cache blocks under keys that others may hold: equal prompts do so."""
        for block, key in zip(blocks, keys, strict=True):
            group_idx = int.from_bytes(key[-4:], "big")
            self.call(self.harness, "cache", [block], [key[:-4]], group_idx)
            self.hashes.setdefault(block, []).append(key)

    def check_found(self, keys: Iterable[bytes]) -> None:
        """Whoever asks for a key gets a block that holds it, as long as there is one."""
        holders: dict[bytes, list[int]] = {}
        for block, held in self.hashes.items():
            for key in held:
                holders.setdefault(key, []).append(block)
        for key in keys:
            found = self.call(self.view, "find_cached_block", key)
            right: list[int | None] = [*holders.get(key, [])] or [None]
            what = f"find_cached_block finds a block that holds {key!r}, while one does"
            self.true(found in right, what, found, f"one of {right}", "POOL-8")

    def evict(self, blocks: Sequence[int]) -> None:
        """Let the engine drop blocks from its prefix cache."""
        self.call(self.harness, "evict", list(blocks))
        for block in blocks:
            self.hashes.pop(block, None)
        self.hashed_free = [block for block in self.hashed_free if block not in blocks]

    def reset(self) -> bool:
        """Let the engine reset its prefix cache; returns whether it did."""
        done: bool = self.call(self.harness, "reset")
        if done:
            self.hashes.clear()
            self.hashed_free.clear()
            self.check_told(self.watched, "at a reset of the prefix cache")
        return done

    def hashed(self, num_blocks: int, *, reverse: bool = False) -> list[int]:
        """Free blocks with hashes, next victim first: allocated, cached, released."""
        blocks = self.allocate(num_blocks)
        self.cache(blocks)
        if reverse:
            blocks.reverse()
        self.release(blocks)
        return blocks

    # --- the view's moves ---

    def touch(self, blocks: Sequence[int]) -> None:
        """Take references through the view."""
        self.call(self.view, "touch_blocks", list(blocks))
        self.held.update(block for block in blocks if block != self.null)
        self.hashed_free = [block for block in self.hashed_free if block not in blocks]

    def free(self, blocks: Sequence[int]) -> None:
        """Give references back through the view."""
        self.call(self.view, "free_blocks", list(blocks))
        self.held = +(self.held - Counter(blocks))
        self._queue(blocks)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Give references back, to the head of the queue."""
        self.call(self.view, "give_back_blocks", list(blocks))
        self.held = +(self.held - Counter(blocks))
        freed = [block for block in _by_last_mention(blocks) if block in self.free_blocks]
        first = [block for block in freed if block in self.hashes]
        self.hashed_free[:0] = first
        front = min(self.joined.values(), default=0) - len(first)
        self.joined.update(zip(first, range(front, front + len(first)), strict=True))

    def free_with_notice(self, blocks: Sequence[int]) -> None:
        """Give references back through the view, and listen."""
        on_reuse = self.told.append
        self.give_name(on_reuse, "told.append", "told = []")
        self.call(self.view, "free_blocks_with_notice", list(blocks), on_reuse)
        self.held = +(self.held - Counter(blocks))
        self.watched.update(block for block in blocks if block != self.null)
        self._queue(blocks)
        self.check_told(set(), "not before its block is handed out again")

    def check_told(self, blocks: Set[int], when: str) -> None:
        """Compare what was told since the last time, each block once."""
        told, expected = sorted(self.told), sorted(blocks)
        self.told.clear()
        self.watched = self.watched - blocks
        if told or expected:
            self.line(f"assert sorted(told) == {expected}, told")
            self.line("told.clear()")
        self.equal(told, expected, f"a notice comes once, {when}", "POOL-14")

    def refuse(self, error: type[Exception], method: str, blocks: Sequence[object]) -> None:
        """Call ``touch_blocks``, or what gives back, with what it must refuse."""
        law = "POOL-10" if issubclass(error, ViewClosedError) else "POOL-4"
        self.refused(error, self.view, method, list(blocks), law=law)

    def walk(self) -> list[tuple[int, bytes]]:
        """All that the view yields now."""
        return self.listed(self.view, "iter_free_block_ids_with_hash")

    def start_walk(self, method: str = "iter_free_block_ids_with_hash") -> Iterator[Any]:
        """A walk to take items from with :meth:`step`: ``(block, key)``, or what else it yields."""
        walk: Iterator[Any] = self.call(self.view, method)
        self.name(walk, "walk")
        return walk

    def open_walk(self) -> Any:
        """A walk that goes on in later steps, to take from with :meth:`take`."""
        walk = self.call(self.view, "walk_free_blocks")
        self.name(walk, f"walk_{len(self.passed) + 1}")
        self.passed[id(walk)] = -inf
        return walk

    def take(self, walk: Any, max_blocks: int) -> list[int]:
        """Take from a resumed walk, and compare with what it must yield next."""
        passed = self.passed[id(walk)]
        blocks = [b for b in self.hashed_free if self.joined[b] > passed][:max_blocks]
        items = [(block, key) for block in blocks for key in self.hashes[block]]
        got = [tuple(item) for item in self.call(walk, "take", max_blocks)]
        what = "a resumed walk yields what is behind what it took before, next victim first"
        self.equal(got, items, what, "POOL-13")
        if blocks:
            self.passed[id(walk)] = self.joined[blocks[-1]]
        return blocks

    def restart(self, walk: Any) -> None:
        """Let a resumed walk begin again."""
        self.call(walk, "restart")
        self.passed[id(walk)] = -inf

    def rest(self, walk: Iterator[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
        """What is left of a walk; more items than there can be break the law."""
        items = []
        limit = sum(map(len, self.hashes.values())) + self.num_blocks
        while (item := self.step(walk)) is not None:
            items.append(item)
            self.true(len(items) <= limit, "a walk ends", items[-3:], f"at most {limit} items")
        return items

    def expected_walk(self) -> list[tuple[int, bytes]]:
        """What a walk must yield now, in order."""
        return [(block, key) for block in self.hashed_free for key in self.hashes[block]]

    # --- what must hold at any time ---

    def check_free(self, *blocks: int) -> None:
        """Allocate every free block, once: the free queue holds them and no others."""
        free = self.free_blocks
        allocated = self.allocate(len(free))
        self.equal(set(allocated), free, "the free queue holds every block that nobody holds")
        for block in blocks:
            self.true(block in allocated, f"block {block} is free", allocated, f"with {block}")
        self.release(allocated)

    def check_held(self, *blocks: int) -> None:
        """As :meth:`check_free`, and none of ``blocks`` is among them."""
        assert not self.free_blocks & set(blocks), "the oracle knows that they are held"
        self.check_free()

    def check_queries(self) -> None:
        """Compare what the view tells with the oracle; nothing of it is recorded."""
        with self.unrecorded():
            free = self.free_blocks
            if self.can(Capability.CACHE):
                self.equal(
                    self.walk(),
                    self.expected_walk(),
                    "a walk yields every free block with its hashes, next victim first",
                    "POOL-6",
                )
            if self.can(Capability.FREE_COUNT):
                got = self.call(self.view, "num_free_blocks")
                self.equal(got, len(free), "num_free_blocks counts what nobody holds", "POOL-1")
            if self.can(Capability.FREE_ORDER):
                ids = self.listed(self.view, "iter_free_block_ids")
                self.equal(len(ids), len(set(ids)), "no block is queued twice", "POOL-2")
                self.equal(set(ids), free, "the free queue holds what nobody holds", "POOL-1")
                hashed = [block for block in ids if block in self.hashed_free]
                self.equal(hashed, self.hashed_free, "the queue is in eviction order", "POOL-11")
            if self.can(Capability.HOLDS):
                got = dict(self.call(self.view, "held_blocks"))
                self.equal(got, dict(self.held), "held_blocks tells every reference", "POOL-9")
            if self.can(Capability.IS_FREE):
                got = {b for b in range(self.num_blocks) if self.call(self.view, "is_free", b)}
                self.equal(got, free, "is_free is True for what nobody holds", "POOL-1")
            if self.can(Capability.FIND_CACHED):
                self.check_found(self.last_keys)
            if self.can(Capability.BLOCK_KEYS):
                blocks = list(self.blocks)
                told = [tuple(keys) for keys in self.call(self.view, "block_keys", blocks)]
                known = [tuple(self.hashes.get(block, ())) for block in blocks]
                self.equal(told, known, "block_keys tells the keys, primary first", "POOL-8")
                primaries = self.call(self.view, "primary_keys", blocks)
                first = [keys[0] if keys else None for keys in known]
                self.equal(primaries, first, "primary_keys tells the first key", "POOL-8")

    def _queue(self, blocks: Sequence[int]) -> None:
        free = self.free_blocks
        for block in _by_last_mention(blocks):
            if block in self.hashes and block in free:
                self.joined[block] = next(self._times)
                self.hashed_free.append(block)


def _by_last_mention(blocks: Sequence[int]) -> list[int]:
    """Each block once: of one that is named several times, the last mention sets it free."""
    return list(dict.fromkeys(reversed(blocks)))[::-1]


pool_check = checks_driving(PoolDriver, contract="pool")
"""Register a check that drives the harness through :class:`PoolDriver`."""
