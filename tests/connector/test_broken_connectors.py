"""Connectors that do nothing run; those that break their contract are named and do not hang."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvview import (
    CacheGeometry,
    Connector,
    ConnectorConfig,
    ConnectorError,
    CPULoadStoreSpec,
    EngineFacts,
    FullAttention,
    GPUBlockPoolView,
    GPULoadStoreSpec,
    RequestInfo,
    SchedulerConnector,
    StepInfo,
    StepPlan,
    TransferJob,
    TransferResult,
    WorkerConnector,
)
from kvview_reference.engine import Engine
from kvview_reference.engine.request import Request, chain_hashes

FULL = CacheGeometry.single(4)


def build(connector: Connector, geometry: CacheGeometry = FULL) -> Engine:
    return Engine(geometry, connector, num_gpu_blocks=60, page_bytes=16, max_tokens_per_step=8)


def run(engine: Engine, max_steps: int = 5000) -> None:
    """One request of 33 tokens, which needs nine blocks."""
    engine.add_request(Request("a", 33, 2, 4, chain_hashes(range(8))))
    for _ in range(max_steps):
        if not engine.has_work():
            return
        engine.step()
    pytest.fail(f"still at work after {max_steps} steps")


def custom(
    scheduler: Callable[[], SchedulerConnector],
    worker: Callable[[], WorkerConnector] = WorkerConnector,
) -> Connector:
    """A connector of the two halves given."""
    connector = Connector(ConnectorConfig(FULL))
    connector.make_scheduler = scheduler  # type: ignore[method-assign]
    connector.make_worker = worker  # type: ignore[method-assign]
    return connector


# --- promises to a connector ---


def test_conn1_bind_is_opt_in() -> None:
    """A connector that overrides nothing runs; it holds and loads nothing."""
    half, worker = SchedulerConnector(), WorkerConnector()
    engine = build(Connector(ConnectorConfig(FULL)))
    half.bind_gpu_block_pool_view(engine.view)
    assert engine.view.held_blocks() == {}
    assert half.match_prefix(RequestInfo("a", 20, []), 0) == 0
    assert half.plan_step(StepInfo()) == StepPlan()
    assert not StepPlan()
    assert list(half.take_events()) == []
    assert worker.get_finished() == []
    assert half.reset_cache()
    assert not half.has_pending_work()
    run(engine)
    assert engine.shutdown() == {}


def test_facts_of_the_engine() -> None:
    seen: list[EngineFacts] = []

    class Half(SchedulerConnector):
        def on_engine_ready(self, facts: EngineFacts) -> None:
            seen.append(facts)

    Engine(FULL, custom(Half), num_gpu_blocks=33, page_bytes=64, num_layers=3)
    (facts,) = seen
    assert (facts.num_gpu_blocks, facts.page_bytes) == (33, (192,))


# --- broken connectors ---


class Promises(SchedulerConnector):
    def __init__(self, num_tokens: int | None) -> None:
        self.num_tokens = num_tokens

    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int | None:
        return self.num_tokens


class Holds(SchedulerConnector):
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def bind_gpu_block_pool_view(self, view: GPUBlockPoolView) -> None:
        view.touch_blocks(range(1, self.num_blocks + 1))


class Plans(SchedulerConnector):
    """Plans these jobs in the first step, and is never done."""

    def __init__(
        self, loads: Sequence[TransferJob] = (), stores: Sequence[TransferJob] = ()
    ) -> None:
        self.plan = StepPlan(loads, stores)

    def plan_step(self, step: StepInfo) -> StepPlan:
        plan, self.plan = self.plan, StepPlan()
        return plan

    def has_pending_work(self) -> bool:
        return True


class Reports(WorkerConnector):
    """Reports every job so many times, and these from the start."""

    def __init__(self, times: int = 1, unknown: Sequence[int] = ()) -> None:
        self.times = times
        self.results = [TransferResult(job_id, True) for job_id in unknown]

    def start_plan(self, plan: StepPlan) -> None:
        for job in (*plan.loads, *plan.stores):
            self.results += [TransferResult(job.job_id, True)] * self.times

    def get_finished(self) -> list[TransferResult]:
        results, self.results = self.results, []
        return results


GPU, CPU = GPULoadStoreSpec([1], [1], [0]), CPULoadStoreSpec([0])
STORE = TransferJob(7, GPU, CPU)
BAD_PROMISE = r"match_prefix promised {} tokens beyond 0 to request 'a' of 33 tokens: .* of 4 and"
UNKNOWN = "job 7 was reported but is not in flight"
BROKEN: dict[str, tuple[Any, Any, str]] = {  # the halves' factories, and the message
    "less than nothing": (lambda: Promises(-4), Reports, BAD_PROMISE.format(-4)),
    "half a block": (lambda: Promises(3), Reports, BAD_PROMISE.format(3)),
    "more than the prompt": (lambda: Promises(400), Reports, BAD_PROMISE.format(400)),
    "all of the prompt": (lambda: Promises(36), Reports, BAD_PROMISE.format(36)),
    "no load": (lambda: Promises(16), Reports, "promised 16 tokens to request 'a' but planned no"),
    "no answer": (lambda: Promises(None), Reports, "1 requests wait.* match_prefix always"),
    "holds all": (lambda: Holds(59), Reports, "1 requests wait.* holds 59 of 59 blocks"),
    "unknown job": (SchedulerConnector, lambda: Reports(1, [7]), UNKNOWN),
    "reported twice": (lambda: Plans([], [STORE]), lambda: Reports(2), UNKNOWN),
    "never reported": (lambda: Plans([], [STORE]), lambda: Reports(0), r"jobs \[7\] were never r"),
    "id in flight": (lambda: Plans([], [STORE] * 2), Reports, "job id 7 is in flight"),
    "never done": (Plans, Reports, "has_pending_work was true for 1000 steps"),
    "load for nobody": (
        lambda: Plans([TransferJob(7, CPU, GPU, "nobody")]),
        Reports,
        "load job 7 names request 'nobody', which does not wait for a load",
    ),
    "load without request": (
        lambda: Plans([TransferJob(7, CPU, GPU)]), Reports, "load job 7 names request None"
    ),
    "store from the host": (
        lambda: Plans([], [TransferJob(7, CPU, GPU)]),
        Reports,
        "the GPU side of a job must be a GPULoadStoreSpec",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_connector_is_named_and_hangs_nothing(name: str) -> None:
    scheduler, worker, message = BROKEN[name]
    engine = build(custom(scheduler, worker))
    with pytest.raises(ConnectorError, match=message) as caught:
        run(engine)
    assert "\n" not in str(caught.value)


def test_conn4_a_request_that_is_preempted_for_ever_is_not_a_hang() -> None:
    """Three blocks are left: a prefix too short to be a hit is computed again and again."""
    geometry = CacheGeometry(16, 4, (FullAttention(4),))
    engine = build(custom(lambda: Holds(56)), geometry)
    with pytest.raises(ConnectorError, match=r"preempted 1000 times: .* holds 56 of 59 blocks"):
        run(engine)
