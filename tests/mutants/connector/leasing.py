"""Connectors that hold blocks under leases."""

from __future__ import annotations

from kvview import (
    BlockIds,
    Connector,
    FinishReason,
    GPUBlockPoolView,
    Lease,
    RequestInfo,
    SchedulerConnector,
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
    def make_scheduler(self) -> SchedulerConnector:
        return LeasingScheduler()


class LeasesForLong(LeasesForAWhile):
    def make_scheduler(self) -> SchedulerConnector:
        half = LeasingScheduler()
        half.ttl = 500.0
        return half
