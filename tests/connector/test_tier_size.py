"""The check chooses the size of a tier, so that it is full in some runs."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

import pytest
from typing_extensions import override

from examples.host_cache import HostCacheScheduler, HostCacheWorker
from kvview import (
    BlockIds,
    ComputeEvent,
    ConfigError,
    ConnectorConfig,
    GPULoadStoreSpec,
    RequestInfo,
    StepPlan,
    TransferJob,
    TransferResult,
)
from kvview.testing.connector import ConnectorRuns, check_connector
from kvview.testing.connector.exercised.coverage import (
    FEWEST_SEEDS,
    not_exercised,
)
from kvview.testing.connector.scenario.generate import FULL_TIER_PLACES, generate_scenario
from kvview.testing.connector.scenario.scenario import NUM_LAYERS, PAGE_BYTES
from kvview.testing.placeholders import in_size
from tests.connector.unusual import Host

FEW_SEEDS = 3
FIRST_SEED = 3  # after a steady run, which takes as long as ten others
HEADER_BYTES = 10_000


class OwnOption(Host):
    """The example, with an option of another name."""

    at_least = 0

    def __init__(self, config: ConnectorConfig) -> None:
        options = dict(config.options)
        size = options.pop("max_blocks", 1000)
        if options or not isinstance(size, int) or size < self.at_least:
            raise ConfigError(f"expected max_blocks=N, got {dict(config.options)}")
        super().__init__(ConnectorConfig(config.geometry, {"cpu_blocks": size}))


class HasHeaders(Host):
    """Stores as many blocks as fit in so many bytes, each with a header, and then no more."""

    class scheduler(HostCacheScheduler):
        @override
        def take_slot(self) -> int | None:
            return self.free_slots.pop() if self.free_slots else None

    def __init__(self, config: ConnectorConfig) -> None:
        size = config.options["max_bytes"] // (NUM_LAYERS * PAGE_BYTES + HEADER_BYTES)
        super().__init__(ConnectorConfig(config.geometry, {"cpu_blocks": size}))


class EvictsPagesOfLoads(Host):
    """Evicts pages that loads read, which harms nothing while jobs keep their order (XFER-3)."""

    class scheduler(HostCacheScheduler):
        @override
        def take_slot(self) -> int | None:
            if self.slots and not self.free_slots:
                return self.slots.popitem(last=False)[1]
            return super().take_slot()


class AndCopiesInAnyOrder(EvictsPagesOfLoads):
    class worker(HostCacheWorker):
        def __init__(self, cpu_blocks: int) -> None:
            super().__init__(cpu_blocks)
            self.pool = ThreadPoolExecutor(4)
            self.running: dict[int, Future[TransferResult]] = {}

        @override
        def start_plan(self, plan: StepPlan) -> None:
            mark = self.compute.record_event() if self.compute else None
            for job in (*plan.loads, *plan.stores):
                self.running[job.job_id] = self.pool.submit(self.run, mark, job)

        def run(self, mark: ComputeEvent | None, job: TransferJob) -> TransferResult:
            if mark is not None:
                mark.synchronize()
            is_load = isinstance(job.dst, GPULoadStoreSpec)
            sides = (self.host, self.gpu) if is_load else (self.gpu, self.host)
            return self.copy(job.job_id, job.src, sides[0], job.dst, sides[1])

        @override
        def wait(self, job_ids: Collection[int]) -> None:
            wait([self.running[job_id] for job_id in job_ids if job_id in self.running])

        @override
        def get_finished(self) -> list[TransferResult]:
            ended = [job_id for job_id, future in self.running.items() if future.done()]
            return [self.running.pop(job_id).result() for job_id in ended]

        @override
        def shutdown(self) -> None:
            self.pool.shutdown()


class TakesNoFewerThan64(OwnOption):
    at_least = 64


def check(
    connector: type[Host], seeds: int = FEW_SEEDS, first_seed: int = FIRST_SEED, **options: object
) -> ConnectorRuns:
    return check_connector(
        connector, seeds=seeds, first_seed=first_seed, options=options, max_shrink_runs=0
    )


@pytest.mark.parametrize("connector", [OwnOption, TakesNoFewerThan64])
def test_a_size_of_another_name_is_filled_in(connector: type[OwnOption]) -> None:
    runs = check(connector, max_blocks="{blocks}")
    assert not runs.failures
    if not connector.at_least:
        assert "full tier" not in [gap.name for gap in not_exercised(runs.coverage)]


def test_bytes_are_those_of_the_largest_pages() -> None:
    options = {"children": [{"gib": "{bytes}"}], "path": "{tmp}/{blocks}"}
    assert in_size(options, 3, 64) == {"children": [{"gib": 224}], "path": "{tmp}/{blocks}"}
    pages = replace(generate_scenario(0), group_pages=((64, 8), (16, 16)))
    assert pages.block_bytes == 72


def test_what_a_block_takes_is_the_connectors_to_say() -> None:
    assert not check(HasHeaders, max_bytes="{bytes}").failures


def test_a_size_of_its_own_is_not_enough() -> None:
    coverage = check(OwnOption, max_blocks=10_000).coverage
    many = {name: FEWEST_SEEDS * number for name, number in coverage.items()}
    gaps = {gap.name: gap.what for gap in not_exercised(many)}
    assert "NAME='{blocks}'" in gaps["full tier"]


def with_scheduler(scheduler: type[HostCacheScheduler]) -> type[Host]:
    """The example with another scheduler half."""
    return type("Own", (Host,), {"scheduler": scheduler})


def test_a_tier_without_pages_is_accepted_or_refused() -> None:
    class NeedsAPage(HostCacheScheduler):
        def __init__(self, config: ConnectorConfig, cpu_blocks: int) -> None:
            super().__init__(config, cpu_blocks)
            self.last = 0 if cpu_blocks else [][0]

    seed = next(seed for seed in range(100) if not generate_scenario(seed).cpu_blocks)
    found = check_connector(with_scheduler(NeedsAPage), first_seed=seed, seeds=1, max_shrink_runs=0)
    assert [failure.law for failure in found.failures] == ["CONN-1"]


def test_no_block_is_skipped_without_a_shortage() -> None:
    class CountsAll(HostCacheScheduler):
        @override
        def store(self, request: RequestInfo, block_ids: BlockIds) -> None:
            self.num_skipped_blocks += 1
            super().store(request, block_ids)

    assert [failure.law for failure in check_roomy(CountsAll).failures] == ["CONN-13"]


def test_a_half_may_drop_and_count_blocks_for_its_own_reasons() -> None:
    class StoresTwo(HostCacheScheduler):
        @override
        def store(self, request: RequestInfo, block_ids: BlockIds) -> None:
            first_two = tuple(table[:2] for table in block_ids)
            self.num_skipped_blocks += sum(map(len, block_ids)) - sum(map(len, first_two))
            super().store(request, first_two)

    assert not check_roomy(StoresTwo).failures


def check_roomy(scheduler: type[HostCacheScheduler]) -> ConnectorRuns:
    scenarios = [generate_scenario(seed) for seed in range(100)]
    roomy = [scenario for scenario in scenarios if scenario.is_roomy]
    return check_connector(
        with_scheduler(scheduler), seeds=len(roomy), scenarios=roomy, max_shrink_runs=0
    )


@pytest.mark.slow
def test_stores_need_the_pages_of_loads_in_some_seeds() -> None:
    def laws(connector: type[Host]) -> set[str]:
        seeds = [place + hundred for place in FULL_TIER_PLACES for hundred in (0, 100)]
        options = {"cpu_blocks": "{blocks}"}
        reports = [check(connector, 1, seed, **options) for seed in seeds]
        return {failure.law for report in reports for failure in report.failures}

    assert laws(EvictsPagesOfLoads) == set()
    assert laws(AndCopiesInAnyOrder) == {"XFER-1"}
