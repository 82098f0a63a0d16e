"""The block tables of requests (TABLE-1, TABLE-2), played on a manager and on plain lists."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from kvview import (
    BlockStored,
    CacheGeometry,
    CacheGroup,
    ChunkedLocalAttention,
    FullAttention,
    Mamba,
    SlidingWindow,
    make_offload_key,
)
from kvview.testing.effort import Effort
from kvview.testing.search import Label, Player, observable, operation, search
from kvview_reference.geometry import KVCacheManager
from tests.geometry.model import blocks_read

NULL = 0
Block = tuple[int, tuple[int, ...]]
"""A group, and the tokens up to the end of a block."""


def hashes_of(tokens: Sequence[int], size: int) -> list[bytes]:
    return [repr(tokens[:end]).encode() for end in range(size, len(tokens) + 1, size)]


def make_manager(geometry: CacheGeometry, num_blocks: int, **options: bool) -> KVCacheManager:
    return KVCacheManager(
        geometry.groups,
        num_blocks,
        scheduler_block_size=geometry.scheduler_block_size,
        hash_block_size=geometry.hash_block_size,
        **options,
    )


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


class Harness:
    capabilities = frozenset[str]()
    manager: Any = None


class TablePlayer(Player):
    """Starts, computes, extends and frees requests that share prefixes."""

    contract = "pool"
    subject_name = "manager"
    labels: ClassVar[Mapping[str, Label]] = {
        "TABLE-1": Label("A request has room for its tokens."),
        "TABLE-2": Label("A request has block tables from its first room to its free."),
    }
    first_moves = ("start_request", "run", "run")

    @override
    def start(self) -> None:
        hash_size = self.rng.randint(1, 2)
        sizes = [hash_size * self.rng.randint(1, 3) for _ in range(self.rng.randint(1, 3))]
        groups = tuple(map(self.draw_group, sizes))
        step = math.lcm(*sizes) * self.rng.randint(1, 2)
        self.geometry = CacheGeometry(step, hash_size, groups)
        self.num_blocks = self.rng.randint(4, 30)
        self.manager = make_manager(self.geometry, self.num_blocks)
        self.pool = self.manager.pool
        self.give_name(self.manager, "manager", f"# {self.geometry}, {self.num_blocks} blocks")
        self.lives: dict[str, Life] = {}
        self.content: dict[int, Block] = {}
        self.num_requests = 0

    def draw_group(self, size: int) -> CacheGroup:
        span = self.rng.randint(1, 12)
        kinds = SlidingWindow(size, span), ChunkedLocalAttention(size, span), Mamba(size)
        return self.rng.choice((FullAttention(size), *kinds))

    # --- the model ---

    def hashes(self, tokens: Sequence[int]) -> list[bytes]:
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
        return [list(table) for table in self.call(self.manager, "block_ids", name)]

    def allocate(self, name: str, tables: list[list[int]], room: int, **more: Any) -> bool:
        """Make room, or compare a refusal; adds the new blocks to the tables."""
        used = self.references()
        pinned = {b for table in tables for b in table if b != NULL and not used[b]}
        sizes = [-(-room // group.block_size) for group in self.geometry.groups]
        missing = [max(0, size - len(t)) for size, t in zip(sizes, tables, strict=True)]
        fits = sum(missing) <= self.num_blocks - 1 - len({*used, *pinned})
        is_done = self.call(self.manager, "allocate_slots", name, room, **more)
        self.equal(is_done, fits, "room is made if enough blocks are free")
        if not fits:
            return False
        found = self.tables_of(name)
        for table, new, number in zip(tables, found, missing, strict=True):
            self.equal(new[: len(table)], table, "blocks in a table stay")
            self.equal(len(new), len(table) + number, "a table has a block for every token")
            for block in new[len(table) :]:
                self.content.pop(block, None)
        tables[:] = found
        return True

    # --- operations ---

    @operation("TABLE-2", weight=2)
    def start_request(self) -> None:
        """Start a request with its hit, and perhaps with tokens to load."""
        head = self.rng.randint(0, 1)
        tokens = (head,) * self.rng.randint(1, 36) + (7,) * self.rng.randint(0, 8)
        hits, num_hit = self.call(
            self.manager, "find_computed_blocks", self.hashes(tokens), len(tokens)
        )
        self.equal(num_hit, self.longest_hit(tokens), "the longest hit that leaves a token")
        for index, (group, table) in enumerate(zip(self.geometry.groups, hits, strict=True)):
            read = blocks_read(group, num_hit)
            self.equal(len(table), num_hit // group.block_size, "a hit has all its blocks")
            for number, block in enumerate(table):
                expected = self.block(index, tokens, number) if number in read else None
                self.equal(self.content.get(block), expected, "a hit has the blocks that are read")
        step = self.geometry.scheduler_block_size
        num_loads = self.rng.randint(0, min(2, (len(tokens) - 1 - num_hit) // step))
        num_ready = num_hit + step * num_loads
        room = num_ready if num_loads else self.rng.randint(num_ready + 1, len(tokens))
        tables = []
        for group, table in zip(self.geometry.groups, hits, strict=True):
            skipped = self.num_skipped(group, num_ready)
            tables.append([NULL] * skipped + table[skipped:])
        self.num_requests += 1
        name = f"r{self.num_requests}"
        options = {"hit_blocks": hits, "num_computed_tokens": num_ready}
        if self.allocate(name, tables, room, **options):
            self.lives[name] = Life(tokens, tables, num_hit, room, num_ready)
        else:
            self.equal(self.tables_of(name), [[] for _ in tables], "no room, no tables")

    @operation("TABLE-1", weight=6)
    def run(self) -> None:
        """Compute tokens that have a place, then make more room, as the steps of an engine do."""
        if not self.lives:
            return
        name = self.rng.choice([*self.lives])
        life = self.lives[name]
        if life.num_computed < life.num_ready:
            self.compute(name, life.num_ready)
        elif life.num_computed < life.room:
            self.compute(name, self.rng.randint(life.num_computed + 1, life.room))
        if self.rng.random() < 0.3:
            life.tokens += (100 + self.num_requests,) * self.rng.randint(1, 5)
        room = min(len(life.tokens), max(1, life.num_computed + self.rng.randint(0, 12)))
        if self.allocate(name, life.tables, room):
            life.room = max(life.room, room)

    def compute(self, name: str, num_tokens: int) -> None:
        life = self.lives[name]
        self.call(self.manager, "cache_blocks", name, self.hashes(life.tokens), num_tokens)
        for index, (group, table) in enumerate(zip(self.geometry.groups, life.tables, strict=True)):
            size = group.block_size
            for number in range(life.num_computed // size, num_tokens // size):
                if table[number] != NULL:
                    self.content[table[number]] = self.block(index, life.tokens, number)
            skipped = self.num_skipped(group, num_tokens)
            table[:skipped] = [NULL] * min(skipped, len(table))
        life.num_computed = num_tokens

    @operation("TABLE-2")
    def free(self) -> None:
        """End a request, twice."""
        if self.lives:
            name = self.rng.choice([*self.lives])
            del self.lives[name]
            for _ in range(2):
                self.call(self.manager, "free", name)
            self.equal(self.tables_of(name), [[] for _ in self.geometry.groups], "no tables left")

    @operation("TABLE-2", weight=0.5)
    def reset(self) -> None:
        """Reset the prefix cache."""
        is_idle = not self.references()
        is_done = self.call(self.manager, "reset_prefix_cache")
        self.equal(is_done, is_idle, "a reset needs idle blocks")
        if is_idle:
            self.content.clear()

    @operation("TABLE-1")
    def be_refused(self) -> None:
        """Call with impossible arguments."""
        for law, method, name, args, options in self.wrong_calls():
            error = self.refused(ValueError, self.manager, method, name, *args, law=law, **options)
            is_named = str(error).startswith(f"{law}: request {name!r} ")
            self.true(is_named, "the error names law and request", str(error), law, law)

    def wrong_calls(self) -> Iterator[tuple[str, str, str, list[Any], dict[str, Any]]]:
        names = ["other", *self.lives]
        yield "TABLE-1", "allocate_slots", self.rng.choice(names), [-self.rng.choice((0, 71))], {}
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

    @observable("TABLE-2")
    def tables(self) -> None:
        """The tables of every request."""
        for name, life in self.lives.items():
            self.equal(self.tables_of(name), life.tables, f"the tables of {name}")

    @observable("TABLE-2")
    def blocks(self) -> None:
        """The references and the keys of every block."""
        used, blocks = self.references(), range(1, self.num_blocks)
        self.equal({b: self.pool.ref_cnt(b) for b in blocks if b in used}, used, "references")
        free = [block for block in blocks if block not in used]
        self.equal(sorted(self.pool.iter_free_block_ids()), free, "free blocks")
        keys: dict[int, tuple[bytes, ...]] = dict.fromkeys(range(self.num_blocks), ())
        for block, (group, tokens) in self.content.items():
            keys[block] = (make_offload_key(repr(tokens).encode(), group),)
        self.equal(self.pool.block_keys([*keys]), [*keys.values()], "a key for each full block")


def test_block_tables() -> None:
    result = search(TablePlayer, Harness, Effort())
    assert not result.failures, str(next(iter(result.failures.values())))
    assert {*result.compared} >= {"TABLE-1", "TABLE-2"}


# --- by hand ---


def test_without_a_prefix_cache_no_hashes_are_needed() -> None:
    manager = make_manager(CacheGeometry.single(4), 8, enable_caching=False)
    assert manager.allocate_slots("a", 17)
    manager.cache_blocks("a", [], 17)
    manager.free("a")
    assert manager.pool.num_free_blocks() == 7


def test_an_event_of_a_window_names_its_parent() -> None:
    geometry = CacheGeometry(4, 4, (SlidingWindow(4, 5),))
    manager = make_manager(geometry, 20, enable_kv_cache_events=True)
    hashes = hashes_of(range(24), 4)
    assert manager.allocate_slots("a", 16, num_computed_tokens=16)  # all 16 to be loaded
    (table,) = manager.block_ids("a")
    assert [block == NULL for block in table] == [True, True, True, False]
    manager.cache_blocks("a", hashes, 16)
    assert manager.pool.take_events() == [BlockStored([hashes[3]], hashes[2], 4, 0)]
