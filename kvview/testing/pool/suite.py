"""The suite of the pool contract: the machine, and tests of cost and growth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ClassVar, Protocol

from typing_extensions import override

from kvview.pool import GPUBlockPoolView
from kvview.testing.pool.machine import PoolMachine
from kvview.testing.suites.capability import Capability as C, Contract
from kvview.testing.suites.conformance import Conformance, example
from kvview.testing.suites.cost import Cost, cost_of_first

_WALK = "iter_free_block_ids_with_hash"
_FEWEST_BLOCKS = 16


class EnginePool(Protocol):
    """A pool, with one view of it and the calls of its engine.

    1. Block ids are 0 to ``num_blocks - 1``. At first all blocks except the null block are free and
       not cached.
    2. ``allocate`` and ``release`` are calls of the engine that bypass the view; the view is not
       notified. The engine and the view may both hold a block.
    """

    @property
    def view(self) -> GPUBlockPoolView:
        """The view under test."""
        ...

    @property
    def null_block_id(self) -> int | None:
        """Id of the placeholder block that is never allocated; None if the pool has none."""
        ...

    def allocate(self, num_blocks: int, /) -> Sequence[int]:
        """Allocate blocks for a request, with one reference each; their hashes are evicted."""
        ...

    def release(self, block_ids: Sequence[int], /) -> None:
        """Release one of the engine's references on each block, in the order of eviction."""
        ...


class PoolConformance(Conformance):
    """The tests of a pool, and of the view that connectors receive.

    Example:
        >>> class TestMyPool(PoolConformance):
        ...     lacks = {"cache", "close"}
        ...
        ...     def make(self, num_blocks):
        ...         return MyPool(num_blocks)
    """

    contract: ClassVar[Contract] = "pool"
    machine = PoolMachine
    protocols: ClassVar[Mapping[str, type]] = {"pool": EnginePool, "view": GPUBlockPoolView}

    def make(self, num_blocks: int) -> EnginePool:
        """Make a pool.

        Args:
            num_blocks: Number of blocks of the pool, including the null block; at least 16.
        """
        raise NotImplementedError(f"define {type(self).__name__}.make(num_blocks)")

    @override
    @contextmanager
    def parts(self) -> Iterator[Mapping[str, object]]:
        pool = self.make(_FEWEST_BLOCKS)
        yield {"suite": self, "pool": pool, "view": pool.view}

    @example("POOL-6", C.CACHE)
    def test_pool_6_cost_of_a_walk(self, machine: PoolMachine) -> None:
        """Cost: the first eight items of a walk cost about the same for 4,096 blocks as for 256."""
        costs = []
        for num_blocks in (256, 4096):
            machine.start(num_blocks, cached=1.0)
            costs.append(cost_of_first(getattr(machine.views[0], _WALK), 8))
        _bound(machine, "a walk is lazy: 8 items cost O(8), not O(pool)", costs[1], costs[0], 3)

    @example("POOL-6", C.CACHE)
    def test_pool_6_cost_after_touches(self, machine: PoolMachine) -> None:
        """Cost: only the first walk skips held blocks; later walks do not read them again."""
        machine.start(2000, cached=1.0)
        view = machine.views[0]
        alone = cost_of_first(getattr(view, _WALK), 20)
        order = machine.model.order()
        view.touch_blocks([block for number, block in enumerate(order) if number % 100])
        for method in [_WALK] + ["iter_free_block_ids"] * machine.can(C.FREE_ORDER):
            for _ in range(3):
                machine.listed(view, method)
            again = cost_of_first(getattr(view, method), 20)
            _bound(machine, "20 free blocks cost O(20), whatever is held", again, alone, 8)

    @example("POOL-1")
    def test_pool_1_growth_of_holds(self, machine: PoolMachine) -> None:
        """Growth: ended holds keep no memory allocated, even after many holds."""
        machine.start(_FEWEST_BLOCKS, cached=0.5 if machine.can(C.CACHE) else 0.0)
        blocks = machine.model.blocks[:8]

        def hold(times: int) -> None:
            for _ in range(times):
                machine.views[0].touch_blocks(blocks)
                machine.views[0].free_blocks(blocks)

        what = "a hold that ended leaves nothing"
        machine.keeps_size(what, partial(hold, 3000), partial(hold, 500))


def _bound(machine: PoolMachine, what: str, cost: Cost, alone: Cost, factor: int) -> None:
    """Break the law if a cost exceeds a multiple of another cost."""
    limit = alone.times(factor)
    is_small = cost.lines <= limit.lines and cost.num_bytes <= limit.num_bytes
    machine.true(is_small, what, cost, f"at most {limit}")
