"""Connectors that are wrong only in engines with speculative decoding or several ranks."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from examples.host_cache import HostCacheWorker
from kvview import (
    BlockIds,
    CanonicalKVCaches,
    ConnectorConfig,
    FinishReason,
    RequestInfo,
    StepInfo,
    StepPlan,
    TransferResult,
)
from kvview.testing import Mutant
from kvview_reference.connector.offload import OffloadOptions, OffloadScheduler

from .connector import AtTheEnd, AtTheEndScheduler, EagerConnector, EagerScheduler, Offload, breaker
from .example import Host

MUTANTS: list[Mutant] = []
breaks = breaker(MUTANTS)


# --- speculative decoding ---


class _Counts:
    """Counts the tokens of each request by itself, as they are scheduled."""

    counted: dict[str, int]

    def on_blocks_allocated(
        self,
        request: RequestInfo,
        block_ids: BlockIds,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        self.counted[request.request_id] = num_computed_tokens + num_external_tokens
        super().on_blocks_allocated(  # type: ignore[misc]
            request, block_ids, num_computed_tokens, num_external_tokens
        )

    def count(self, step: StepInfo) -> None:
        for one in step.scheduled:
            self.counted[one.request.request_id] += one.num_scheduled_tokens


@breaks("CONN-8", "adds up the scheduled tokens, rejected drafts among them", "vllm#51805")
class AddsUpScheduledTokens(EagerConnector):
    class scheduler(_Counts, EagerScheduler):
        def __init__(self, config: ConnectorConfig, options: OffloadOptions) -> None:
            super().__init__(config, options)
            self.counted = {}

        def num_ready_tokens(self, scheduled: Any) -> int:
            groups = zip(self._geometry.groups, scheduled.block_ids, strict=True)
            room = min(len(table) * group.block_size for group, table in groups)
            return min(room, self.counted[scheduled.request.request_id])

        def plan_step(self, step: StepInfo) -> StepPlan:
            plan = super().plan_step(step)
            self.count(step)
            return plan


@breaks(
    "CONN-8", "stores all counted tokens at the end, rejected drafts among them", "sglang#28873"
)
class StoresCountedTokensAtTheEnd(AtTheEnd):
    class scheduler(_Counts, AtTheEndScheduler):
        def __init__(self, config: ConnectorConfig, options: OffloadOptions) -> None:
            super().__init__(config, options)
            self.counted = {}

        def num_stored_tokens(self, request: RequestInfo, block_ids: BlockIds) -> int:
            return self.counted.pop(request.request_id, 0)

        def plan_step(self, step: StepInfo) -> StepPlan:
            self.count(step)
            return super().plan_step(step)


@breaks("CONN-3", "asserts that a block table ends with the scheduled tokens", "vllm#43884")
class AssertsTheLengthOfTables(Offload):
    class scheduler(OffloadScheduler):
        def plan_step(self, step: StepInfo) -> StepPlan:
            for one in step.scheduled:
                end = one.num_computed_tokens + one.num_scheduled_tokens
                for group, table in zip(self._geometry.groups, one.block_ids, strict=True):
                    assert len(table) == -(-end // group.block_size), (end, list(table))
            return super().plan_step(step)


@breaks("CONN-3", "asserts that the computed tokens of a request never fall", "vllm#55503")
class AssertsThatCountsGrow(Offload):
    class scheduler(OffloadScheduler):
        def __init__(self, config: ConnectorConfig, options: OffloadOptions) -> None:
            super().__init__(config, options)
            self.computed: dict[str, int] = {}

        def plan_step(self, step: StepInfo) -> StepPlan:
            for one in step.scheduled:
                before = self.computed.get(one.request.request_id, 0)
                assert one.num_computed_tokens >= before, (one.num_computed_tokens, before)
                self.computed[one.request.request_id] = one.num_computed_tokens
            return super().plan_step(step)

        def on_request_preempted(self, request: RequestInfo, block_ids: BlockIds) -> None:
            self.computed.pop(request.request_id, None)
            super().on_request_preempted(request, block_ids)

        def on_request_finished(
            self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
        ) -> None:
            self.computed.pop(request.request_id, None)
            super().on_request_finished(request, block_ids, reason)


@breaks("XFER-2", "loads to the end of the block table, lookahead slots included", "vllm#52771")
class LoadsToTheEndOfTheTable(Offload):
    class scheduler(OffloadScheduler):
        def on_blocks_allocated(
            self,
            request: RequestInfo,
            block_ids: BlockIds,
            num_computed_tokens: int,
            num_external_tokens: int,
        ) -> None:
            if num_external_tokens and len(block_ids) == 1:
                size = self._geometry.groups[0].block_size
                num_external_tokens = len(block_ids[0]) * size - num_computed_tokens
            super().on_blocks_allocated(
                request, block_ids, num_computed_tokens, num_external_tokens
            )


# --- several ranks ---


@breaks("XFER-1", "one host memory for all ranks, as files without a rank", "UCM#1370")
class SharesHostMemoryOfRanks(Host):
    class worker(HostCacheWorker):
        memory: ClassVar[dict[tuple[int, ...], torch.Tensor]] = {}

        def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
            super().register_kv_caches(kv_caches)
            for number, host in enumerate(self.host):
                place = self.owner(), number, *host.shape
                self.host[number] = self.memory.setdefault(place, host)

        def owner(self) -> int:
            return 0


@breaks("CONN-3", "takes the page sizes of the first rank for those of all", "vllm#50821")
class TakesPagesOfTheFirstRank(Host):
    class worker(HostCacheWorker):
        page_bytes: ClassVar[dict[int, list[int]]] = {}

        def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
            super().register_kv_caches(kv_caches)
            if kv_caches.rank == 0:
                self.page_bytes[0] = [host.shape[1] for host in self.host]
            self.host = [
                torch.empty((self.cpu_blocks, size), dtype=torch.int8)
                for size in self.page_bytes[0]
            ]


@breaks("CONN-3", "only the first rank reports a job", "vllm#46106")
class ReportsOnTheFirstRank(Host):
    class worker(HostCacheWorker):
        def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
            super().register_kv_caches(kv_caches)
            self.rank = kv_caches.rank

        def get_finished(self) -> list[TransferResult]:
            finished = super().get_finished()
            return [] if self.rank else finished


@breaks("CONN-3", "a rank reports its jobs when rank 0 has ended them too", "vllm#58240")
class WaitsForTheFirstRank(Host):
    class worker(HostCacheWorker):
        ended: ClassVar[set[int]] = set()

        def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
            super().register_kv_caches(kv_caches)
            self.rank = kv_caches.rank
            if not self.rank:
                self.ended.clear()

        def get_finished(self) -> list[TransferResult]:
            finished = super().get_finished()
            if not self.rank:
                self.ended.update(result.job_id for result in finished)
                return finished
            self.finished = [result for result in finished if result.job_id not in self.ended]
            return [result for result in finished if result.job_id in self.ended]


@breaks("XFER-1", "all ranks but the first skip copies that it made", "LMCache#4463")
class CopiesOnOneRank(Host):
    class worker(HostCacheWorker):
        def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
            super().register_kv_caches(kv_caches)
            self.rank = kv_caches.rank

        def copy(self, job_id: int, *pages: Any) -> TransferResult:
            if self.rank and job_id % 2:
                return TransferResult(job_id, success=True)
            return super().copy(job_id, *pages)
