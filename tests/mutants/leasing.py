"""Connectors that hold blocks under leases: two right ones, and wrong ones."""

from __future__ import annotations

from typing import ClassVar

from kvview import (
    BlockIds,
    Connector,
    FinishReason,
    GPUBlockPoolView,
    Lease,
    RequestInfo,
    SchedulerConnector,
    StepInfo,
    StepPlan,
    SupportsLeases,
)


class LeasingScheduler(SchedulerConnector):
    """Keeps the blocks of finished requests for a later reader."""

    ttl: float | None = 5.0

    def bind_gpu_block_pool_view(self, view: GPUBlockPoolView) -> None:
        assert isinstance(view, SupportsLeases)
        self.view = view
        self.leases: list[Lease] = []

    def on_request_finished(
        self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
    ) -> None:
        blocks = [block for table in block_ids for block in table]
        if blocks and reason is FinishReason.FINISHED:
            self.leases.append(self.view.lease(blocks, job=request.request_id, ttl=self.ttl))

    def shutdown(self) -> None:
        for lease in self.leases:
            lease.release()


class LeasesForAWhile(Connector):
    scheduler: ClassVar[type[LeasingScheduler]] = LeasingScheduler

    def make_scheduler(self) -> SchedulerConnector:
        return self.scheduler()


class LeasesForLong(LeasesForAWhile):
    class scheduler(LeasingScheduler):
        ttl = 500.0


class LeasesForever(LeasesForAWhile):
    class scheduler(LeasingScheduler):
        ttl = None


class LeasesAndTouches(LeasesForAWhile):
    class scheduler(LeasingScheduler):
        def on_request_finished(
            self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
        ) -> None:
            super().on_request_finished(request, block_ids, reason)
            self.view.touch_blocks([block for table in block_ids for block in table])


class RenewsForever(LeasesForAWhile):
    class scheduler(LeasingScheduler):
        def plan_step(self, step: StepInfo) -> StepPlan:
            for lease in self.leases:
                if lease.is_active:
                    lease.renew(8 * 24 * 3600.0)  # longer than any run lasts
            return StepPlan()
