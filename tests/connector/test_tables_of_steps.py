"""The model of a run reads the block tables that an engine passes to a connector."""

from __future__ import annotations

import pytest

from kvview import (
    CacheGeometry,
    FullAttention,
    RequestInfo,
    RequestStep,
    SchedulerConnector,
    SlidingWindow,
    StepInfo,
)
from kvview.testing.connector.invariants import InvariantBroken
from kvview.testing.connector.run_log import RunLog
from kvview.testing.connector.watch import Record, WatchedScheduler
from kvview_reference.pool import BlockPool


def test_a_table_may_not_name_a_block_that_the_request_has_left_behind() -> None:
    # SCHED-1
    geometry = CacheGeometry(4, 4, (FullAttention(4), SlidingWindow(4, 4)))
    pool = BlockPool(8)
    half = WatchedScheduler(SchedulerConnector(), Record(geometry), RunLog())
    half.bind_gpu_block_pool_view(pool.view())
    full, window = pool.allocate_blocks(2), pool.allocate_blocks(2)
    pool.free_blocks(window[:1])  # the window has left it

    def plan(table: list[int]) -> None:
        half.plan_step(StepInfo([RequestStep(RequestInfo("r", 9, ()), (full, table), 8, 1)]))

    plan([pool.null_block_id, window[1]])
    with pytest.raises(InvariantBroken, match=rf"ENGINE: .*'r' names \[{window[0]}\], which are"):
        plan(window)
