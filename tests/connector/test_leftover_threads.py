"""Threads of a worker half, which must end with it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from typing_extensions import override

from examples.host_cache import HostCacheWorker
from kvview import (
    CacheGeometry,
    CanonicalKVCaches,
    Connector,
)
from kvview.testing.connector import (
    Add,
    Scenario,
    Step,
    simulate,
)
from tests.connector.unusual import Host


def with_worker(worker: type[HostCacheWorker]) -> type[Connector]:
    """The example with another worker half."""
    return type("Own", (Host,), {"worker": worker})


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


@pytest.mark.slow
def test_threads_end_with_their_half() -> None:
    scenario = Scenario(CacheGeometry.single(4), 12, (Add("a", 1, 9), Step(4)))

    def law_of(connector: type[Connector]) -> str | None:
        failure = simulate(connector, scenario).failure
        return None if failure is None else failure.law

    assert law_of(with_worker(PoolWorker)) == "CONN-12"
    assert [law_of(with_worker(right)) for right in (Ends, EndsSoon, Shares)] == [None] * 3
    Shares.pool.shutdown()
