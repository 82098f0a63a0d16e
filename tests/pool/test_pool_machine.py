"""The reference pool against an oracle, with everything at once.

The oracle shares nothing with the pool: the free queue is an explicit list, all
else dicts, and a walk is the queue as it stood, with the time each block joined.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvview import (
    AllBlocksCleared,
    BlockNotHeldError,
    BlockRemoved,
    BlockStored,
    FreeBlockWalk,
    GPUEvent,
    NoFreeBlocksError,
    OffloadKey,
    UnknownBlockError,
)
from kvview_reference import pool as pool_module
from kvview_reference import walks
from kvview_reference.pool import BlockPool


@dataclass
class Walk:
    """A walk of the pool, and what the law says that it must yield."""

    items: Iterator[int | tuple[int, bytes]]
    with_hash: bool
    joined: list[tuple[int, int]] | None = None  # (block, when it joined) at the first next
    taken: int = 0  # of the hashes of the block at hand


@dataclass
class Oracle:
    """The engine's rules, with an explicit list as the free queue."""

    num_blocks: int
    queue: list[int] = field(default_factory=list)
    ref_cnt: Counter[int] = field(default_factory=Counter)
    hashes: dict[int, list[bytes]] = field(default_factory=dict)
    blocks: dict[bytes, list[int]] = field(default_factory=dict)
    joined: dict[int, int] = field(default_factory=dict)  # the time each block last joined
    events: list[GPUEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.queue = list(range(1, self.num_blocks))
        self.joined = dict.fromkeys(self.queue, 0)
        self.hashes = {b: [] for b in range(self.num_blocks)}

    def allocate(self, num_blocks: int) -> list[int]:
        taken, self.queue = self.queue[:num_blocks], self.queue[num_blocks:]
        self.ref_cnt.update(taken)
        for block_id in taken:
            self.evict(block_id)
        return taken

    def touch(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            if block_id:
                self.ref_cnt[block_id] += 1
                if block_id in self.queue:
                    self.queue.remove(block_id)

    def free(self, block_ids: Sequence[int]) -> None:
        front = []
        for block_id in block_ids:
            if block_id:
                self.ref_cnt[block_id] -= 1
                if self.ref_cnt[block_id] == 0:
                    self.joined[block_id] = sum(self.joined.values()) + 1
                    if self.hashes[block_id]:
                        self.queue.append(block_id)
                    else:
                        front.append(block_id)
        self.queue = front + self.queue

    def cache(self, block_ids: list[int], names: list[bytes], group_idx: int) -> None:
        stored = []
        for block_id, name in zip(block_ids, names, strict=True):
            block_hash = name + bytes([0, 0, 0, group_idx])
            if block_id and block_hash not in self.hashes[block_id]:
                self.hashes[block_id].append(block_hash)
                self.blocks.setdefault(block_hash, []).append(block_id)
                stored.append(name)
        if stored:
            self.events.append(BlockStored(stored, None, 16, group_idx))

    def evict(self, block_id: int) -> None:
        for block_hash in self.hashes[block_id]:
            self.blocks[block_hash].remove(block_id)
            self.events.append(BlockRemoved([block_hash[:-4]], block_hash[-1]))
        self.hashes[block_id] = []

    def reset(self) -> bool:
        if len(self.queue) < self.num_blocks - 1:
            return False
        self.hashes = {b: [] for b in self.hashes}
        self.blocks = {}
        self.events.append(AllBlocksCleared())
        return True

    def step(self, walk: Walk) -> int | tuple[int, bytes] | None:
        """What the walk yields next, or None when it is over."""
        if walk.joined is None:
            walk.joined = [(b, self.joined[b]) for b in self.queue]
        while walk.joined:
            block_id, joined = walk.joined[0]
            if block_id in self.queue and self.joined[block_id] == joined:
                if not walk.with_hash and walk.taken == 0:
                    walk.taken = 1
                    return block_id
                if walk.with_hash and walk.taken < len(self.hashes[block_id]):
                    walk.taken += 1
                    return block_id, self.hashes[block_id][walk.taken - 1]
            walk.joined.pop(0)
            walk.taken = 0
        return None


NUM_BLOCKS = 8
ID = st.integers(0, NUM_BLOCKS - 1)
IDS = st.lists(ID, max_size=4)


class PoolMachine(RuleBasedStateMachine):
    max_zeros = pool_module._MAX_ZEROS
    fewest_entries = pool_module._FEWEST_MOVED
    moved_per_touch = pool_module._MOVED_PER_TOUCH
    entries_per_look = walks._ENTRIES_PER_LOOK

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(pool_module, "_MAX_ZEROS", self.max_zeros)
        self.patch.setattr(pool_module, "_FEWEST_MOVED", self.fewest_entries)
        self.patch.setattr(pool_module, "_MOVED_PER_TOUCH", self.moved_per_touch)
        self.patch.setattr(walks, "_ENTRIES_PER_LOOK", self.entries_per_look)
        self.pool = BlockPool(NUM_BLOCKS, enable_events=True)
        self.oracle = Oracle(NUM_BLOCKS)
        self.engine_holds: Counter[int] = Counter()
        self.views = [self.pool.view("a"), self.pool.view("b")]
        self.holds: list[Counter[int]] = [Counter(), Counter()]
        self.walks: list[Walk] = []
        self.resumed: list[tuple[FreeBlockWalk, list[int]]] = []  # and when what it passed joined

    def teardown(self) -> None:
        self.patch.undo()

    @initialize(hashed=st.sets(ID), freed=st.permutations(range(NUM_BLOCKS)), how_many=ID)
    def mix(self, hashed: set[int], freed: list[int], how_many: int) -> None:
        """Begin with hashed and unhashed blocks, most of them free."""
        self.allocate(NUM_BLOCKS - 1)
        names = [b"abcd"[block_id % 4 :][:1] for block_id in hashed]
        self.pool.cache_blocks(list(hashed), names, block_size=16)
        self.oracle.cache(list(hashed), names, 0)
        block_ids = [b for b in freed if b > how_many // 2]
        self.pool.free_blocks(block_ids)
        self.oracle.free(block_ids)
        self.engine_holds -= Counter(block_ids)

    @rule(num_blocks=st.integers(0, 4))
    def allocate(self, num_blocks: int) -> None:
        if num_blocks > len(self.oracle.queue):
            with pytest.raises(NoFreeBlocksError):
                self.pool.allocate_blocks(num_blocks)
            return
        taken = self.pool.allocate_blocks(num_blocks)
        assert taken == self.oracle.allocate(num_blocks)
        self.engine_holds.update(taken)

    @rule(block_ids=IDS)
    def engine_touches(self, block_ids: list[int]) -> None:
        self.pool.touch_blocks(block_ids)
        self.oracle.touch(block_ids)
        self.engine_holds.update(b for b in block_ids if b)

    @rule(data=st.data())
    def engine_frees(self, data: st.DataObject) -> None:
        block_ids = data.draw(self.part_of(self.engine_holds))
        self.pool.free_blocks(block_ids)
        self.oracle.free(block_ids)
        self.engine_holds -= Counter(block_ids)

    @rule(who=st.integers(0, 1), block_ids=IDS)
    def view_touches(self, who: int, block_ids: list[int]) -> None:
        self.views[who].touch_blocks(block_ids)
        self.oracle.touch(block_ids)
        self.holds[who].update(b for b in block_ids if b)

    @rule(who=st.integers(0, 1), data=st.data())
    def view_frees(self, who: int, data: st.DataObject) -> None:
        block_ids = data.draw(self.part_of(self.holds[who]))
        self.views[who].free_blocks(block_ids)
        self.oracle.free(block_ids)
        self.holds[who] -= Counter(block_ids)

    @rule(who=st.integers(0, 1), data=st.data(), extra=st.integers(-2, NUM_BLOCKS + 1))
    def view_errs(self, who: int, data: st.DataObject, extra: int) -> None:
        held = self.holds[who]
        block_ids = [*data.draw(self.part_of(held)), *[extra] * (held[extra] + 1)]
        if not 0 <= extra < NUM_BLOCKS:
            with pytest.raises(UnknownBlockError):
                self.views[who].touch_blocks(block_ids)
            with pytest.raises(UnknownBlockError):
                self.pool.touch_blocks(block_ids)
            with pytest.raises(UnknownBlockError):
                self.views[who].free_blocks(block_ids)
        elif extra:
            with pytest.raises(BlockNotHeldError):
                self.views[who].free_blocks(block_ids)

    @rule(
        data=st.data(),
        names=st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), min_size=1, max_size=4),
        group_idx=st.integers(0, 1),
    )
    def cache(self, data: st.DataObject, names: list[bytes], group_idx: int) -> None:
        in_use = [0, *(b for b in range(1, NUM_BLOCKS) if b not in self.oracle.queue)]
        block_ids = [data.draw(st.sampled_from(in_use)) for _ in names]
        self.pool.cache_blocks(block_ids, names, block_size=16, group_idx=group_idx)
        self.oracle.cache(block_ids, names, group_idx)

    @rule(block_ids=st.lists(ID, max_size=3))
    def evict(self, block_ids: list[int]) -> None:
        self.pool.evict_blocks(block_ids)
        for block_id in block_ids:
            self.oracle.evict(block_id)

    @rule()
    def reset(self) -> None:
        assert self.pool.reset_prefix_cache() == self.oracle.reset()

    @rule()
    def release_everything(self) -> None:
        for holds, free in (
            (self.engine_holds, self.pool.free_blocks),
            (self.holds[0], self.views[0].free_blocks),
            (self.holds[1], self.views[1].free_blocks),
        ):
            block_ids = list(holds.elements())
            free(block_ids)
            self.oracle.free(block_ids)
            holds.clear()

    @rule(who=st.integers(0, 1), with_hash=st.booleans())
    def open_walk(self, who: int, with_hash: bool) -> None:
        view = self.views[who]
        items = view.iter_free_block_ids_with_hash if with_hash else view.iter_free_block_ids
        walk = Walk(items(), with_hash)
        self.walks = [*self.walks[-3:], walk]  # the oldest one is abandoned
        assert next(walk.items, None) == self.oracle.step(walk)

    @precondition(lambda self: self.walks)
    @rule(num_items=st.integers(1, 3))
    def go_on(self, num_items: int) -> None:
        for walk in self.walks:
            for _ in range(num_items):
                assert next(walk.items, None) == self.oracle.step(walk)

    @precondition(lambda self: self.walks)
    @rule(data=st.data())
    def go_on_and_take(self, data: st.DataObject) -> None:
        walk = data.draw(st.sampled_from(self.walks))
        item = next(walk.items, None)
        assert item == self.oracle.step(walk)
        if item is not None:
            self.view_touches(0, [item[0] if isinstance(item, tuple) else item])

    @rule(who=st.integers(0, 1))
    def open_resumed_walk(self, who: int) -> None:
        self.resumed = [*self.resumed[-2:], (self.views[who].walk_free_blocks(), [-1])]

    @precondition(lambda self: self.resumed)
    @rule(num_blocks=st.integers(0, 4), begins_again=st.sampled_from([False, False, True]))
    def go_on_later(self, num_blocks: int, begins_again: bool) -> None:
        oracle = self.oracle
        for walk, passed in self.resumed:
            if begins_again:
                walk.restart()
                passed[:] = [-1]
            due = [b for b in oracle.queue if oracle.hashes[b] and oracle.joined[b] > passed[-1]]
            due = due[:num_blocks]
            assert walk.take(num_blocks) == [(b, key) for b in due for key in oracle.hashes[b]]
            passed += [oracle.joined[b] for b in due]

    @invariant()
    def pool_is_what_the_oracle_says(self) -> None:
        oracle = self.oracle
        # Copies, because draining changes them.
        pool = copy.deepcopy(self.pool)
        assert list(pool.iter_free_block_ids()) == pool.free_block_ids() == oracle.queue
        assert list(pool.iter_free_block_ids_with_hash()) == [
            (b, block_hash) for b in oracle.queue for block_hash in oracle.hashes[b]
        ]
        assert copy.deepcopy(self.pool).allocate_blocks(len(oracle.queue)) == oracle.queue
        assert self.pool.num_free_blocks() == len(oracle.queue)
        for block_id in range(NUM_BLOCKS):
            assert self.pool.ref_cnt(block_id) == oracle.ref_cnt[block_id]
            assert self.pool.block_keys([block_id])[0] == tuple(oracle.hashes[block_id])
        for name in (b"a", b"b", b"c", b"d"):
            for block_hash in (name + bytes(4), name + b"\0\0\0\1"):
                first = next(iter(oracle.blocks.get(block_hash, [])), None)
                assert self.pool.find_cached_block(OffloadKey(block_hash)) == first
        assert [view.held_blocks() for view in self.views] == self.holds
        assert self.pool.take_events() == oracle.events
        oracle.events = []

    @staticmethod
    def part_of(holds: Counter[int]) -> st.SearchStrategy[list[int]]:
        """Some of the holds, repeats included, in any order, with null blocks between."""
        held = [*holds.elements(), 0, 0]
        return st.tuples(st.permutations(held), st.integers(0, len(held))).map(
            lambda drawn: drawn[0][: drawn[1]]
        )


class TidyingPoolMachine(PoolMachine):
    """Entries are moved all the time, few a touch, and a walk looks at one or two."""

    max_zeros = 0
    fewest_entries = moved_per_touch = 1
    entries_per_look = (2, 2)


class ImpatientPoolMachine(PoolMachine):
    """A walk looks at one entry at a time."""

    entries_per_look = (1, 1)


MACHINE_SETTINGS = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestPool = PoolMachine.TestCase
TestPool.settings = MACHINE_SETTINGS
TestTidyingPool = TidyingPoolMachine.TestCase
TestTidyingPool.settings = MACHINE_SETTINGS
TestImpatientPool = ImpatientPoolMachine.TestCase
TestImpatientPool.settings = MACHINE_SETTINGS
