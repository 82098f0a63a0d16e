"""A strictly typed toy connector of a third party, for test_typing.py."""

from __future__ import annotations

from itertools import islice

import kvview
from kvview import (
    GPUBlockPoolView,
    GuardedView,
    RequestInfo,
    SchedulerConnector,
    StepInfo,
    StepPlan,
    make_offload_key,
)


class S(SchedulerConnector):
    view: GPUBlockPoolView

    def bind_gpu_block_pool_view(self, view: GPUBlockPoolView) -> None:
        self.view = view
        if isinstance(view, kvview.SupportsLeases):
            with view.lease([1], ttl=5.0) as lease:
                held: kvview.Lease = lease
                assert held.is_active

    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int | None:
        if isinstance(self.view, kvview.SupportsFindCachedBlock) and request.block_hashes:
            # The hash itself would be a type error, because it is not a key.
            self.view.find_cached_block(make_offload_key(request.block_hashes[0], 0))
        return 0

    def plan_step(self, step: StepInfo) -> StepPlan:
        for _, key in islice(self.view.iter_free_block_ids_with_hash(), 32):
            kvview.get_offload_group_idx(key)  # the walk yields offload keys (POOL-8)
        if isinstance(self.view, kvview.SupportsPinBudget):
            self.view.num_pinnable_blocks()
        return StepPlan()


def use(guard: GuardedView) -> int:
    guard.is_free(1)
    guard.block_keys([1])
    guard.give_back_blocks([])
    guard.free_blocks_with_notice([], print)
    guard.walk_free_blocks().take(1)
    leases: kvview.SupportsLeases = guard
    budget: kvview.SupportsPinBudget = guard
    lease: kvview.guard.GuardedLease = guard.lease([1])
    lease.release()
    leases.lease([1]).release()
    return guard.num_free_blocks() + budget.num_pinnable_blocks()


def store(manager: kvview.OffloadingManager, keys: list[kvview.OffloadKey]) -> list[int]:
    out = manager.prepare_store(keys, kvview.ReqContext())
    if out is not None and isinstance(out.store_spec, kvview.CPULoadStoreSpec):
        return list(out.store_spec.block_ids)
    return []
