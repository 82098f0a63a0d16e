"""Calls on a coordinator, compared with an oracle that only knows attention masks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from kvview.errors import GeometryError
from kvview.geometry import CacheGroup, ChunkedLocalAttention, Mamba, SlidingWindow
from kvview.testing.checks import checks_driving
from kvview.testing.harness import MIN_CACHED_BLOCKS, Capability, Factory
from kvview.testing.recorder import Recorder


def is_read(group: CacheGroup, token: int, position: int) -> bool:
    """Whether ``token`` reads what lies at an earlier position: one cell of the mask."""
    if isinstance(group, SlidingWindow):
        return token - position < group.sliding_window
    if isinstance(group, ChunkedLocalAttention):
        return position // group.attention_chunk_size == token // group.attention_chunk_size
    if isinstance(group, Mamba):
        return position == token - 1
    return True


@cache
def blocks_read(group: CacheGroup, token: int) -> frozenset[int]:
    """Numbers of the blocks before ``token`` that it reads."""
    return frozenset(p // group.block_size for p in range(token) if is_read(group, token, p))


class GeometryDriver(Recorder):
    """Caches blocks one by one, and knows every hit by trying each prefix.

    Args:
        factory: Makes the harness.
        law: The law that is checked.
    """

    def __init__(self, factory: Factory, law: str) -> None:
        super().__init__(factory, law, "coordinator")
        self._first = self.harness
        self.groups: tuple[CacheGroup, ...] = ()
        self.scheduler_block_size = self.hash_block_size = 1
        self.cached: dict[tuple[int, tuple[bytes, ...]], int] = {}

    @property
    def room(self) -> int:
        """Blocks that can be cached without an eviction."""
        return MIN_CACHED_BLOCKS - len(self.cached)

    def can(self, capability: Capability) -> bool:
        """Whether the harness declares a capability."""
        return capability in self.harness.capabilities

    def start(
        self, scheduler_block_size: int, hash_block_size: int, *groups: CacheGroup
    ) -> GeometryDriver:
        """Go on with a fresh harness of a geometry that is right, and a fresh script."""
        sizes = scheduler_block_size, hash_block_size
        self._lines.clear()
        self.use(self.call(self._first, "with_geometry", *sizes, groups), "coordinator")
        self.groups, self.cached = groups, {}
        self.scheduler_block_size, self.hash_block_size = sizes
        return self

    def refuse(
        self, scheduler_block_size: int, hash_block_size: int, *groups: CacheGroup
    ) -> Exception:
        """Ask for a geometry that is wrong."""
        sizes = scheduler_block_size, hash_block_size
        return self.refused(GeometryError, self.harness, "with_geometry", *sizes, groups)

    def request(
        self, name: str, num_tokens: int, like: Sequence[bytes] = (), num_shared: int = 0
    ) -> list[bytes]:
        """The block hashes of a request, by its name in the script.

        Args:
            name: A letter.
            num_tokens: Of the request.
            like: Hashes of a request with the same beginning.
            num_shared: How many of them.
        """
        own = range(num_shared, num_tokens // self.hash_block_size)
        hashes = [*like[:num_shared], *(b"%s%d" % (name.encode(), i) for i in own)]
        shared = f"*{self._names[id(like)]}[:{num_shared}], " if num_shared else ""
        self.line(f"{name} = [{shared}*(b'{name}%d' % i for i in range({own.start}, {own.stop}))]")
        self._names[id(hashes)] = name
        self._kept.append(hashes)
        return hashes

    def cache(self, hashes: Sequence[bytes], group_idx: int, blocks: Iterable[int]) -> None:
        """Cache blocks of a request in one group, those that are not cached yet."""
        new = [b for b in blocks if self._key(hashes, group_idx, b) not in self.cached]
        with self.unrecorded():
            for block in new:
                block_id = self.call(self.harness, "cache", hashes, group_idx, block)
                self.true(
                    block_id not in {self.harness.null_block_id, *self.cached.values()},
                    f"each block is cached alone, and {MIN_CACHED_BLOCKS} fit",
                    block_id,
                    "another block",
                )
                self.cached[self._key(hashes, group_idx, block)] = block_id
        if new:
            self.line(f"for i in {new}: h.cache({self._names[id(hashes)]}, {group_idx}, i)")

    def check_hit(self, hashes: Sequence[bytes], max_tokens: int) -> None:
        """The hit is the longest one, and its tables are what the next token reads."""
        with self.unrecorded():
            found = self.call(self.subject, "find_longest_cache_hit", hashes, max_tokens)
            self.true(
                isinstance(found, tuple) and len(found) == 2,
                "find_longest_cache_hit returns tables and tokens",
                found,
                "a tuple of two",
            )
            num_tokens, expected = found[1], self._longest(hashes, max_tokens)
            what = f"a hit is a multiple of scheduler_block_size ({self.scheduler_block_size})"
            is_aligned = num_tokens % self.scheduler_block_size == 0
            self.true(is_aligned, what, num_tokens, str(expected), "GEO-1")
            law = "GEO-4" if len(self.groups) > 1 else "GEO-3"
            what = f"the longest hit of at most {max_tokens} tokens"
            self.equal(num_tokens, expected, what, law)
            tables = [list(table) for table in found[0]]
            what = f"the tables of a hit of {num_tokens} tokens: what is read, null before"
            self.equal(tables, self._tables(hashes, num_tokens), what, "GEO-3")

    def check_hits(self, hashes: Sequence[bytes], max_tokens: int) -> None:
        """Every limit up to ``max_tokens``."""
        for limit in range(max_tokens + 1):
            self.check_hit(hashes, limit)

    def _key(
        self, hashes: Sequence[bytes], group_idx: int, block: int
    ) -> tuple[int, tuple[bytes, ...]]:
        end = (block + 1) * self.groups[group_idx].block_size
        return group_idx, tuple(hashes[: end // self.hash_block_size])

    def _longest(self, hashes: Sequence[bytes], max_tokens: int) -> int:
        prefixes = range(0, max_tokens + 1, self.scheduler_block_size)
        return max(n for n in prefixes if self._is_hit(hashes, n))

    def _is_hit(self, hashes: Sequence[bytes], num_tokens: int) -> bool:
        return all(
            self._key(hashes, index, block) in self.cached
            for index, group in enumerate(self.groups)
            for block in blocks_read(group, num_tokens)
        )

    def _tables(self, hashes: Sequence[bytes], num_tokens: int) -> list[list[Any]]:
        tables = []
        for index, group in enumerate(self.groups):
            read = blocks_read(group, num_tokens)
            blocks = range(num_tokens // group.block_size)
            null = self.harness.null_block_id
            keys = [self._key(hashes, index, block) for block in blocks]
            tables.append([self.cached[keys[b]] if b in read else null for b in blocks])
        return tables


geometry_check = checks_driving(GeometryDriver, contract="geometry")
"""Register a check that drives the harness through :class:`GeometryDriver`."""
