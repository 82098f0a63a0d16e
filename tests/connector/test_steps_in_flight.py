"""Asynchronous scheduling: what is counted is launched, and its bytes and tokens come later."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from examples.host_cache import HostCacheConnector, HostCacheWorker
from kvview import (
    CacheGeometry,
    CanonicalKVCaches,
    Connector,
    SchedulerConnector,
    StepInfo,
    StepPlan,
    WorkerConnector,
)
from kvview.testing.connector import (
    Abort,
    Add,
    Fate,
    Scenario,
    Squeeze,
    Step,
    check_connector,
    generate_scenario,
    simulate,
)
from kvview.testing.connector.scenario import Event
from kvview.testing.connector.stream import StepStream
from kvview_reference.connector import LazyOffloadConnector, OffloadConnector
from kvview_reference.connector.offload import OffloadWorker
from kvview_reference.engine import Engine, chain_hashes
from kvview_reference.engine.request import Request, Status

SIZE = 4
DEPTHS = [2, 3]


def scenario(*events: Event, steps_in_flight: int = 2, compute_lags: bool = False) -> Scenario:
    """Every job is given to the worker half at once, and succeeds."""
    return Scenario(
        geometry=CacheGeometry.single(SIZE),
        num_gpu_blocks=30,
        events=events,
        fates=(Fate(0, 0),) * 40,
        decode_tokens=1,
        steps_in_flight=steps_in_flight,
        compute_lags=compute_lags,
    )


# --- wrong connectors that no synchronous engine shows (/probes/async: eager.py, min_lag.py) ---


class LooksUpWhatItCounts(Connector):
    """Takes the hashes of the blocks that a step completes."""

    def make_scheduler(self) -> SchedulerConnector:
        return Looking(self.config.geometry)


class Looking(SchedulerConnector):
    def __init__(self, geometry: CacheGeometry) -> None:
        self.size = geometry.hash_block_size

    def plan_step(self, step: StepInfo) -> StepPlan:
        for running in step.scheduled:
            first = running.num_computed_tokens
            last = first + running.num_scheduled_tokens
            for block in range(first // self.size, last // self.size):
                assert running.request.block_hashes[block]
        return StepPlan()


class CopiesAtOnce(HostCacheConnector):
    """Its worker half does not order itself after the compute stream."""

    def make_worker(self) -> WorkerConnector:
        return Hasty(self.cpu_blocks)


class Hasty(HostCacheWorker):
    def register_kv_caches(self, kv_caches: CanonicalKVCaches[object]) -> None:
        super().register_kv_caches(replace(kv_caches, compute_stream=None))


def test_a_hash_that_is_only_counted_is_not_there() -> None:
    events = (Add("a", 1, 9, 12), Step(20))
    assert simulate(LooksUpWhatItCounts, scenario(*events, steps_in_flight=1)).failure is None
    for depth in DEPTHS:
        failure = simulate(LooksUpWhatItCounts, scenario(*events, steps_in_flight=depth)).failure
        assert failure is not None
        assert "plan_step raised IndexError" in failure.message


STORED_TOO_EARLY = (
    Add("a", 1, 17, 6),
    Step(1),
    Abort("a"),  # its prompt is launched, and stored as such
    Add("b", 2, 9),
    Step(6),
    Squeeze(30),
    Squeeze(0),
    Add("c", 1, 21),
    Step(8),
)


def test_a_worker_that_does_not_wait_for_compute_reads_what_was_there_before() -> None:
    for lags in (False, True):
        played = scenario(*STORED_TOO_EARLY, compute_lags=lags)
        assert simulate(HostCacheConnector, played).failure is None
        failure = simulate(CopiesAtOnce, played).failure
        if lags:
            assert failure is not None
            assert failure.law == "XFER-1"
        else:
            assert failure is None


class StoresTooEarly(OffloadConnector):
    """As the last one, over a connector that stores what the step before has launched."""

    def make_worker(self) -> WorkerConnector:
        return HastyOffload(self.options)


class HastyOffload(OffloadWorker):
    def register_kv_caches(self, kv_caches: CanonicalKVCaches[torch.Tensor]) -> None:
        super().register_kv_caches(replace(kv_caches, compute_stream=None))


def test_seeds_show_who_does_not_wait_for_compute() -> None:
    failures = check_connector(StoresTooEarly, seeds=60, max_shrink_runs=0).failures
    assert len(failures) >= 3
    for failure in failures:
        assert failure.law == "XFER-1"
        assert failure.result.scenario.steps_in_flight > 1
        assert failure.result.scenario.compute_lags


def test_seeds_show_who_looks_up_what_it_counts() -> None:
    failures = check_connector(LooksUpWhatItCounts, seeds=20, max_shrink_runs=0).failures
    assert len(failures) >= 5
