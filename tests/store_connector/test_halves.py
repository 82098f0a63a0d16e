"""The halves alone: the blocks that are stored, their pages, and the order of eviction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest

from examples.compressed_memory import CompressedConnector
from examples.host_cache import HostCacheConnector
from kvview import (
    CacheGeometry,
    Connector,
    ConnectorConfig,
    CPULoadStoreSpec,
    EngineFacts,
    FinishReason,
    FullBlock,
    GuardedView,
    RequestInfo,
    SchedulerConnector,
    StepInfo,
    WorkerConnector,
)
from kvview_reference.engine.request import chain_hashes
from kvview_reference.offloading.policies import ARCPolicy, LRUPolicy
from kvview_reference.pool import BlockPool
from kvview_reference.store_connector import StoreConnector
from kvview_reference.store_connector.store_plan import StoreSpec
from kvview_reference.store_connector.worker import HostWorker, StoreWorker

GEOMETRY = CacheGeometry.single(4)


def make(connector: type[Connector], **options: Any) -> Connector:
    return connector(ConnectorConfig(GEOMETRY, options))


class Bench:
    """A scheduler half over a pool of its own, without an engine."""

    def __init__(
        self,
        connector: Connector,
        *,
        pin_budget: float | None = None,
        view: Callable[[GuardedView], Any] = lambda guard: guard,
    ) -> None:
        self.pool = BlockPool(64)
        self.guard = GuardedView(self.pool.view("test"), pin_budget=pin_budget)
        self.half: Any = connector.make_scheduler()
        self.half.bind_gpu_block_pool_view(view(self.guard))
        self.half.on_engine_ready(EngineFacts(64, (8,), 4))

    def compute(self, num_blocks: int) -> list[Any]:
        """Run a request to its end; returns the stores that are planned."""
        table = (self.pool.allocate_blocks(num_blocks),)
        hashes = chain_hashes(range(num_blocks))
        self.pool.cache_blocks(table[0], hashes, block_size=4)
        num_tokens = 4 * num_blocks
        self.half.on_blocks_allocated(RequestInfo("r", num_tokens + 1, hashes, 0), table, 0, 0)
        request = RequestInfo("r", num_tokens + 1, hashes, num_tokens)
        self.half.on_request_finished(request, table, FinishReason.FINISHED)
        self.pool.free_blocks(table[0][::-1])
        return list(self.half.plan_step(StepInfo()).stores)

    def num_stored(self, num_blocks: int) -> int:
        """Run a request to its end; returns the number of blocks whose stores are planned."""
        return sum(len(job.src.block_ids) for job in self.compute(num_blocks))


class AtTheEnd(StoreConnector):
    """Stores blocks when their request ends."""

    defaults: ClassVar[Mapping[str, Any]] = {"mode": "finish"}


@pytest.mark.parametrize("connector", [AtTheEnd, HostCacheConnector])
def test_a_pin_budget_is_used_and_not_exceeded(connector: type[Connector]) -> None:
    """Blocks that do not fit are counted; an exceeded budget in a hook would end the engine."""
    bench = Bench(make(connector, cpu_blocks=60), pin_budget=0.2)
    assert bench.num_stored(20) == 12  # a fifth of 64
    assert len(bench.guard.held_blocks()) == 12
    assert bench.half.num_skipped_blocks == 8
    assert bench.guard.stats.refused == 0


@pytest.mark.parametrize("connector", [AtTheEnd, HostCacheConnector])
def test_nothing_is_held_while_free_blocks_are_short(connector: type[Connector]) -> None:
    bench = Bench(make(connector, cpu_blocks=60))
    others = bench.pool.allocate_blocks(40)
    assert bench.num_stored(20) == 0  # 3 are free, an engine of 64 keeps 4
    bench.pool.free_blocks(others)
    assert bench.num_stored(20) == 20


class Plain:
    """The three methods of the core and no more."""

    def __init__(self, view: Any) -> None:
        self.touch_blocks = view.touch_blocks
        self.free_blocks = view.free_blocks
        self.iter_free_block_ids_with_hash = view.iter_free_block_ids_with_hash


@pytest.mark.parametrize(
    ("view", "cpu_blocks", "finds_victims"),
    [(GuardedView, 16, True), (GuardedView, 15, False), (Plain, 64, False)],
)
def test_victims_need_a_view_that_gives_back_and_a_quarter_of_the_pool(
    view: Callable[[GuardedView], Any], cpu_blocks: int, finds_victims: bool
) -> None:
    bench = Bench(make(StoreConnector, cpu_blocks=cpu_blocks), view=view)
    assert bench.half._gpu.finds_victims is finds_victims


# --- the parts that the options select ---


class Squeezed(StoreConnector):
    """Has a transform and, by default, 10,000 blocks."""

    transform = CompressedConnector.transform


HOST_MEMORY = "examples.host_memory:HostMemoryStore"


@pytest.mark.parametrize(
    ("connector", "options", "worker", "spec"),
    [
        (StoreConnector, {}, HostWorker, CPULoadStoreSpec),
        (StoreConnector, {"cpu_blocks": 60}, HostWorker, CPULoadStoreSpec),
        (StoreConnector, {"cpu_bytes": 600}, StoreWorker, StoreSpec),
        (StoreConnector, {"store": HOST_MEMORY}, StoreWorker, StoreSpec),
        (StoreConnector, {"store": HOST_MEMORY, "cpu_blocks": 60}, StoreWorker, StoreSpec),
        (Squeezed, {}, StoreWorker, StoreSpec),
    ],
)
def test_pages_have_names_if_they_have_no_host_page_or_a_store(
    connector: type[Connector], options: dict[str, Any], worker: type[Any], spec: type[Any]
) -> None:
    made = make(connector, mode="finish", **options)
    assert type(made.make_worker()) is worker
    (job,) = Bench(made).compute(9)
    assert type(job.dst) is spec
    assert len(getattr(job.dst, "names", None) or job.dst.block_ids) == 9


def test_without_memory_and_store_the_connector_does_nothing() -> None:
    made = make(StoreConnector, cpu_blocks=0)
    assert type(made.make_scheduler()) is SchedulerConnector
    assert type(made.make_worker()) is WorkerConnector


class Oldest(LRUPolicy):
    """A policy of a user, by target or by class."""


class HasPolicy(StoreConnector):
    policy = Oldest


@pytest.mark.parametrize(
    ("connector", "options", "policy"),
    [
        (StoreConnector, {}, LRUPolicy),
        (StoreConnector, {"policy": "arc"}, ARCPolicy),
        (StoreConnector, {"policy": f"{__name__}:Oldest"}, Oldest),
        (HasPolicy, {}, Oldest),
        (HasPolicy, {"policy": "arc"}, ARCPolicy),
    ],
)
def test_each_level_has_its_own_policy_by_name_target_or_class(
    connector: type[Connector], options: dict[str, Any], policy: type[Any]
) -> None:
    made = make(connector, store=HOST_MEMORY, cpu_blocks=5, **options)
    index = Bench(made).half._index
    policies = [index.memory._policy, index.store._policy]
    assert list(map(type, policies)) == [policy, policy]
    assert policies[0] is not policies[1]


def test_a_block_is_stored_at_its_nth_computation() -> None:
    bench = Bench(make(AtTheEnd, store_threshold=3))
    assert [bench.num_stored(7) for _ in range(3)] == [0, 0, 7]


class EverySecond(AtTheEnd):
    """Stores the blocks with an even number."""

    def admits(self, block: FullBlock, request: RequestInfo) -> bool:
        return block.number % 2 == 0


def test_blocks_that_are_not_admitted_are_not_stored() -> None:
    assert Bench(make(EverySecond)).num_stored(7) == 4
