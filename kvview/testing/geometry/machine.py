"""Random groups and cached blocks, against the oracle of the driver."""

from __future__ import annotations

import math

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvview.geometry import (
    CacheGroup,
    ChunkedLocalAttention,
    FullAttention,
    Mamba,
    SlidingWindow,
)
from kvview.testing.geometry.driver import GeometryDriver
from kvview.testing.harness import Capability, Factory
from kvview.testing.machines import run_machine

_NUM_TOKENS = 24

Geometry = tuple[int, int, list[CacheGroup]]
"""``scheduler_block_size``, ``hash_block_size`` and groups."""

picks = st.sets(st.integers(0, 15), max_size=6)
"""Chosen blocks; those that a request does not have are left out."""


def geometries(capabilities: frozenset[str]) -> st.SearchStrategy[Geometry]:
    """Sizes that divide, and groups of the kinds that a harness takes."""

    @st.composite
    def draw_geometry(draw: st.DrawFn) -> Geometry:
        hash_block_size = draw(st.integers(1, 3))
        groups: list[CacheGroup] = []
        for _ in range(draw(st.integers(1, 4 if Capability.HYBRID in capabilities else 1))):
            size, span = hash_block_size * draw(st.integers(1, 3)), draw(st.integers(1, 12))
            kinds: dict[str, CacheGroup] = {
                "": FullAttention(size),
                Capability.SLIDING_WINDOW: SlidingWindow(size, span),
                Capability.CHUNKED_LOCAL: ChunkedLocalAttention(size, span),
                Capability.MAMBA: Mamba(size),
            }
            known = [group for name, group in kinds.items() if name in capabilities | {""}]
            groups.append(draw(st.sampled_from(known)))
        common = math.lcm(*(group.block_size for group in groups))
        return common * draw(st.integers(1, 2)), hash_block_size, groups

    return draw_geometry()


def geometry_machine(factory: Factory) -> type[RuleBasedStateMachine]:
    """The machine over the coordinators that ``factory`` makes."""
    capabilities = frozenset(map(str, factory().capabilities))

    class GeometryMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.driver = GeometryDriver(factory, "GEO-*")
            self.requests: list[list[bytes]] = []

        @initialize(geometry=geometries(capabilities), num_shared=st.integers(0, 12))
        def start(self, geometry: Geometry, num_shared: int) -> None:
            self.begin(geometry, num_shared)

        @rule(geometry=geometries(capabilities), num_shared=st.integers(0, 12))
        def start_again(self, geometry: Geometry, num_shared: int) -> None:
            self.begin(geometry, num_shared)

        def begin(self, geometry: Geometry, num_shared: int) -> None:
            scheduler_block_size, hash_block_size, groups = geometry
            driver = self.driver.start(scheduler_block_size, hash_block_size, *groups)
            first = driver.request("a", _NUM_TOKENS)
            self.requests = [first, driver.request("b", _NUM_TOKENS, first, num_shared)]
            self.find_all(0)

        @rule(which=st.integers(0, 1), group=st.integers(0, 3), blocks=picks)
        def cache(self, which: int, group: int, blocks: set[int]) -> None:
            self.cache_some(which, group % len(self.driver.groups), blocks)
            self.find_all(which)

        @rule(which=st.integers(0, 1), missing=st.lists(picks, min_size=4, max_size=4))
        def cache_all_but(self, which: int, missing: list[set[int]]) -> None:
            for group in range(len(self.driver.groups)):
                self.cache_some(which, group, set(range(_NUM_TOKENS)) - missing[group])
            self.find_all(which)

        @rule(which=st.integers(0, 1), max_tokens=st.integers(0, _NUM_TOKENS))
        def find(self, which: int, max_tokens: int) -> None:
            self.driver.check_hit(self.requests[which], max_tokens)

        def cache_some(self, which: int, group: int, blocks: set[int]) -> None:
            driver = self.driver
            num_blocks = _NUM_TOKENS // driver.groups[group].block_size
            chosen = sorted(blocks & set(range(num_blocks)))
            driver.cache(self.requests[which], group, chosen[: driver.room])

        def find_all(self, which: int) -> None:
            step = self.driver.scheduler_block_size
            for limit in range(step, _NUM_TOKENS + 1, step):
                self.driver.check_hit(self.requests[which], limit)

    return GeometryMachine


def run_geometry_machine(factory: Factory) -> None:
    """Search for cached blocks with which a hit breaks a law of the geometry.

    Raises:
        LawBroken: With the shortest script found.
    """
    run_machine(lambda: geometry_machine(factory))
