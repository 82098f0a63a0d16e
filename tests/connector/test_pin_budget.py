"""Runs with a pin budget: connectors that query it keep it, others are played without one."""

from __future__ import annotations

import pytest

from examples.host_cache import HostCacheConnector, HostCacheScheduler
from kvview import Connector, GPUBlockPoolView, SchedulerConnector
from kvview.testing.connector import generate_scenario, simulate
from kvview_reference.store_connector import StoreConnector

SCENARIO = next(
    scenario
    for scenario in map(generate_scenario, range(200))
    if scenario.pin_budget == 0.1 and scenario.num_gpu_blocks > 20
)
"""A tenth of the blocks may be held, which is more than none."""


class WithLimits(HostCacheConnector):
    """The example, with another limit in the place of its budget."""

    @staticmethod
    def change(half: HostCacheScheduler) -> None:
        """Change the scheduler half when it has its view."""

    def make_scheduler(self) -> SchedulerConnector:
        change = self.change

        class Scheduler(HostCacheScheduler):
            def bind_gpu_block_pool_view(self, view: GPUBlockPoolView) -> None:
                super().bind_gpu_block_pool_view(view)
                change(self)

        return Scheduler(self.config, self.cpu_blocks)


class NeverQueries(WithLimits):
    """Lets the refusal of a hold out of its hook."""

    @staticmethod
    def change(half: HostCacheScheduler) -> None:
        del half.limits[-1]


class HoldsOneMore(WithLimits):
    """Holds one block more than it may."""

    @staticmethod
    def change(half: HostCacheScheduler) -> None:
        query = half.limits.pop()
        half.limits.append(lambda: query() + 1)


@pytest.mark.parametrize("connector", [HostCacheConnector, StoreConnector])
def test_a_connector_that_queries_the_budget_keeps_it(connector: type[Connector]) -> None:
    result = simulate(connector, SCENARIO)
    assert result.failure is None
    assert result.scenario.pin_budget is not None


def test_a_connector_without_the_query_is_played_without_a_budget() -> None:
    result = simulate(NeverQueries, SCENARIO)
    assert result.failure is None
    assert result.scenario.pin_budget is None
    assert result.coverage["stores"]


def test_a_hold_beyond_the_queried_budget_is_found() -> None:
    failure = simulate(HoldsOneMore, SCENARIO).failure
    assert failure is not None
    assert failure.law == "GUARD-3"
    assert "on_request_finished raised PinBudgetExceeded" in failure.message
