"""Connectors that record the requests of each call, in a file of their own as users write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvview import (
    BlockIds,
    Connector,
    ConnectorConfig,
    FinishReason,
    FullBlock,
    GPUBlockPoolView,
    RequestInfo,
    SchedulerConnector,
    StepInfo,
    StepPlan,
    TransferResult,
    WorkerConnector,
    full_blocks,
)


@dataclass(frozen=True)
class Drops(StepPlan):
    """A plan that has more than jobs."""

    dropped: Sequence[str] = ()


class RecordingConnector(Connector):
    def make_scheduler(self) -> SchedulerConnector:
        return RecordingScheduler(self.config)

    def make_worker(self) -> WorkerConnector:
        return RecordingWorker()


class LaterConnector(Connector):
    contract_version = "1.7"


class RecordingScheduler(SchedulerConnector):
    def __init__(self, config: ConnectorConfig) -> None:
        self.geometry = config.geometry
        self.view: GPUBlockPoolView | None = None
        self.calls: list[tuple[str, RequestInfo]] = []
        self.full: list[tuple[str, FullBlock]] = []
        self.num_unhashed = 0  # steps that fill a block without a hash
        self.num_beyond = 0  # steps that go past the known tokens of a request

    def bind_gpu_block_pool_view(self, view: GPUBlockPoolView) -> None:
        self.view = view

    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int:
        self.calls.append(("match", request))
        assert request.num_computed_tokens == num_computed_tokens
        return 0

    def on_blocks_allocated(
        self, request: RequestInfo, block_ids: BlockIds, num_computed_tokens: int, external: int
    ) -> None:
        self.calls.append(("allocated", request))
        assert request.num_computed_tokens == num_computed_tokens

    def plan_step(self, step: StepInfo) -> StepPlan:
        for each in step.scheduled:
            request = each.request
            self.calls.append(("step", request))
            assert request.num_computed_tokens == each.num_computed_tokens
            end = each.num_computed_tokens + each.num_scheduled_tokens
            self.num_unhashed += end // self.geometry.hash_block_size > len(request.block_hashes)
            self.num_beyond += end > request.num_tokens
            for block in full_blocks(self.geometry, request, each.block_ids):
                self.full.append((request.request_id, block))
        return Drops(dropped=["a key"])

    def on_request_preempted(self, request: RequestInfo, block_ids: BlockIds) -> None:
        self.calls.append(("preempted", request))

    def on_request_finished(
        self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
    ) -> None:
        self.calls.append(("finished", request))
        for block in full_blocks(self.geometry, request, block_ids):
            self.full.append((request.request_id, block))


class RecordingWorker(WorkerConnector):
    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.results: list[TransferResult] = []

    def start_plan(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def get_finished(self) -> list[TransferResult]:
        results, self.results = self.results, []
        return results
