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
        """

    def on_engine_ready(self, facts: EngineFacts) -> None:
        """Receive the facts of the started engine, in the first call after the view was bound."""

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
        """
        return 0

    def on_blocks_allocated(
        self,
        request: RequestInfo,
        block_ids: BlockIds,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        """Receive the blocks of a request that is about to start.

        Args:
            request: The request.
            block_ids: The whole block table of the request, per group.
            num_computed_tokens: Tokens that the GPU prefix cache hit.
            num_external_tokens: Tokens to load directly after the GPU hit, at most the number that
                ``match_prefix`` promised; 0 for no load. In each group, only the blocks that
                ``required_blocks`` returns for the sum of both numbers must be loaded.
        """

    def plan_step(self, step: StepInfo) -> StepPlan:
        """Return the jobs that the worker half starts in this step; called once per step.

        1. The plan must contain all loads of every request whose blocks were allocated
           with external tokens since the last plan.
        """
        return StepPlan()

    def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
        """Receive the results of jobs, in order of completion (CONN-3)."""

    def on_request_preempted(self, request: RequestInfo, block_ids: BlockIds) -> None:
        """Handle a request that loses its blocks or has just lost them, and is restarted later.

        Args:
            request: The request; its blocks have the KV of ``num_computed_tokens`` tokens.
            block_ids: Block table of the request, per group, with the null block in place of each
                block that the request has already lost.
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
        """

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events since the last call (EVENT-1 to EVENT-5)."""
        return ()

    def has_pending_work(self) -> bool:
        """Return whether the engine must continue to step although no request is scheduled."""
        return False

    def reset_cache(self) -> bool:
        """Drop all offloaded KV; returns False if the KV cannot be dropped now (CONN-11)."""
        return True

    def shutdown(self) -> None:
        """Free every held block; may be called twice."""


@runtime_checkable
class SupportsSkippedBlocks(Protocol):
    """A scheduler half that counts the blocks that it did not store, for the engine's metrics."""

    num_skipped_blocks: int
    """Blocks since the start that could have been stored but were not, because the pin budget
    was used up, too few blocks were free, or the tier was busy."""
