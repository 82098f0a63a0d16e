"""The two halves apart: instances, processes, threads and pages."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest

from examples.host_cache import HostCacheConnector, HostCacheWorker
from kvview import (
    BlockHash,
    CanonicalKVCaches,
    ConfigError,
    Connector,
    ConnectorConfig,
    StepPlan,
    TransferResult,
    WorkerConnector,
    make_offload_key,
)
from kvview.testing.connector import (
    ConnectorFailure,
    check_connector,
    generate_scenario,
    simulate,
)
from kvview.testing.connector.judge.kv_bytes import KVBytes
from kvview.testing.connector.judge.threads import where_all_wait
from kvview_reference.store_connector import StoreConnector
from kvview_reference.transfer import worker


class TakesAnything(Connector):
    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)


def test_an_option_that_does_not_pickle_is_named() -> None:
    with pytest.raises(ConfigError, match="option 'lock' cannot be pickled"):
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
    assert simulate(StoreConnector, played).failure is None


class OnAThread(HostCacheWorker):
    """Copies on a thread, which waits for the compute of some plans only."""

    thread: threading.Thread | None = None

    def waits_for_compute(self, plan: StepPlan) -> bool:
        return True

    def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
        super().register_kv_caches(kv_caches)
        self.inbox: SimpleQueue[tuple[Any, StepPlan] | None] = SimpleQueue()
        self.ended: defaultdict[int, threading.Event] = defaultdict(threading.Event)
        self.thread = thread = threading.Thread(target=self.run, daemon=True)
        thread.start()

    def start_plan(self, plan: StepPlan) -> None:
        for job in (*plan.loads, *plan.stores):
            self.ended[job.job_id].clear()
        self.inbox.put((self.compute.record_event() if self.compute else None, plan))

    def run(self) -> None:
        while (item := self.inbox.get()) is not None:
            mark, plan = item
            if mark is not None and self.waits_for_compute(plan):
                mark.synchronize()
            self.started.append((None, plan))
            self.copy_started()
            for job in (*plan.loads, *plan.stores):
                self.ended[job.job_id].set()

    def get_finished(self) -> list[TransferResult]:
        return [self.finished.pop(0) for _ in range(len(self.finished))]

    def wait(self, job_ids: Sequence[int]) -> None:
        for job in job_ids:
            self.ended[job].wait()

    def shutdown(self) -> None:
        if self.thread is not None:
            self.inbox.put(None)
            self.thread.join()


class LoadsTooEarly(OnAThread):
    def waits_for_compute(self, plan: StepPlan) -> bool:
        return bool(plan.stores)


class StoresTooEarly(OnAThread):
    def waits_for_compute(self, plan: StepPlan) -> bool:
        return bool(plan.loads)


class NeverEnds(OnAThread):
    def run(self) -> None:
        super().run()
        threading.Event().wait()


def check_worker(worker: type[HostCacheWorker], seed: int) -> ConnectorFailure | None:
    class Local(HostCacheConnector):
        def make_worker(self) -> WorkerConnector:
            return worker(self.cpu_blocks)

    runs = check_connector(Local, seeds=1, first_seed=seed, max_shrink_runs=0)
    return runs.failures[0] if runs.failures else None


def test_a_copy_that_waits_for_compute_on_its_thread_is_right() -> None:
    assert check_worker(OnAThread, 48) is None


@pytest.mark.parametrize(("worker", "kind"), [(LoadsTooEarly, "load"), (StoresTooEarly, "store")])
def test_a_copy_that_does_not_wait_for_compute_is_named_as_the_cause(
    worker: type[HostCacheWorker], kind: str
) -> None:
    """A thread that starts late copies after the compute by chance, so there are six tries."""
    tries = (check_worker(worker, 48) for _ in range(6))
    failure = next(filter(None, tries), None)
    assert failure is not None
    assert failure.law == "XFER-6"
    assert f"a copy of {kind} job" in failure.message
    assert "compute_stream" in failure.message


def test_a_shutdown_that_does_not_return_names_the_lines_and_the_remedy() -> None:
    failure = check_worker(NeverEnds, 48)
    assert failure is not None
    assert failure.law == "CONN-4"
    waits = r"waits at \S+worker_half\.py:\d+: "
    assert re.search(rf"the hook {waits}self\.thread\.join", failure.message)
    assert re.search(rf"thread '.*' {waits}threading\.Event\(\)\.wait", failure.message)
    assert failure.hint is not None
    assert "with a short timeout" in failure.hint


async def never_answer() -> None:
    await asyncio.Event().wait()


async def send() -> None:
    await never_answer()


def test_tasks_that_wait_are_named_at_the_authors_line() -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    sent = asyncio.run_coroutine_threadsafe(send(), loop)
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()  # it has started
    try:
        assert re.search(r"a task waits at \S+: await asyncio\.Event\(\)", where_all_wait(0))
    finally:
        sent.cancel()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


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
    kv = KVBytes(4, [(16, 0, 24), (8, 8, 0)])
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
        KVBytes(4, [(16, 0), (8, 0)])
