"""Block tables, hits and references of ``KVCacheManager``, against plain dicts and sets.

The oracle knows tokens, not the reference's helpers: a block's name is a digest
of all tokens up to its end, what a token reads comes from an attention mask, and
what is cached is read off the pool block by block.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvview import (
    BlockRemoved,
    BlockStored,
    CacheGeometry,
    CacheGroup,
    ChunkedLocalAttention,
    FullAttention,
    GeometryError,
    GPUEvent,
    Mamba,
    SlidingWindow,
)
from kvview.testing.geometry.model import is_read
from kvview_reference.geometry.coordinator import (
    HybridKVCacheCoordinator,
    KVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    SingleTypeKVCacheManager,
    UnitaryKVCacheCoordinator,
    make_coordinator,
)
from kvview_reference.geometry.kv_cache_manager import KVCacheManager
from kvview_reference.pool import BlockPool

Tokens = tuple[int, ...]
Key = bytes
NULL = 0


def first_read(group: CacheGroup, token: int) -> int:
    """The first position that the token's attention row reads; its own when no other."""
    return min((p for p in range(token) if is_read(group, token, p)), default=token)


def digest(prefix: Tokens) -> bytes:
    return sha256(repr(prefix).encode()).digest()


def make_hashes(tokens: Tokens, hash_block_size: int) -> list[bytes]:
    ends = range(hash_block_size, len(tokens) + 1, hash_block_size)
    return [digest(tokens[:end]) for end in ends]


@st.composite
def geometries(draw: st.DrawFn) -> CacheGeometry:
    hash_size = draw(st.integers(1, 2))
    groups: list[CacheGroup] = []
    for _ in range(draw(st.integers(1, 3))):
        size = hash_size * draw(st.integers(1, 3))
        span = draw(st.integers(1, 12))
        groups.append(
            draw(
                st.sampled_from(
                    [
                        FullAttention(size),
                        SlidingWindow(size, span),
                        ChunkedLocalAttention(size, span),
                        Mamba(size),
                    ]
                )
            )
        )
    common = math.lcm(*(group.block_size for group in groups))
    return CacheGeometry(common * draw(st.integers(1, 2)), hash_size, tuple(groups))


@dataclass
class Life:
    """A request as the oracle sees it."""

    tokens: Tokens
    num_computed: int
    room: int
    dropped_at: int  # token count at which skipped blocks were last given back
    num_loading: int = 0


@dataclass(frozen=True)
class Snapshot:
    tables: dict[str, tuple[list[int], ...]]
    ref_cnt: list[int]
    free: list[int]
    hashes: list[tuple[bytes, ...]]


def make_manager(geometry: CacheGeometry, num_blocks: int, **options: bool) -> KVCacheManager:
    return KVCacheManager(
        geometry.groups,
        num_blocks,
        scheduler_block_size=geometry.scheduler_block_size,
        hash_block_size=geometry.hash_block_size,
        **options,
    )


def coordinator_of(
    make: Callable[..., KVCacheCoordinator],
    pool: BlockPool,
    geometry: CacheGeometry,
    **options: bool,
) -> KVCacheCoordinator:
    return make(
        geometry.groups,
        pool,
        scheduler_block_size=geometry.scheduler_block_size,
        hash_block_size=geometry.hash_block_size,
        **options,
    )


class CacheMachine(RuleBasedStateMachine):
    """Requests that share prefixes come, grow, skip, load, are preempted and go."""

    def __init__(self) -> None:
        super().__init__()
        self.lives: dict[str, Life] = {}
        self.content: dict[int, tuple[int, Tokens]] = {}  # block -> group, prefix up to its end
        self.announced: Counter[Key] = Counter()
        self.serial = 0

    @initialize(geometry=geometries(), num_blocks=st.integers(4, 30))
    def build(self, geometry: CacheGeometry, num_blocks: int) -> None:
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.manager = make_manager(geometry, num_blocks, enable_kv_cache_events=True)
        self.pool = self.manager.pool
        expected = (
            UnitaryKVCacheCoordinator if len(geometry.groups) == 1 else HybridKVCacheCoordinator
        )
        assert type(self.manager.coordinator) is expected

    # --- the oracle ---

    def key(self, group: int, tokens: Tokens) -> Key:
        return digest(tokens) + group.to_bytes(4, "big")

    def cached(self) -> dict[Key, set[int]]:
        found: dict[Key, set[int]] = {}
        for block in range(self.num_blocks):
            for key in self.pool.block_keys([block])[0]:
                found.setdefault(key, set()).add(block)
        return found

    def longest_hit(self, tokens: Tokens, cached: dict[Key, set[int]]) -> int:
        step = self.geometry.scheduler_block_size
        for num_tokens in range((len(tokens) - 1) // step * step, 0, -step):
            if all(
                self.key(index, tokens[: block + group.block_size]) in cached
                for index, group in enumerate(self.geometry.groups)
                for block in range(0, num_tokens, group.block_size)
                if block + group.block_size > first_read(group, num_tokens)
            ):
                return num_tokens
        return 0

    def num_skipped(self, group: CacheGroup, num_tokens: int) -> int:
        """Leading blocks of which no token is read by token ``num_tokens``."""
        return sum(
            end <= first_read(group, num_tokens)
            for end in range(group.block_size, num_tokens + 1, group.block_size)
        )

    def snapshot(self) -> Snapshot:
        blocks = range(self.num_blocks)
        return Snapshot(
            {name: self.manager.block_ids(name) for name in self.lives},
            [self.pool.ref_cnt(block) for block in blocks],
            list(self.pool.iter_free_block_ids()),
            [self.pool.block_keys([block])[0] for block in blocks],
        )

    def compute(self, name: str, num_tokens: int) -> None:
        """Write KV up to ``num_tokens`` and let the manager cache it."""
        life = self.lives[name]
        tables = self.manager.block_ids(name)
        for index, (group, table) in enumerate(zip(self.geometry.groups, tables, strict=True)):
            size = group.block_size
            for number in range(life.num_computed // size, num_tokens // size):
                if table[number] != NULL:
                    prefix = life.tokens[: (number + 1) * size]
                    self.content[table[number]] = index, prefix
        hashes = make_hashes(life.tokens, self.geometry.hash_block_size)
        self.manager.cache_blocks(name, hashes, num_tokens)
        life.num_computed = life.dropped_at = num_tokens
        for index, (group, table) in enumerate(zip(self.geometry.groups, tables, strict=True)):
            for number in range(num_tokens // group.block_size):
                if table[number] != NULL:
                    prefix = life.tokens[: (number + 1) * group.block_size]
                    assert self.key(index, prefix) in self.pool.block_keys([table[number]])[0]

    # --- rules ---

    @rule(
        head=st.integers(0, 1),
        num_head=st.integers(1, 36),
        num_tail=st.integers(0, 8),
        external=st.integers(0, 2),
        data=st.data(),
    )
    def start(
        self, head: int, num_head: int, num_tail: int, external: int, data: st.DataObject
    ) -> None:
        tokens = (head,) * num_head + (7,) * num_tail
        step = self.geometry.scheduler_block_size
        cached = self.cached()
        hits, num_hit = self.manager.find_computed_blocks(
            make_hashes(tokens, self.geometry.hash_block_size), len(tokens)
        )
        assert num_hit == self.longest_hit(tokens, cached)
        for index, (group, blocks) in enumerate(zip(self.geometry.groups, hits, strict=True)):
            assert len(blocks) == num_hit // group.block_size
            skipped = self.num_skipped(group, num_hit)
            assert blocks[:skipped] == [NULL] * skipped
            for number, block in enumerate(blocks[skipped:], skipped):
                prefix = tokens[: (number + 1) * group.block_size]
                assert block in cached[self.key(index, prefix)]
                assert self.content[block] == (index, prefix)  # never a stale block

        most = (len(tokens) - 1 - num_hit) // step
        num_loading = step * min(external, most)
        num_ready = num_hit + num_loading
        room = num_ready if num_loading else data.draw(st.integers(num_ready + 1, len(tokens)))
        needed, pinned = 0, set()
        for group, blocks in zip(self.geometry.groups, hits, strict=True):
            kept = blocks[self.num_skipped(group, num_ready) :]
            pinned |= {block for block in kept if self.pool.ref_cnt(block) == 0}
            total = -(-room // group.block_size)
            needed += total - self.num_skipped(group, num_ready) - len(kept)
        fits = needed + len(pinned) <= self.pool.num_free_blocks()

        before = self.snapshot()
        name = f"r{self.serial}"
        self.serial += 1
        done = self.manager.allocate_slots(
            name, room, hit_blocks=hits, num_computed_tokens=num_ready
        )
        assert done == fits
        if not done:
            assert self.snapshot() == before
            assert self.manager.block_ids(name) == ([],) * len(hits)
            return
        self.lives[name] = Life(tokens, num_hit, room, num_ready, num_loading)
        for group, blocks, table in zip(
            self.geometry.groups, hits, self.manager.block_ids(name), strict=True
        ):
            skipped = self.num_skipped(group, num_ready)
            kept = blocks[skipped:]
            assert table[skipped : skipped + len(kept)] == kept  # no hit was evicted
            assert len(set(table[skipped:])) == len(table) - skipped
            for block in table[skipped + len(kept) :]:
                self.content.pop(block, None)

    def idle(self) -> list[str]:
        return sorted(name for name, life in self.lives.items() if not life.num_loading)

    def loading(self) -> list[str]:
        return sorted(name for name, life in self.lives.items() if life.num_loading)

    @precondition(lambda self: self.loading())
    @rule(data=st.data())
    def load_ends(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.loading()))
        life = self.lives[name]
        num_ready = life.num_computed + life.num_loading
        life.num_loading = 0
        self.compute(name, num_ready)

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), more=st.integers(0, 12))
    def run(self, data: st.DataObject, more: int) -> None:
        """Compute what has a place, then take more room, as an engine's steps do."""
        name = data.draw(st.sampled_from(self.idle()))
        life = self.lives[name]
        if life.room > life.num_computed:
            self.compute(name, data.draw(st.integers(life.num_computed + 1, life.room)))
        asked = min(len(life.tokens), life.num_computed + more)  # may be less than it has
        room = max(life.room, asked)
        tables = self.manager.block_ids(name)
        needed = sum(
            max(0, -(-room // group.block_size) - len(table))
            for group, table in zip(self.geometry.groups, tables, strict=True)
        )
        fits = needed <= self.pool.num_free_blocks()
        before = self.snapshot()
        assert self.manager.allocate_slots(name, asked) == fits
        if not fits:
            assert self.snapshot() == before
            return
        life.room = room
        for old, new in zip(tables, self.manager.block_ids(name), strict=True):
            assert new[: len(old)] == old
            for block in new[len(old) :]:
                self.content.pop(block, None)

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), extra=st.integers(1, 5))
    def generate(self, data: st.DataObject, extra: int) -> None:
        life = self.lives[data.draw(st.sampled_from(sorted(self.lives)))]
        life.tokens += (100 + self.serial,) * extra

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """Finish, abort or preempt: to the manager they are one."""
        name = data.draw(st.sampled_from(sorted(self.lives)))
        self.manager.free(name)
        del self.lives[name]
        assert self.manager.block_ids(name) == ([],) * len(self.geometry.groups)
        self.manager.free(name)  # of a request without blocks: nothing

    @rule()
    def reset(self) -> None:
        before = self.snapshot()
        in_use = any(before.ref_cnt)
        assert self.manager.reset_prefix_cache() == (not in_use)
        if in_use:
            assert self.snapshot() == before
        else:
            assert self.cached() == {}

    # --- invariants ---

    @invariant()
    def tables_are_null_exactly_where_skipped(self) -> None:
        for name, life in self.lives.items():
            for group, table in zip(
                self.geometry.groups, self.manager.block_ids(name), strict=True
            ):
                assert len(table) == -(-life.room // group.block_size)
                skipped = self.num_skipped(group, life.dropped_at)
                nulls = [number for number, block in enumerate(table) if block == NULL]
                assert nulls == list(range(skipped))

    @invariant()
    def references_and_free_blocks_are_conserved(self) -> None:
        if not hasattr(self, "pool"):
            return
        references: Counter[int] = Counter()
        for name in self.lives:
            for table in self.manager.block_ids(name):
                references.update(block for block in table if block != NULL)
        blocks = range(1, self.num_blocks)
        assert {b: self.pool.ref_cnt(b) for b in blocks} == {b: references[b] for b in blocks}
        free = list(self.pool.iter_free_block_ids())
        assert sorted([*free, *references]) == list(blocks)
        assert self.pool.num_free_blocks() == len(free)
        assert self.pool.block_keys([NULL])[0] == ()

    @invariant()
    def gpu_events_tell_what_is_cached(self) -> None:
        if not hasattr(self, "pool"):
            return
        for event in self.pool.take_events():
            self.apply(event)
        held = Counter({key: len(blocks) for key, blocks in self.cached().items()})
        assert self.announced == held

    def apply(self, event: GPUEvent) -> None:
        if isinstance(event, BlockStored):
            group = event.group_idx
            assert event.block_size == self.geometry.groups[group].block_size
            for parent, child in zip(
                [event.parent_block_hash, *event.block_hashes], event.block_hashes, strict=False
            ):
                assert self.parents(child, event.block_size) == {parent}
            self.announced.update(h + group.to_bytes(4, "big") for h in event.block_hashes)
        elif isinstance(event, BlockRemoved):
            keys = Counter(h + event.group_idx.to_bytes(4, "big") for h in event.block_hashes)
            assert keys <= self.announced
            self.announced -= keys
        else:
            self.announced.clear()

    def parents(self, block_hash: bytes, block_size: int) -> set[bytes | None]:
        """Digests of what lies before a block, over every request that has it."""
        found: set[bytes | None] = set()
        for life in self.lives.values():
            for end in range(block_size, len(life.tokens) + 1, block_size):
                if digest(life.tokens[:end]) == block_hash:
                    before = life.tokens[: end - block_size]
                    found.add(digest(before) if before else None)
        return found

    def teardown(self) -> None:
        for name in list(self.lives):
            self.manager.free(name)
        if hasattr(self, "pool"):
            assert self.pool.num_free_blocks() == self.num_blocks - 1
            assert self.manager.reset_prefix_cache()


CacheMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestCacheMachine = CacheMachine.TestCase


# --- the three coordinators ---


def run_prompt(manager: KVCacheManager, name: str, tokens: Tokens) -> int:
    """Start, compute and free a prompt; returns the tokens that it hit."""
    hashes = make_hashes(tokens, manager.geometry.hash_block_size)
    hits, num_hit = manager.find_computed_blocks(hashes, len(tokens))
    assert manager.allocate_slots(name, len(tokens), hit_blocks=hits, num_computed_tokens=num_hit)
    manager.cache_blocks(name, hashes, len(tokens))
    manager.free(name)
    return num_hit


def test_make_coordinator_takes_the_one_that_fits() -> None:
    one, two = CacheGeometry.single(4), CacheGeometry(4, 4, (FullAttention(4), Mamba(4)))
    pool = BlockPool(8)
    assert (
        type(coordinator_of(make_coordinator, pool, one, enable_caching=True))
        is UnitaryKVCacheCoordinator
    )
    assert (
        type(coordinator_of(make_coordinator, pool, two, enable_caching=True))
        is HybridKVCacheCoordinator
    )
    for geometry in (one, two):
        none = coordinator_of(make_coordinator, pool, geometry, enable_caching=False)
        assert type(none) is KVCacheCoordinatorNoPrefixCache


def test_unitary_refuses_two_groups() -> None:
    geometry = CacheGeometry(4, 4, (FullAttention(4), Mamba(4)))
    with pytest.raises(GeometryError, match=r"GEO-4: .* takes 1 KV-cache group, got 2"):
        coordinator_of(UnitaryKVCacheCoordinator, BlockPool(8), geometry)


def test_hybrid_serves_one_group_too() -> None:
    pool, tokens = BlockPool(8), (1,) * 9
    coordinator = coordinator_of(HybridKVCacheCoordinator, pool, CacheGeometry.single(4))
    blocks = pool.allocate_blocks(2)
    pool.cache_blocks(blocks, make_hashes(tokens, 4), block_size=4)
    assert coordinator.find_longest_cache_hit(make_hashes(tokens, 4), 8) == ((blocks,), 8)


def test_without_prefix_cache_no_hashes_are_needed() -> None:
    manager = make_manager(CacheGeometry.single(4), 8, enable_caching=False)
    assert manager.allocate_slots("a", 17)
    manager.cache_blocks("a", [], 17)
    manager.free("a")
    assert manager.pool.num_free_blocks() == 7


def test_a_hit_leaves_a_token_to_compute() -> None:
    manager = make_manager(CacheGeometry.single(4), 20)
    assert run_prompt(manager, "a", (1,) * 16) == 0
    assert run_prompt(manager, "b", (1,) * 16) == 12
    assert run_prompt(manager, "c", (1,) * 17) == 16


# --- GEO-1: scheduler_block_size comes from the top ---


@pytest.mark.parametrize(
    ("sizes", "groups", "numbers"),
    [
        ((12, 4), (FullAttention(8),), "12.*8"),
        ((16, 4), (FullAttention(4), Mamba(12)), "16.*12"),
        ((16, 8), (FullAttention(16), FullAttention(4)), "4.*8"),
        ((0, 4), (FullAttention(4),), "scheduler_block_size .*0"),
        ((4, -4), (FullAttention(4),), "hash_block_size .*-4"),
    ],
)
@pytest.mark.parametrize("enable_caching", [True, False])
def test_geo2_sizes_that_do_not_divide_are_refused_wherever_they_are_given(
    sizes: tuple[int, int], groups: tuple[CacheGroup, ...], numbers: str, enable_caching: bool
) -> None:
    given: dict[str, Any] = {"scheduler_block_size": sizes[0], "hash_block_size": sizes[1]}
    with pytest.raises(GeometryError, match=f"^GEO-2: .*{numbers}"):
        KVCacheManager(groups, 8, enable_caching=enable_caching, **given)
    with pytest.raises(GeometryError, match=f"^GEO-2: .*{numbers}"):
        make_coordinator(groups, BlockPool(8), enable_caching, **given)
    with pytest.raises(GeometryError, match=f"^GEO-2: .*{numbers}"):
        SingleTypeKVCacheManager(groups[-1], BlockPool(8), kv_cache_group_id=0, **given)


def test_geo1_geometry_is_threaded_to_every_manager() -> None:
    geometry = CacheGeometry(16, 2, (FullAttention(4), Mamba(8)))
    manager = make_manager(geometry, 8)
    assert manager.geometry == manager.coordinator.geometry == geometry
    assert [single.geometry for single in manager.coordinator.managers] == [
        replace(geometry, groups=(group,)) for group in geometry.groups
    ]


# --- by hand ---


def test_a_hit_of_the_same_allocation_is_not_evicted_by_it() -> None:
    manager = make_manager(CacheGeometry.single(4), 5)
    run_prompt(manager, "a", (1,) * 16)  # fills the pool: 4 cached blocks, all free
    tokens = (1,) * 12 + (2,) * 4
    hits, num_hit = manager.find_computed_blocks(make_hashes(tokens, 4), 16)
    assert num_hit == 12
    assert manager.allocate_slots("b", 16, hit_blocks=hits, num_computed_tokens=12)
    (table,) = manager.block_ids("b")
    assert table[:3] == hits[0]
    assert len(set(table)) == 4


def test_a_hit_of_one_group_is_not_evicted_by_the_allocation_of_another() -> None:
    geometry = CacheGeometry(4, 4, (FullAttention(4), FullAttention(4)))
    manager = make_manager(geometry, 5)
    run_prompt(manager, "a", (1,) * 8)  # two blocks a group fill the pool
    tokens = (1,) * 4 + (2,) * 4
    hits, num_hit = manager.find_computed_blocks(make_hashes(tokens, 4), 8)
    others = set(range(1, 5)) - {hits[1][0]}
    manager.pool.touch_blocks([1, 2, 3, 4])
    manager.pool.free_blocks([hits[1][0], *others])  # the next victim is the second group's hit
    assert num_hit == 4
    assert manager.allocate_slots("b", 8, hit_blocks=hits, num_computed_tokens=4)
    tables = manager.block_ids("b")
    assert [table[:1] for table in tables] == list(hits)
    assert len({*tables[0], *tables[1]}) == 4


def test_a_window_behind_an_external_hit_has_nulls_and_says_its_parent() -> None:
    geometry = CacheGeometry(4, 4, (SlidingWindow(4, 5),))
    manager = make_manager(geometry, 20, enable_kv_cache_events=True)
    hashes = make_hashes(tuple(range(24)), 4)
    assert manager.allocate_slots("a", 16, num_computed_tokens=16)  # all 16 to be loaded
    (table,) = manager.block_ids("a")
    assert [block == NULL for block in table] == [True, True, True, False]
    manager.cache_blocks("a", hashes, 16)
    assert manager.pool.take_events() == [BlockStored([hashes[3]], hashes[2], 4, 0)]


def test_skipped_blocks_can_be_hit_by_others_until_they_are_evicted() -> None:
    manager = make_manager(CacheGeometry(4, 4, (SlidingWindow(4, 4),)), 20)
    tokens = (1,) * 33
    assert manager.allocate_slots("a", 32)
    manager.cache_blocks("a", make_hashes(tokens, 4), 32)
    (table,) = manager.block_ids("a")
    assert [block == NULL for block in table] == [True] * 7 + [False]
    _, num_hit = manager.find_computed_blocks(make_hashes(tokens[:13], 4), 13)
    assert num_hit == 12
