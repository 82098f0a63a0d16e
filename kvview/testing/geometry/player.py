"""The operations of the geometry contract, which run on coordinators and on their model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from typing_extensions import override

from kvview.errors import GeometryError
from kvview.geometry import (
    CacheGroup,
    ChunkedLocalAttention,
    FullAttention,
    Mamba,
    SlidingWindow,
)
from kvview.testing.geometry.model import GeometryModel, misfits
from kvview.testing.harness import MIN_CACHED_BLOCKS
from kvview.testing.harness import Capability as C
from kvview.testing.search import Label, Player, check_by_search, observable, operation

Sizes = tuple[int, int, tuple[CacheGroup, ...]]
"""``scheduler_block_size``, ``hash_block_size`` and groups."""

_MAX_TOKENS = 60
_MAX_REQUESTS = 3


@check_by_search
class GeometryPlayer(Player):
    """Plays operations on coordinators of many geometries, and compares every hit."""

    contract = "geometry"
    subject_name = "coordinator"
    labels: ClassVar[Mapping[str, Label]] = {
        "GEO-1": Label("A hit is a multiple of the scheduler's block size, as it was given."),
        "GEO-2": Label(
            "Sizes that do not divide each other are refused by name; all others are accepted."
        ),
        "GEO-3": Label("A hit has the blocks that the next token reads, and no others."),
        "GEO-4": Label("The hit of several groups is the longest common hit.", (C.HYBRID,)),
    }

    @override
    def start(self) -> None:
        self._first = self.harness

    @override
    def play(self, moves: Sequence[tuple[str, int]]) -> None:
        self.blame("GEO-2")
        self.begin()
        super().play(moves)

    # --- draws ---

    def draw_group(self, size: int) -> CacheGroup:
        """Draw a group whose kind the harness accepts."""
        span = self.rng.choice((1, size, 2 * size, self.rng.randint(1, 4 * size)))
        kinds: dict[C, CacheGroup] = {
            C.SLIDING_WINDOW: SlidingWindow(size, span),
            C.CHUNKED_LOCAL: ChunkedLocalAttention(size, span),
            C.MAMBA: Mamba(size),
        }
        others = [group for kind, group in kinds.items() if self.can(kind)]
        return self.rng.choice([FullAttention(size), *others])

    def draw_sizes(self) -> Sizes:
        """Draw sizes that divide each other, for one group or several."""
        hash_block_size = self.rng.randint(1, 4)
        number = self.rng.choice((1, 2) if self.plan.is_small else (1, 2, 3, 5))
        if not self.can(C.HYBRID):
            number = 1
        ratios = self.rng.choice(((1,), (2,), (1, 2, 3), (1, 2, 3)))
        sizes = [hash_block_size * self.rng.choice(ratios) for _ in range(number)]
        groups = tuple(map(self.draw_group, sizes))
        common = math.lcm(*(group.block_size for group in groups))
        return common * self.rng.choice((1, 1, 2, 3)), hash_block_size, groups

    # --- operations ---

    @operation("GEO-2", weight=0.7)
    def begin(self) -> None:
        """Continue with a coordinator of another geometry."""
        self._continue_with(self.draw_sizes())

    def _continue_with(self, sizes: Sizes, *, is_on: bool = True) -> None:
        self._lines.clear()
        with_sizes = self.call(self._first, "with_geometry", *sizes)
        self.use(with_sizes, "coordinator")
        if not is_on:
            self.use(self.call(self.harness, "without_caching"), "coordinator")
        self.model = GeometryModel(*sizes, self.harness.null_block_id, is_on=is_on)
        self.requests: list[list[bytes]] = []
        self.num_tokens = min(_MAX_TOKENS, 5 * sizes[0])
        self.ask()

    @operation("GEO-4", C.CACHING_OFF, weight=0.2)
    def begin_without_cache(self) -> None:
        """Continue with a coordinator whose prefix cache is off, so no prefix is a hit."""
        self._continue_with(self.draw_sizes(), is_on=False)

    @operation("GEO-3", weight=0.5)
    def ask(self) -> None:
        """Add a request that shares a prefix with another one."""
        if len(self.requests) == _MAX_REQUESTS:
            return
        name = "abc"[len(self.requests)]
        number = self.num_tokens // self.model.hash_block_size
        like = self.rng.choice(self.requests) if self.requests else []
        shared = self.rng.randint(0, len(like))
        own = range(shared, number)
        hashes = [*like[:shared], *(b"%s%d" % (name.encode(), at) for at in own)]
        begins = f"*{self._names[id(like)]}[:{shared}], " if like else ""
        self.line(f"{name} = [{begins}*(b'{name}%d' % i for i in range({shared}, {number}))]")
        self._names[id(hashes)] = name
        self._kept.append(hashes)
        self.requests.append(hashes)

    def _cache(self, hashes: Sequence[bytes], group: int, blocks: Sequence[int]) -> None:
        known = {self.harness.null_block_id, *self.model.cached.values()}
        for block in blocks:
            key = self.model.key(hashes, group, block)
            if key in self.model.cached or len(self.model.cached) == MIN_CACHED_BLOCKS:
                continue
            block_id = self.call(self.harness, "cache", hashes, group, block)
            if self.model.is_on:
                what = f"each block is cached alone, and {MIN_CACHED_BLOCKS} fit"
                self.true(block_id not in known, what, block_id, "another block")
                self.model.cached[key] = block_id
                known.add(block_id)

    def _blocks(self, group: int) -> list[int]:
        return list(range(self.num_tokens // self.model.groups[group].block_size))

    @operation("GEO-3", weight=4)
    def cache_some(self) -> None:
        """Cache some blocks of a request in one group."""
        group = self.rng.randrange(len(self.model.groups))
        blocks = self._blocks(group)
        number = min(len(blocks), self.rng.randint(1, self.most))
        self._cache(self.rng.choice(self.requests), group, self.rng.sample(blocks, number))

    @operation("GEO-3", weight=3)
    def cache_all_but(self) -> None:
        """Cache the blocks of a request in every group, except a few blocks."""
        hashes = self.rng.choice(self.requests)
        share = self.rng.choice((0.0, 0.1, 0.3))
        for group in range(len(self.model.groups)):
            self._cache(
                hashes, group, [b for b in self._blocks(group) if self.rng.random() >= share]
            )

    @operation("GEO-3", weight=3)
    def cache_for_a_hit(self) -> None:
        """Cache exactly the blocks that one prefix needs, or all of these blocks except one."""
        hashes = self.rng.choice(self.requests)
        num_tokens = self.model.step * self.rng.randint(1, self.num_tokens // self.model.step or 1)
        if num_tokens > self.num_tokens:
            return
        needed = self.model.needed(num_tokens)
        if needed and self.rng.random() < 0.3:
            needed.remove(self.rng.choice(needed))
        for group, block in needed:
            self._cache(hashes, group, [block])

    @operation("GEO-2")
    def refuse(self) -> None:
        """Request a geometry in which a size does not divide another, or is not positive."""
        scheduler, hashed, groups = self.draw_sizes()
        wrong = self.rng.choice((0, -4, 5, 6, 7, 12, 16))
        at = self.rng.randrange(3)
        if at == 0:
            scheduler = wrong
        elif at == 1:
            hashed = wrong
        elif wrong > 0:
            number = self.rng.randrange(len(groups))
            groups = (*groups[:number], FullAttention(wrong), *groups[number + 1 :])
        found = misfits(scheduler, hashed, [group.block_size for group in groups])
        if not found:
            return
        args = (scheduler, hashed, groups)
        error = self.refused(GeometryError, self._first, "with_geometry", *args)
        named = set(map(int, re.findall(r"-?\d+", str(error))))
        is_named = any(sizes <= named for sizes in found)
        self.true(is_named, f"the message names one of {found}", str(error), "the numbers")

    # --- observables ---

    @observable("GEO-3")
    def hits(self) -> None:
        """Compare the hits of every request, with many limits on the length of the hit."""
        ends = range(0, self.num_tokens + 1, self.model.step)
        limits = {*self.rng.sample(range(self.num_tokens + 1), 4), *ends[-3:], self.num_tokens}
        for hashes in self.requests:
            for limit in sorted(limits):
                self._compare_hit(hashes, limit)

    def _compare_hit(self, hashes: Sequence[bytes], limit: int) -> None:
        found: Any = self.call(self.subject, "find_longest_cache_hit", hashes, limit)
        is_pair = isinstance(found, tuple) and len(found) == 2
        self.true(is_pair, "a hit is its tables and its tokens", found, "a tuple of two")
        num_tokens, expected = found[1], self.model.longest_hit(hashes, limit)
        what = f"a hit is a multiple of scheduler_block_size ({self.model.step})"
        self.true(num_tokens % self.model.step == 0, what, found, f"{expected} tokens", "GEO-1")
        is_off_or_hybrid = len(self.model.groups) > 1 or not self.model.is_on
        law = "GEO-4" if is_off_or_hybrid and self.can(C.HYBRID) else "GEO-3"
        tables = [list(table) for table in found[0]]
        if num_tokens == expected:
            expected_tables = self.model.tables(hashes, expected)
            what = f"the tables of a hit of {num_tokens} tokens"
            self.derive()
            self.equal(tables, expected_tables, what, "GEO-3")
        what = f"the longest hit of at most {limit} tokens"
        self.true(num_tokens == expected, what, found, f"{expected} tokens", law)
