"""What a store reads is held until its report, and a copy may fail once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from typing_extensions import override

from examples.host_cache import HostCacheScheduler, HostCacheWorker
from kvview import StepInfo, StepPlan, TransferResult
from kvview.testing.connector import ConnectorRuns, check_connector
from kvview.testing.connector.gate import CopyFailed
from tests.connector.unusual import OwnPlan, PlanWithNotes, Unusual


class LetsGoAtOnce(Unusual):
    """Holds what it stores until the plan is made."""

    class scheduler(HostCacheScheduler):
        @override
        def plan_step(self, step: StepInfo) -> StepPlan:
            for job_id, (slots, gpu_blocks) in self.stores.items():
                self.release(gpu_blocks)
                self.stores[job_id] = slots, []
            return super().plan_step(step)


class ForgetsAFailedCopy(Unusual):
    """Goes on after a block that could not be copied."""

    class worker(HostCacheWorker):
        @override
        def copy(
            self, job_id: int, src: Any, src_pages: list[Any], dst: Any, dst_pages: list[Any]
        ) -> TransferResult:
            is_good = True
            for src_tensor, dst_tensor in zip(src_pages, dst_pages, strict=True):
                for src_block, dst_block in zip(src.block_ids, dst.block_ids, strict=True):
                    try:
                        dst_tensor[dst_block].copy_(src_tensor[src_block])
                        is_good = True
                    except CopyFailed:
                        is_good = False
            return TransferResult(job_id, success=is_good, error=None if is_good else "failed")


class TellsItsWorker(OwnPlan):
    """A worker half that misses one of the numbered plans ends the run."""

    class worker(HostCacheWorker):
        num_plans = 0

        @override
        def start_plan(self, plan: StepPlan) -> None:
            assert isinstance(plan, PlanWithNotes)
            self.num_plans += 1
            assert plan.notes == (f"plan {self.num_plans}",), "a plan did not arrive"
            super().start_plan(plan)


def check(connector: type[Any], seeds: Sequence[int]) -> list[ConnectorRuns]:
    return [
        check_connector(connector, seeds=1, first_seed=seed, max_shrink_runs=0) for seed in seeds
    ]


@pytest.mark.parametrize(
    ("connector", "seeds", "laws"),
    [
        (LetsGoAtOnce, range(6), {"CONN-6"}),
        (ForgetsAFailedCopy, range(30), {"XFER-4"}),
    ],
)
def test_it_is_seen(connector: type[Any], seeds: Sequence[int], laws: set[str]) -> None:
    failures = [failure for runs in check(connector, seeds) for failure in runs.failures]
    assert {failure.law for failure in failures} >= laws, failures


def test_a_plan_arrives_though_all_its_jobs_fail() -> None:
    assert not [runs.failures for runs in check(TellsItsWorker, range(25)) if runs.failures]
