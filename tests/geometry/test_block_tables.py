"""The block tables of requests (TABLE-1, TABLE-2), played on a manager and on plain lists."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvview import (
    BlockHash,
    BlockStored,
    CacheGeometry,
    CacheGroup,
    ChunkedLocalAttention,
    FullAttention,
    Mamba,
    SlidingWindow,
    make_offload_key,
)
from kvview_reference.geometry import KVCacheManager
from kvview_reference.pool import BlockPool
from tests.geometry.model import blocks_read

NULL = 0
Block = tuple[int, tuple[int, ...]]
"""A group, and the tokens up to the end of a block."""


def hashes_of(tokens: Sequence[int], size: int) -> list[BlockHash]:
    return [BlockHash(repr(tokens[:end]).encode()) for end in range(size, len(tokens) + 1, size)]


def make_manager(geometry: CacheGeometry, num_blocks: int, **options: bool) -> KVCacheManager:
    return KVCacheManager(geometry, BlockPool(num_blocks, **options))


@dataclass
class Life:
    """A request as the model has it.

    Args:
        tokens: All its tokens.
        tables: Its block tables.
        num_computed: Leading tokens whose KV is in its blocks.
        room: Tokens that have a place.
        num_ready: Tokens that are computed once its loads have ended.
    """

    tokens: tuple[int, ...]
    tables: list[list[int]]
    num_computed: int
    room: int
    num_ready: int


KINDS = (
    lambda size, span: FullAttention(size),
    SlidingWindow,
    ChunkedLocalAttention,
    lambda size, span: Mamba(size),
)
numbers = st.integers(0, 99)


class TableMachine(RuleBasedStateMachine):
    """Starts, computes, extends and frees requests that share prefixes."""

    @initialize(
        hash_size=st.integers(1, 2),
        groups=st.lists(
            st.tuples(st.sampled_from(KINDS), st.integers(1, 3), st.integers(1, 12)),
            min_size=1,
            max_size=3,
        ),
        steps=st.integers(1, 2),
        num_blocks=st.integers(4, 30),
    )
    def start(
        self, hash_size: int, groups: list[tuple[Any, int, int]], steps: int, num_blocks: int
    ) -> None:
        made = tuple(kind(hash_size * size, span) for kind, size, span in groups)
        step = math.lcm(*(group.block_size for group in made)) * steps
        self.geometry = CacheGeometry(step, hash_size, made)
        self.num_blocks = num_blocks
        self.manager = make_manager(self.geometry, num_blocks)
        self.pool = self.manager.pool
        self.lives: dict[str, Life] = {}
        self.content: dict[int, Block] = {}
        self.num_requests = 0

    # --- the model ---

    def hashes(self, tokens: Sequence[int]) -> list[BlockHash]:
        return hashes_of(tokens, self.geometry.hash_block_size)

    def block(self, group: int, tokens: Sequence[int], number: int) -> Block:
        return group, tuple(tokens[: (number + 1) * self.geometry.groups[group].block_size])

    def num_skipped(self, group: CacheGroup, num_tokens: int) -> int:
        """Leading blocks that the token at ``num_tokens`` does not read."""
        return min(blocks_read(group, num_tokens), default=num_tokens // group.block_size)

    def longest_hit(self, tokens: Sequence[int]) -> int:
        cached, step = {*self.content.values()}, self.geometry.scheduler_block_size
        for num_tokens in range((len(tokens) - 1) // step * step, 0, -step):
            if all(
                self.block(index, tokens, number) in cached
                for index, group in enumerate(self.geometry.groups)
                for number in blocks_read(group, num_tokens)
            ):
                return num_tokens
        return 0

    def references(self) -> Counter[int]:
        tables = [table for life in self.lives.values() for table in life.tables]
        return Counter(block for table in tables for block in table if block != NULL)

    def tables_of(self, name: str) -> list[list[int]]:
        return [list(table) for table in self.manager.block_ids(name)]

    def allocate(self, name: str, tables: list[list[int]], room: int, **more: Any) -> bool:
        """Make room, or compare a refusal; adds the new blocks to the tables."""
        used = self.references()
        pinned = {b for table in tables for b in table if b != NULL and not used[b]}
        sizes = [-(-room // group.block_size) for group in self.geometry.groups]
        missing = [max(0, size - len(t)) for size, t in zip(sizes, tables, strict=True)]
        fits = sum(missing) <= self.num_blocks - 1 - len({*used, *pinned})
        assert self.manager.allocate_slots(name, room, **more) == fits, "TABLE-1"
        if not fits:
            return False
        found = self.tables_of(name)
        for table, new, number in zip(tables, found, missing, strict=True):
            assert new[: len(table)] == table, "TABLE-2: blocks in a table stay"
            assert len(new) == len(table) + number, "TABLE-1: a block for every token"
            for block in new[len(table) :]:
                self.content.pop(block, None)
        tables[:] = found
        return True

    # --- operations ---

    @rule(
        head=st.integers(0, 1),
        num_shared=st.integers(1, 36),
        num_own=st.integers(0, 8),
        num_loads=st.integers(0, 2),
        room=numbers,
    )
    def start_request(
        self, head: int, num_shared: int, num_own: int, num_loads: int, room: int
    ) -> None:
        """Start a request with its hit, and perhaps with tokens to load."""
        tokens = (head,) * num_shared + (7,) * num_own
        hits, num_hit = self.manager.find_longest_cache_hit(self.hashes(tokens), len(tokens) - 1)
        assert num_hit == self.longest_hit(tokens), "the longest hit that leaves a token"
        for index, (group, table) in enumerate(zip(self.geometry.groups, hits, strict=True)):
            read = blocks_read(group, num_hit)
            assert len(table) == num_hit // group.block_size, "a hit has all its blocks"
            for number, block in enumerate(table):
                expected = self.block(index, tokens, number) if number in read else None
                assert self.content.get(block) == expected, "a hit has the blocks that are read"
        step = self.geometry.scheduler_block_size
        num_loads = min(num_loads, (len(tokens) - 1 - num_hit) // step)
        num_ready = num_hit + step * num_loads
        room = num_ready if num_loads else num_ready + 1 + room % (len(tokens) - num_ready)
        tables = []
        for group, table in zip(self.geometry.groups, hits, strict=True):
            skipped = self.num_skipped(group, num_ready)
            tables.append([NULL] * skipped + list(table[skipped:]))
        self.num_requests += 1
        name = f"r{self.num_requests}"
        if self.allocate(name, tables, room, hit_blocks=hits, num_computed_tokens=num_ready):
            self.lives[name] = Life(tokens, tables, num_hit, room, num_ready)
        else:
            assert self.tables_of(name) == [[] for _ in tables], "TABLE-2: no room, no tables"

    @precondition(lambda self: self.lives)
    @rule(
        number=numbers,
        steps=st.lists(
            st.tuples(numbers, st.sampled_from((0, 0, 1, 5)), st.integers(0, 12)),
            min_size=1,
            max_size=6,
        ),
    )
    def run(self, number: int, steps: list[tuple[int, int, int]]) -> None:
        """Compute tokens that have a place, then make more room, as the steps of an engine do."""
        name = [*self.lives][number % len(self.lives)]
        life = self.lives[name]
        for num_computed, num_new, num_more in steps:
            if life.num_computed < life.num_ready:
                self.compute(name, life.num_ready)
            elif missing := life.room - life.num_computed:
                self.compute(name, life.num_computed + 1 + num_computed % missing)
            life.tokens += (100 + self.num_requests,) * num_new
            room = min(len(life.tokens), max(1, life.num_computed + num_more))
            if self.allocate(name, life.tables, room):
                life.room = max(life.room, room)

    def compute(self, name: str, num_tokens: int) -> None:
        life = self.lives[name]
        self.manager.cache_blocks(name, self.hashes(life.tokens), num_tokens)
        for index, (group, table) in enumerate(zip(self.geometry.groups, life.tables, strict=True)):
            size = group.block_size
            for number in range(life.num_computed // size, num_tokens // size):
                if table[number] != NULL:
                    self.content[table[number]] = self.block(index, life.tokens, number)
            skipped = self.num_skipped(group, num_tokens)
            table[:skipped] = [NULL] * min(skipped, len(table))
        life.num_computed = num_tokens

    @precondition(lambda self: self.lives)
    @rule(number=numbers)
    def free(self, number: int) -> None:
        """End a request, twice."""
        name = [*self.lives][number % len(self.lives)]
        del self.lives[name]
        for _ in range(2):
            self.manager.free(name)
        assert self.tables_of(name) == [[] for _ in self.geometry.groups], "TABLE-2: no tables"

    @precondition(lambda self: self.content)
    @rule()
    def reset(self) -> None:
        """Reset the prefix cache."""
        is_idle = not self.references()
        assert self.manager.pool.reset_prefix_cache() == is_idle, "a reset needs idle blocks"
        if is_idle:
            self.content.clear()

    @rule(number=numbers, is_zero=st.booleans())
    def be_refused(self, number: int, is_zero: bool) -> None:
        """Call with impossible arguments."""
        names = ["other", *self.lives]
        for law, method, name, args, options in self.wrong_calls(
            names[number % len(names)], 0 if is_zero else -71
        ):
            with pytest.raises(ValueError, match=rf"^{law}: request {name!r} "):
                getattr(self.manager, method)(name, *args, **options)

    def wrong_calls(
        self, name: str, num_tokens: int
    ) -> Iterator[tuple[str, str, str, list[Any], dict[str, Any]]]:
        yield "TABLE-1", "allocate_slots", name, [num_tokens], {}
        for wrong in (8, -4):
            yield "TABLE-1", "allocate_slots", "other", [4], {"num_computed_tokens": wrong}
        hashes = self.hashes(range(200))
        yield "TABLE-2", "cache_blocks", "other", [hashes, 0], {}
        for name, life in self.lives.items():
            more = {"num_computed_tokens": 4}
            yield "TABLE-2", "allocate_slots", name, [len(life.tokens) + 9], more
            yield "TABLE-2", "cache_blocks", name, [hashes, life.room + 12], {}
            largest = max(group.block_size for group in self.geometry.groups)
            if life.room >= largest:
                yield "TABLE-2", "cache_blocks", name, [[], life.room], {}

    # --- observables ---

    @invariant()
    def tables(self) -> None:
        for name, life in self.lives.items():
            assert self.tables_of(name) == life.tables, f"TABLE-2: the tables of {name}"

    @invariant()
    def blocks(self) -> None:
        """The references and the keys of every block."""
        used, blocks = self.references(), range(1, self.num_blocks)
        assert {b: self.pool.ref_cnt(b) for b in blocks if b in used} == used, "references"
        free = [block for block in blocks if block not in used]
        assert sorted(self.pool.iter_free_block_ids()) == free, "free blocks"
        keys: dict[int, tuple[bytes, ...]] = dict.fromkeys(range(self.num_blocks), ())
        for block, (group, tokens) in self.content.items():
            keys[block] = (make_offload_key(repr(tokens).encode(), group),)
        assert self.pool.block_keys([*keys]) == [*keys.values()], "a key for each full block"


TestBlockTables = TableMachine.TestCase
TestBlockTables.settings = settings(stateful_step_count=30, deadline=None)


# --- by hand ---


def test_without_a_prefix_cache_no_hashes_are_needed() -> None:
    manager = make_manager(CacheGeometry.single(4), 8, enable_caching=False)
    assert manager.allocate_slots("a", 17)
    manager.cache_blocks("a", [], 17)
    manager.free("a")
    assert manager.pool.num_free_blocks() == 7


def test_an_event_of_a_window_names_its_parent() -> None:
    geometry = CacheGeometry(4, 4, (SlidingWindow(4, 5),))
    manager = make_manager(geometry, 20, enable_events=True)
    hashes = hashes_of(range(24), 4)
    assert manager.allocate_slots("a", 16, num_computed_tokens=16)  # all 16 to be loaded
    (table,) = manager.block_ids("a")
    assert [block == NULL for block in table] == [True, True, True, False]
    manager.cache_blocks("a", hashes, 16)
    assert manager.pool.take_events() == [BlockStored([hashes[3]], hashes[2], 4, 0)]
