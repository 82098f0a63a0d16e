"""The two halves apart: instances, processes, threads and pages."""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from examples.host_cache import HostCacheConnector, HostCacheWorker
from kvview import (
    BlockHash,
    ConfigError,
    Connector,
    ConnectorConfig,
    SchedulerConnector,
    StepPlan,
    WorkerConnector,
    make_offload_key,
)
from kvview.testing.connector import check_connector, generate_scenario, simulate
from kvview.testing.connector.kv_bytes import KVBytes
from kvview_reference.connector import LazyOffloadConnector, OffloadConnector
from kvview_reference.connector.offload import OffloadOptions, OffloadWorker
from kvview_reference.transfer import worker


class SharesThroughSelf(OffloadConnector):
    """Its worker half finds the options where the scheduler half left them."""

    def make_scheduler(self) -> SchedulerConnector:
        self.handed = self.options
        return super().make_scheduler()

    def make_worker(self) -> WorkerConnector:
        connector = self

        class Worker(OffloadWorker):
            def start_plan(self, plan: Any) -> None:
                assert isinstance(connector.handed, OffloadOptions)
                super().start_plan(plan)

        return Worker(self.options)


def test_the_halves_share_no_instance() -> None:
    report = check_connector(SharesThroughSelf, seeds=3, max_shrink_runs=0)
    assert report.failures
    assert "'SharesThroughSelf' object has no attribute 'handed'" in report.failures[0].message


class TakesAnything(Connector):
    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)


def test_an_option_that_does_not_pickle_is_named() -> None:
    with pytest.raises(ConfigError, match="option 'lock' does not survive pickling"):
        check_connector(TakesAnything, seeds=1, options={"lock": threading.Lock()})


def run_in_a_process(worker: type[HostCacheWorker]) -> str:
    """The failure of a worker half in a child process; its class is defined in a function."""

    class Local(HostCacheConnector):
        def make_worker(self) -> WorkerConnector:
            return worker(self.cpu_blocks)

    scenario = replace(generate_scenario(0), worker_half="in_a_process")
    return str(simulate(Local, scenario).failure)


@pytest.mark.parametrize("seed", [503, 662])  # one connector, two
def test_a_load_may_still_write_while_blocks_are_compared(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A copy by address that was let through may take long."""

    def memmove_slowly(*copies: Sequence[int]) -> None:
        for dst, src, size in zip(*copies, strict=True):
            for at in range(0, size, 4096):
                time.sleep(0.0001)
                ctypes.memmove(dst + at, src + at, min(4096, size - at))

    monkeypatch.setattr(worker, "memmove_each", memmove_slowly)
    lagging = replace(generate_scenario(seed), compute_lags=True, steps_in_flight=2)
    played = replace(lagging, worker_half="whole_plans")
    assert simulate(LazyOffloadConnector, played).failure is None
    assert simulate(OffloadConnector, played).failure is None


class Dies(HostCacheWorker):
    def start_plan(self, plan: StepPlan) -> None:
        os._exit(7)


class Raises(HostCacheWorker):
    def wait(self, job_ids: Sequence[int]) -> None:
        raise OSError("no disk")


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        (HostCacheWorker, "None"),
        (Dies, "CONN-3: the process of the worker half died during start_plan with exit code 7"),
        (
            Raises,
            "exceptions: wait of the worker half raised OSError no disk at .*worker_half.py",
        ),
    ],
)
def test_a_child_process_reports_its_failure(worker: type[HostCacheWorker], message: str) -> None:
    assert re.match(message, run_in_a_process(worker))


def test_each_group_has_its_own_pages() -> None:
    kv = KVBytes(4, 0, group_pages=[(16, 0, 24), (8, 8, 0)])
    assert [cache.page_size_bytes for cache in kv.caches.tensors] == [16, 8, 24]
    refs = kv.caches.group_data_refs
    assert [[ref.tensor_idx for ref in group] for group in refs] == [[0, 2], [0, 1]]
    assert kv.group_bytes == (40, 16)
    keys = [make_offload_key(BlockHash(bytes(32)), group) for group in (0, 1)]
    kv.poison([1, 2])
    kv.write([1, 2], keys)
    assert kv.count_mismatches([1, 2], keys) == 0
    kv.caches.tensors[0].tensor[2, 8] += 1  # padding of group 1
    assert kv.count_mismatches([1, 2], keys) == 0
    kv.caches.tensors[1].tensor[2, 0] += 1
    assert kv.count_mismatches([1, 2], keys) == 1
    kv.caches.tensors[0].tensor[2] = kv.caches.tensors[0].tensor[1]
    assert kv.count_mismatches([1, 2], keys) == 1
    assert kv.mismatch == (
        "bytes 0 to 7 of GPU block 2 in tensor 0 hold the KV of key 00000000.../0, "
        "not the KV of key 00000000.../1"
    )
    with pytest.raises(ConfigError, match="a page must be a positive multiple of 8"):
        KVBytes(4, 0, group_pages=[(16, 0), (8, 0)])
