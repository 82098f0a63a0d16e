"""Faults of children, leftover threads, an idle engine, a tier without pages, and no shortage."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from typing_extensions import override

from examples.host_cache import HostCacheScheduler, HostCacheWorker
from kvview import (
    BlockIds,
    CacheGeometry,
    CanonicalKVCaches,
    Connector,
    ConnectorConfig,
    RequestInfo,
    WorkerConnector,
)
from kvview.testing.connector import (
    Add,
    Scenario,
    Step,
    check_connector,
    generate_scenario,
    simulate,
)
from kvview_reference.connector import MultiConnector
from kvview_reference.connector.multi import MultiWorker
from tests.connector.unusual import Host

CHILDREN = {
    "connectors": [
        {"connector": "tests.connector.spy:SpyConnector"},
        {"connector": "examples.host_cache:HostCacheConnector", "options": {"cpu_blocks": 40}},
    ]
}


def with_halves(**halves: type) -> type[Connector]:
    """The example with other halves."""
    return type("Own", (Host,), halves)


class PoolWorker(HostCacheWorker):
    """Uses a thread of a pool."""

    pool: ThreadPoolExecutor | None = None

    @override
    def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
        super().register_kv_caches(kv_caches)
        self.threads = self.pool or ThreadPoolExecutor(2)
        self.threads.submit(int).result()


class Ends(PoolWorker):
    @override
    def shutdown(self) -> None:
        self.threads.shutdown()


class EndsSoon(PoolWorker):
    @override
    def shutdown(self) -> None:
        self.threads.shutdown(wait=False)


class Shares(PoolWorker):
    pool = ThreadPoolExecutor(2)


class LeavesChildrenRunning(MultiConnector):
    @override
    def make_worker(self) -> WorkerConnector:
        worker = MultiWorker([child.make_worker() for child in self.children])
        worker.shutdown = lambda: None  # type: ignore[method-assign]
        return worker


@pytest.mark.slow
def test_threads_end_with_their_half() -> None:
    scenario = Scenario(CacheGeometry.single(4), 12, (Add("a", 1, 9), Step(4)))

    def law_of(connector: type[Connector], options: dict[str, Any]) -> str | None:
        failure = simulate(connector, scenario, options).failure
        return None if failure is None else failure.law

    assert law_of(LeavesChildrenRunning, CHILDREN) == "CONN-12"
    assert law_of(with_halves(worker=PoolWorker), {}) == "CONN-12"
    assert [law_of(with_halves(worker=right), {}) for right in (Ends, EndsSoon, Shares)] == [
        None
    ] * 3
    Shares.pool.shutdown()


def test_a_tier_without_pages_is_accepted_or_refused() -> None:
    class NeedsAPage(HostCacheScheduler):
        def __init__(self, config: ConnectorConfig, cpu_blocks: int) -> None:
            super().__init__(config, cpu_blocks)
            self.last = 0 if cpu_blocks else [][0]

    seed = next(seed for seed in range(100) if not generate_scenario(seed).cpu_blocks)
    found = check_connector(
        with_halves(scheduler=NeedsAPage), first_seed=seed, seeds=1, max_shrink_runs=0
    )
    assert [failure.law for failure in found.failures] == ["CONN-1"]


def test_no_block_is_skipped_without_a_shortage() -> None:
    class CountsAll(HostCacheScheduler):
        @override
        def store(self, request: RequestInfo, block_ids: BlockIds) -> None:
            self.num_skipped_blocks += 1
            super().store(request, block_ids)

    seed = next(seed for seed in range(100) if generate_scenario(seed).is_roomy)
    found = check_connector(
        with_halves(scheduler=CountsAll), first_seed=seed, seeds=1, max_shrink_runs=0
    )
    assert [failure.law for failure in found.failures] == ["CONN-13"]
