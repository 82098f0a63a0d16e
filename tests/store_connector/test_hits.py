"""A connector never makes serving worse, and stores no block more often than it is computed."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from examples.host_cache import HostCacheConnector
from kvview import Connector, StepInfo, StepPlan
from kvview_reference.replay.run import ReplayConfig, ReplayReport, replay
from kvview_reference.replay.workload import generate_trace
from kvview_reference.store_connector import StoreConnector

BLOCK_SIZE = 512
slow = pytest.mark.slow


def run(
    connector: type[Connector], num_gpu: int, options: dict[str, Any], num_requests: int = 400
) -> tuple[ReplayReport, int]:
    """Replay the generated workload; returns the report and the number of computed blocks."""
    num_computed = 0

    class Watched(connector):  # type: ignore[misc,valid-type]
        def make_scheduler(self) -> Any:
            half = super().make_scheduler()
            plan_step = half.plan_step

            def counted(step: StepInfo) -> StepPlan:
                nonlocal num_computed
                for running in step.scheduled:
                    first = running.num_computed_tokens
                    last = first + running.num_scheduled_tokens
                    num_computed += last // BLOCK_SIZE - first // BLOCK_SIZE
                plan: StepPlan = plan_step(step)
                return plan

            half.plan_step = counted
            return half

    rows = generate_trace(num_requests=num_requests, seed=1, block_size=BLOCK_SIZE)
    report = replay(rows, BLOCK_SIZE, Watched, ReplayConfig(num_gpu, 8, options=options))
    return report, num_computed


def hit_rate(report: ReplayReport) -> float:
    return report.gpu_hit_rate + report.cpu_hit_rate


@cache
def hits_alone(num_requests: int) -> float:
    return run(Connector, 400, {}, num_requests)[0].gpu_hit_rate


@pytest.mark.parametrize(
    ("connector", "cpu_blocks"),
    [
        (StoreConnector, 5000),
        *(pytest.param(StoreConnector, size, marks=slow) for size in (0, 20, 100)),
        *(pytest.param(HostCacheConnector, size, marks=slow) for size in (0, 20, 100, 5000)),
    ],
)
def test_hits_are_those_without_it_at_least(connector: type[Connector], cpu_blocks: int) -> None:
    """The requests in flight fill the pool, which is the worst case for holds."""
    report, num_computed = run(connector, 400, {"cpu_blocks": cpu_blocks}, 1500)
    assert hit_rate(report) >= hits_alone(1500) - 0.002
    assert report.offloaded_blocks <= num_computed
    assert report.cpu_hit_rate > 0 or cpu_blocks < 5000
    assert report.is_clean


def test_victims_gain_most_where_the_tier_is_as_large_as_the_pool() -> None:
    options = {"cpu_blocks": 900}
    victims, num_computed = run(StoreConnector, 900, options)
    eager, _ = run(StoreConnector, 900, {**options, "mode": "eager"})
    assert hit_rate(victims) > hit_rate(eager) + 0.01
    assert victims.offloaded_blocks <= num_computed
