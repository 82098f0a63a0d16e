"""The shipped connectors never make serving worse, and store each computed block once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from examples.host_cache import HostCacheConnector
from kvview import (
    CacheGeometry,
    Connector,
    ConnectorConfig,
    EngineFacts,
    FinishReason,
    GuardedView,
    OffloadKey,
    PinBudgetExceeded,
    RequestInfo,
    SchedulerConnector,
    StepInfo,
    StepPlan,
    StoreConnector,
)
from kvview_reference.connector import (
    MultiConnector,
    StoreConnector,
    StoreScheduler,
)
from kvview_reference.engine.request import chain_hashes
from kvview_reference.pool import BlockPool
from kvview_reference.replay.run import ReplayConfig, ReplayReport, replay
from kvview_reference.replay.workload import generate_trace

BLOCK_SIZE = 512
GEOMETRY = CacheGeometry.single(4)
CONNECTORS: list[type[Connector]] = [StoreConnector, HostCacheConnector]


class Counting:
    """Counts the full blocks that the engine computes, and keeps the scheduler half."""

    def __init__(self) -> None:
        self.num_computed = 0
        self.scheduler: Any = None

    def around(self, connector: type[Connector]) -> type[Connector]:
        """Make a counting subclass of a connector."""
        watch = self

        class Watched(connector):  # type: ignore[misc,valid-type]
            def make_scheduler(self) -> Any:
                half = super().make_scheduler()
                watch.scheduler, plan_step = half, half.plan_step
                groups = self.config.geometry.groups

                def counted(step: StepInfo) -> StepPlan:
                    for running in step.scheduled:
                        first = running.num_computed_tokens
                        last = first + running.num_scheduled_tokens
                        for group in groups:
                            full = last // group.block_size - first // group.block_size
                            watch.num_computed += full
                    plan: StepPlan = plan_step(step)
                    return plan

                half.plan_step = counted
                return half

        return Watched


def run(
    connector: type[Connector], num_gpu: int, options: dict[str, Any], num_requests: int = 400
) -> tuple[ReplayReport, Counting]:
    """The generated workload; of 400 requests each is 0.2 points."""
    watch = Counting()
    rows = generate_trace(num_requests=num_requests, seed=1, block_size=BLOCK_SIZE)
    config = ReplayConfig(num_gpu, 8, options=options)
    return replay(rows, BLOCK_SIZE, watch.around(connector), config), watch


# --- hits ---


@cache
def hits_alone(num_requests: int) -> float:
    return run(Connector, 400, {}, num_requests)[0].gpu_hit_rate


@pytest.mark.parametrize(
    "cpu_blocks", [5000, *(pytest.param(size, marks=pytest.mark.slow) for size in (0, 20, 100))]
)
@pytest.mark.parametrize(
    "connector",
    [*(pytest.param(one, marks=pytest.mark.slow) for one in CONNECTORS), StoreConnector],
    ids=lambda connector: connector.__name__,
)
def test_hits_are_those_without_it_at_least(connector: type[Connector], cpu_blocks: int) -> None:
    """The requests in flight fill the pool, which is the worst case for holds."""
    report, watch = run(connector, 400, {"cpu_blocks": cpu_blocks}, 1500)
    assert report.gpu_hit_rate + report.cpu_hit_rate >= hits_alone(1500) - 0.002
    assert report.offloaded_blocks <= watch.num_computed
    assert report.cpu_hit_rate > 0 or cpu_blocks < 5000
    assert report.is_clean


def test_threads_do_not_change_the_figures() -> None:
    """The copies of a store's threads end before the next step."""
    first, second = (run(StoreConnector, 400, {"cpu_blocks": 100})[0] for _ in range(2))
    for name in ("gpu_hit_blocks", "cpu_hit_blocks", "offloaded_blocks", "steps"):
        assert getattr(first, name) == getattr(second, name), name


def test_several_connectors_are_no_worse_either() -> None:
    target = "kvview_reference.store_connector:StoreConnector"
    children = [{"connector": target, "options": {"cpu_blocks": size}} for size in (0, 50, 3000)]
    report, watch = run(MultiConnector, 400, {"connectors": children})
    assert report.gpu_hit_rate + report.cpu_hit_rate >= hits_alone(400)
    assert report.cpu_hit_rate > 0
    assert report.offloaded_blocks <= 2 * watch.num_computed  # once a child that stores


def test_victims_gain_most_where_the_tier_is_as_large_as_the_pool() -> None:
    num_gpu = 900
    watched, watch = run(StoreConnector, num_gpu, {"cpu_blocks": num_gpu})
    eager, _ = run(StoreConnector, num_gpu, {"cpu_blocks": num_gpu})
    gain = watched.gpu_hit_rate + watched.cpu_hit_rate - eager.gpu_hit_rate - eager.cpu_hit_rate
    assert gain > 0.01
    assert watched.offloaded_blocks <= watch.num_computed


def test_no_key_is_stored_more_often_than_it_is_computed() -> None:
    """In a tier that forgets most of them."""
    stored: Counter[OffloadKey] = Counter()
    computed: Counter[OffloadKey] = Counter()

    late: dict[str, set[int]] = defaultdict(set)  # blocks that are hashed when they are computed

    class Scheduler(StoreScheduler):
        def plan_step(self, step: StepInfo) -> Any:
            for running in step.scheduled:
                first = running.num_computed_tokens // BLOCK_SIZE
                last = (running.num_computed_tokens + running.num_scheduled_tokens) // BLOCK_SIZE
                for number in range(first, last):
                    key = self._geometry.block_key(running.request.block_hashes, 0, number)
                    if key is None:
                        late[running.request.request_id].add(number)
                    else:
                        computed[key] += 1
            return super().plan_step(step)

        def on_request_finished(self, request: RequestInfo, *args: Any) -> None:
            for number in late.pop(request.request_id, ()):
                key = self._geometry.block_key(request.block_hashes, 0, number)
                if key is not None:
                    computed[key] += 1
            super().on_request_finished(request, *args)

        def on_transfers_finished(self, results: Any) -> None:
            for result in results:
                if result.job_id in self._stores:
                    stored.update(self._stores[result.job_id].keys)
            super().on_transfers_finished(results)

    class Watched(StoreConnector):
        def make_scheduler(self) -> SchedulerConnector:
            return Scheduler(self.config, self.options)

    run(Watched, 400, {"cpu_blocks": 30})
    assert stored.total() > 1000
    assert all(stored[key] <= computed[key] for key in stored)


# --- by hand ---


class Bench:
    """A scheduler half over a pool of its own, without an engine."""

    def __init__(
        self,
        connector: type[Connector],
        pin_budget: float | None = None,
        view: Callable[[GuardedView], Any] = lambda guard: guard,
        num_blocks: int = 64,
        **options: Any,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.guard = GuardedView(self.pool.view("test"), pin_budget=pin_budget)
        self.half: Any = connector(
            ConnectorConfig(GEOMETRY, {"cpu_blocks": 60, **options})
        ).make_scheduler()
        self.half.bind_gpu_block_pool_view(view(self.guard))
        self.half.on_engine_ready(EngineFacts(num_blocks, (8,), 4))

    def request(self, num_blocks: int) -> tuple[RequestInfo, tuple[list[int]]]:
        """A request with so many computed blocks, about to end."""
        table = (self.pool.allocate_blocks(num_blocks),)
        hashes = chain_hashes(range(num_blocks))
        self.pool.cache_blocks(table[0], hashes, block_size=4)
        request = RequestInfo("r", 4 * num_blocks + 1, hashes, 4 * num_blocks)
        before = RequestInfo("r", 4 * num_blocks + 1, hashes, 0)
        self.half.on_blocks_allocated(before, table, 0, 0)
        return request, table

    def end(self, num_blocks: int) -> int:
        """The same, ended; how many blocks are stored."""
        request, table = self.request(num_blocks)
        self.half.on_request_finished(request, table, FinishReason.FINISHED)
        self.pool.free_blocks(table[0][::-1])
        plan = self.half.plan_step(StepInfo())
        return sum(len(job.src.block_ids) for job in plan.stores)


@pytest.mark.parametrize("connector", CONNECTORS, ids=lambda connector: connector.__name__)
def test_a_pin_budget_is_used_and_not_exceeded(connector: type[Connector]) -> None:
    """Blocks that do not fit are counted; an exceeded budget in a hook would end the engine."""
    bench = Bench(connector, 0.2)
    assert bench.end(20) == 12  # a fifth of 64
    assert len(bench.guard.held_blocks()) == 12
    assert bench.half.num_skipped_blocks == 8
    assert bench.guard.stats.refused == 0


def test_a_budget_without_a_query_stores_nothing_and_raises_nothing() -> None:
    bench = Bench(StoreConnector, 0.2, _Plain)
    with pytest.raises(PinBudgetExceeded):
        bench.guard.touch_blocks(range(1, 20))
    assert bench.end(20) == 0
    assert bench.half.num_skipped_blocks == 20
    assert bench.half._manager.num_protected_blocks() == 0
    assert bench.end(10) == 10


@pytest.mark.parametrize("connector", CONNECTORS, ids=lambda connector: connector.__name__)
def test_nothing_is_held_while_free_blocks_are_short(connector: type[Connector]) -> None:
    bench = Bench(connector)
    others = bench.pool.allocate_blocks(40)
    assert bench.end(20) == 0  # 3 are free, an engine of 64 keeps 4
    bench.pool.free_blocks(others)
    assert bench.end(20) == 20


class _Plain:
    """The three methods of the core and no more."""

    def __init__(self, view: Any) -> None:
        self.touch_blocks = view.touch_blocks
        self.free_blocks = view.free_blocks
        self.iter_free_block_ids_with_hash = view.iter_free_block_ids_with_hash


@pytest.mark.parametrize(
    ("view", "cpu_blocks", "finds_victims"),
    [(GuardedView, 16, True), (GuardedView, 15, False), (_Plain, 64, False)],
)
def test_victims_need_a_view_that_gives_back_and_a_quarter_of_the_pool(
    view: Callable[[GuardedView], Any], cpu_blocks: int, finds_victims: bool
) -> None:
    bench = Bench(StoreConnector, view=view, cpu_blocks=cpu_blocks)
    assert bench.half._gpu.finds_victims is finds_victims
