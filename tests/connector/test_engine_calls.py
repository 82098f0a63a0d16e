"""The kit checks the calls of an engine, too: a wrong engine must not pass as a right connector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from typing_extensions import override

from kvview import (
    BlockHash,
    CacheGeometry,
    CPULoadStoreSpec,
    FinishReason,
    FullAttention,
    GPULoadStoreSpec,
    RequestContent,
    RequestInfo,
    RequestStep,
    SchedulerConnector,
    SlidingWindow,
    StepInfo,
    StepPlan,
    TransferJob,
    TransferResult,
)
from kvview.testing.connector.half.scheduler import Record, SchedulerHarness
from kvview.testing.connector.judge.invariants import InvariantBroken
from kvview.testing.connector.judge.run_log import RunLog
from kvview_reference.pool import BlockPool

MIXED = CacheGeometry(4, 4, (FullAttention(4), SlidingWindow(4, 4)))
REQUEST = RequestInfo("r", 9, (BlockHash(b"one"), BlockHash(b"two")))
LOAD = TransferJob(7, CPULoadStoreSpec([0]), GPULoadStoreSpec([1], [1], [0]), "r")


class LoadsOnce(SchedulerConnector):
    @override
    def plan_step(self, step: StepInfo) -> StepPlan:
        return StepPlan([LOAD], [])


class ShowsNothing(StepInfo):
    @override
    def filling(self) -> Sequence[RequestStep]:
        return ()


def bound(geometry: CacheGeometry, half: SchedulerConnector) -> tuple[SchedulerHarness, BlockPool]:
    pool = BlockPool(8)
    watched = SchedulerHarness(half, Record(geometry), RunLog(), pool.ref_counts)
    watched.bind_gpu_block_pool_view(pool.view())
    return watched, pool


def test_a_table_may_not_name_a_block_that_the_request_has_left_behind() -> None:
    # SCHED-1
    half, pool = bound(MIXED, SchedulerConnector())
    full, window = pool.allocate_blocks(2), pool.allocate_blocks(2)
    pool.free_blocks(window[:1])  # the window has left it

    def plan(table: list[int]) -> None:
        half.plan_step(StepInfo([RequestStep(REQUEST, (full, table), 8, 1)]))

    plan([pool.null_block_id, window[1]])
    with pytest.raises(InvariantBroken, match=rf"ENGINE: .*'r' names \[{window[0]}\], which are"):
        plan(window)


@pytest.mark.parametrize("start", [4, 0])
def test_filling_returns_requests_whose_blocks_become_full_or_lose_tokens(start: int) -> None:
    half, pool = bound(CacheGeometry.single(4), SchedulerConnector())
    table = (pool.allocate_blocks(3),)

    def step(kind: Callable[..., StepInfo], start: int, num_tokens: int) -> None:
        half.plan_step(kind([RequestStep(REQUEST, table, start, num_tokens)]))

    step(StepInfo, 0, 5)
    step(ShowsNothing, 5, 2)
    with pytest.raises(InvariantBroken, match=r"ENGINE: StepInfo\.filling does not return request"):
        step(ShowsNothing, start, 8)


def test_the_prefix_of_a_request_is_computed_after_its_load_has_failed() -> None:
    # SCHED-2
    half, _ = bound(MIXED, LoadsOnce())
    half.plan_step(StepInfo())
    half.match_prefix(REQUEST, 0)
    half.on_transfers_finished([TransferResult(LOAD.job_id, success=False)])
    with pytest.raises(InvariantBroken, match=r"ENGINE: .* whose load has failed"):
        half.match_prefix(REQUEST, 0)
    half.on_request_finished(REQUEST, ((), ()), FinishReason.ABORTED)
    half.match_prefix(REQUEST, 0)  # of another request with this id


def test_a_request_keeps_its_content_and_names_its_gpu_hit() -> None:
    half, _ = bound(MIXED, SchedulerConnector())
    half.match_prefix(REQUEST, 0)
    with pytest.raises(InvariantBroken, match=r"ENGINE: .* must be the 4 tokens of its GPU hit"):
        half.match_prefix(REQUEST, 4)
    other = replace(REQUEST, content=RequestContent())
    with pytest.raises(InvariantBroken, match=r"ENGINE: request 'r' has another content"):
        half.on_blocks_allocated(other, ((), ()), 0, 0)
    half.on_request_finished(REQUEST, ((), ()), FinishReason.ABORTED)
    half.match_prefix(other, 0)  # of another request with this id


def test_an_engine_closes_its_view() -> None:
    # POOL-10
    half, _ = bound(MIXED, SchedulerConnector())
    view: Any = half.engine_calls.view
    with pytest.raises(InvariantBroken, match=r"ENGINE: .* did not close its view"):
        half.engine_calls.check_closed()
    view.close()
    half.engine_calls.check_closed()
