"""The scheduler half of a connector: its hooks, in the order of their calls.

:mod:`kvview.connector.halves` lists the guarantees of the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol, runtime_checkable

from kvview.connector.hooks import Hooked
from kvview.connector.plan import StepPlan
from kvview.connector.request import BlockIds, RequestInfo, StepInfo
from kvview.events import OffloadingEvent
from kvview.pool import GPUBlockPoolView
from kvview.transfer import TransferResult


class FinishReason(Enum):
    """The reason why a request ended."""

    FINISHED = auto()
    ABORTED = auto()


@dataclass(frozen=True)
class EngineFacts:
    """Read-only facts of a started engine.

    Args:
        num_gpu_blocks: Blocks of the pool, the null block included.
        page_bytes: For each KV-cache group, bytes of one block over all its layers.
        max_blocks_per_step: Maximum number of blocks for the tokens computed in one step, without
            the blocks for loads.
    """

    num_gpu_blocks: int
    page_bytes: tuple[int, ...]
    max_blocks_per_step: int


class SchedulerConnector(Hooked):
    """Scheduler half of a connector. Every method has a default that does nothing."""

    def bind_gpu_block_pool_view(self, view: GPUBlockPoolView) -> None:
        """Receive the view of the pool, in the first call after construction (CONN-1).

        Args:
            view: The view, which is valid until the engine closes it (POOL-10).

        Examples:
            Use an optional method if the view of this engine has it:

            >>> class Mine(SchedulerConnector):
            ...     def bind_gpu_block_pool_view(self, view):
            ...         can_give_back = isinstance(view, SupportsGiveBack)
            ...         self.free = view.give_back_blocks if can_give_back else view.free_blocks
            >>> (half := Mine()).bind_gpu_block_pool_view(view)
            >>> half.free == view.give_back_blocks
            True
        """

    def on_engine_ready(self, facts: EngineFacts) -> None:
        """Receive the facts of the started engine, in the first call after the view was bound.

        Examples:
            Derive the number of blocks that stay free for the engine:

            >>> class Mine(SchedulerConnector):
            ...     def on_engine_ready(self, facts):
            ...         self.reserve = 4 * facts.max_blocks_per_step
            >>> half = Mine()
            >>> half.on_engine_ready(EngineFacts(1000, page_bytes=(4096,), max_blocks_per_step=8))
            >>> half.reserve
            32
        """

    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int | None:
        """Promise the number of tokens that can be loaded beyond the GPU's own hit.

        The engine may repeat the call, in this step or a later one, before it allocates blocks.

        Args:
            request: The request to be scheduled; it has no blocks yet.
            num_computed_tokens: Tokens that the GPU prefix cache already hits; the
                same as ``request.num_computed_tokens``.

        Returns:
            Tokens beyond ``num_computed_tokens``; the sum is a multiple of ``scheduler_block_size``
            and leaves at least one token to compute. None defers the request, so that the engine
            calls ``match_prefix`` again in a later step.

        Examples:
            Promise the leading blocks that the tier has, here two, of which the GPU has one:

            >>> class Mine(SchedulerConnector):
            ...     def match_prefix(self, request, num_computed_tokens):
            ...         hashes, limit = request.block_hashes, request.num_tokens - 1
            ...         in_tier = lambda *block: geometry.block_key(hashes, *block) in keys[:2]
            ...         return max(0, geometry.longest_prefix(limit, in_tier) - num_computed_tokens)
            >>> Mine().match_prefix(new_request, 16)
            16
        """
        return 0

    def on_blocks_allocated(
        self,
        request: RequestInfo,
        block_ids: BlockIds,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        """Receive the blocks of a request that starts, perhaps again, because its load failed.

        Args:
            request: The request.
            block_ids: The whole block table of the request, per group.
            num_computed_tokens: Tokens that the GPU prefix cache hit.
            num_external_tokens: Tokens to load directly after the GPU hit: the number that
                ``match_prefix`` promised, or 0 for no load. In each group, only the blocks that
                ``required_blocks`` returns for the sum of both numbers must be loaded.

        Examples:
            Note the blocks to load, which follow the blocks that the GPU has:

            >>> class Mine(SchedulerConnector):
            ...     def on_blocks_allocated(self, request, block_ids, num_computed, num_external):
            ...         self.to_load = block_ids[0][num_computed // 16 :][: num_external // 16]
            >>> half = Mine()
            >>> half.on_blocks_allocated(new_request, ([1, 5, 6, 7],), 16, 32)
            >>> half.to_load
            [5, 6]
        """

    def plan_step(self, step: StepInfo) -> StepPlan:
        """Return the jobs that the worker half starts in this step; called once per step.

        1. The plan must contain all loads of every request whose blocks were allocated
           with external tokens since the last plan; at least one, even if it reads no block.

        Examples:
            Pass each load on once, in the first plan after its blocks were allocated:

            >>> class Mine(SchedulerConnector):
            ...     loads = [TransferJob(8, job.dst, job.src, "r1")]  # by on_blocks_allocated
            ...     def plan_step(self, step):
            ...         loads, self.loads = self.loads, []
            ...         return StepPlan(loads=loads)
            >>> [job.request_id for job in Mine().plan_step(StepInfo()).loads]
            ['r1']
        """
        return StepPlan()

    def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
        """Receive the results of jobs, in order of completion (CONN-3).

        Examples:
            Release the blocks of a store when it has ended, even if it failed:

            >>> class Mine(SchedulerConnector):
            ...     stores = {7: [3, 2]}
            ...     def on_transfers_finished(self, results):
            ...         for result in results: view.free_blocks(self.stores.pop(result.job_id))
            >>> view.touch_blocks([3, 2])
            >>> Mine().on_transfers_finished([TransferResult(7, success=False)])
            >>> dict(view.held_blocks())
            {}
        """

    def on_request_preempted(self, request: RequestInfo, block_ids: BlockIds) -> None:
        """Handle a request that loses its blocks or has just lost them, and is restarted later.

        Args:
            request: The request; its blocks have the KV of ``num_computed_tokens`` tokens.
            block_ids: Block table of the request, per group, with the null block in place of each
                block that the request has already lost.

        Examples:
            Hold the full blocks that the request still has, so that they can be stored:

            >>> class Mine(SchedulerConnector):
            ...     def on_request_preempted(self, request, block_ids):
            ...         full = full_blocks(geometry, request, block_ids)
            ...         view.touch_blocks([block.block_id for block in full])
            >>> Mine().on_request_preempted(request, ([0, 2, 3, 4],))  # 0: the first block is lost
            >>> dict(view.held_blocks())
            {2: 1, 3: 1}
        """

    def on_request_finished(
        self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
    ) -> None:
        """Handle a request whose blocks are about to be freed; touch the blocks to keep.

        Args:
            request: The request; its blocks have the KV of ``num_computed_tokens`` tokens,
                which is less than ``num_tokens`` if a token was sampled.
            block_ids: Block table of the request, per group. If the request never had blocks, each
                group has an empty table, as in ``((),)``. Such a tuple counts as true in an ``if``,
                so test ``any(block_ids)``.
            reason: The reason why the request ended.

        Examples:
            Hold the full blocks that the tier does not have, because the engine is about to
            free them:

            >>> class Mine(SchedulerConnector):
            ...     def on_request_finished(self, request, block_ids, reason):
            ...         new = full_blocks(geometry, request, block_ids, first_token=16)
            ...         view.touch_blocks([block.block_id for block in new])
            >>> Mine().on_request_finished(request, ([1, 2, 3, 4],), FinishReason.FINISHED)
            >>> dict(view.held_blocks())  # block 1 was loaded, and block 4 is not full
            {2: 1, 3: 1}
        """

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events since the last call, in their order (EVENT-1 to EVENT-5).

        Examples:
            Advertise the keys of the stores that have ended since the last call:

            >>> class Mine(SchedulerConnector):
            ...     stored = keys[:2]  # filled by on_transfers_finished
            ...     def take_events(self):
            ...         stored, self.stored = self.stored, []
            ...         return [OffloadingEvent(stored, "DISK", removed=False)] if stored else []
            >>> [(event.medium, len(event.keys)) for event in Mine().take_events()]
            [('DISK', 2)]
        """
        return ()

    def has_pending_work(self) -> bool:
        """Return whether the engine must continue to step although no request is scheduled.

        Examples:
            Let the engine step until the last store is reported, so that its blocks become free:

            >>> class Mine(SchedulerConnector):
            ...     stores = {7: [3, 2]}  # until on_transfers_finished
            ...     def has_pending_work(self):
            ...         return bool(self.stores)
            >>> Mine().has_pending_work()
            True
        """
        return False

    def reset_cache(self) -> bool:
        """Drop all offloaded KV; returns False, and is called again, if this cannot be done now.

        Examples:
            Forget the tier after new weights, but not during a copy:

            >>> class Mine(SchedulerConnector):
            ...     tier, stores = {keys[0]: 5}, {7: [3, 2]}
            ...     def reset_cache(self):
            ...         if not self.stores: self.tier.clear()
            ...         return not self.stores
            >>> Mine().reset_cache()
            False
        """
        return True

    def shutdown(self) -> None:
        """Free every held block; may be called again, after the view was closed, or first of all.

        Examples:
            Release the blocks of stores that will no longer be reported:

            >>> class Mine(SchedulerConnector):
            ...     stores = {7: [3, 2]}
            ...     def shutdown(self):
            ...         while self.stores: view.free_blocks(self.stores.popitem()[1])
            >>> view.touch_blocks([3, 2])
            >>> Mine().shutdown()
            >>> dict(view.held_blocks())
            {}
        """


@runtime_checkable
class SupportsSkippedBlocks(Protocol):
    """A scheduler half that counts the blocks that it did not store, for the engine's metrics.

    Examples:
        Count the blocks that a full tier refuses:

        >>> class Mine(SchedulerConnector):
        ...     num_skipped_blocks = 0
        ...     def on_request_finished(self, request, block_ids, reason):
        ...         self.num_skipped_blocks += len([*full_blocks(geometry, request, block_ids)])
        >>> isinstance(Mine(), SupportsSkippedBlocks)  # so the engine exports the number
        True
    """

    num_skipped_blocks: int
    """Blocks since the start that could have been stored but were not, because the pin budget
    was used up, too few blocks were free, or the tier or a queue was full; once per attempt."""
