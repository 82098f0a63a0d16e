"""The connector contract: two halves, one file, any engine.

The scheduler half lives where blocks are allocated: it holds the pool view,
answers what could be loaded, and plans transfers. The worker half lives where
the KV bytes are: it runs the plan. Both have a default for every method, so a
connector overrides what it needs, and a later release may add methods.

Laws: CONN-1 to CONN-13 in ``kvview/laws.toml``.

The engine, for its part: calls the scheduler half from one thread; runs loads
of a request before computing what follows them; never hands a block of an
unfinished load to anyone else; treats a failed load as not computed; and asks
``match_prefix`` again where something came between its answer and the blocks (CONN-2).

The life of a request is drawn in ``docs/life-of-a-request.md``.

Source: ``vllm/distributed/kv_transfer/kv_connector/v1/base.py`` (0.33.0), and
vLLM PRs #39654 (bind) and #41011 (engine facts for the scheduler half).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, ClassVar, Protocol, runtime_checkable

from kvview.connector.hooks import Hooked
from kvview.connector.plan import StepPlan
from kvview.connector.request import BlockIds, RequestInfo, StepInfo
from kvview.events import OffloadingEvent
from kvview.geometry import CacheGeometry
from kvview.pool import GPUBlockPoolView
from kvview.transfer import CanonicalKVCaches, TransferResult
from kvview.version import CONTRACT_VERSION


class FinishReason(Enum):
    """Why a request ended."""

    FINISHED = auto()
    ABORTED = auto()


@dataclass(frozen=True)
class ConnectorConfig:
    """What a connector is built from.

    Args:
        geometry: Block sizes and KV-cache groups of the engine.
        options: The user's settings for this connector, unchecked.
    """

    geometry: CacheGeometry
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineFacts:
    """Read-only facts of a started engine, beside the view.

    Args:
        num_gpu_blocks: Blocks of the pool, the null block included.
        page_bytes: Per KV-cache group, bytes of one block over all its layers.
        max_blocks_per_step: Blocks that the tokens computed in one step may need;
            blocks to load into come on top.
    """

    num_gpu_blocks: int
    page_bytes: tuple[int, ...]
    max_blocks_per_step: int


class SchedulerConnector(Hooked):
    """The half beside the scheduler. Every method has a default that does nothing."""

    def bind_gpu_block_pool_view(self, view: GPUBlockPoolView) -> None:
        """Receive the pool: the first event after construction (CONN-1).

        Args:
            view: Valid until the engine closes it (POOL-10).
        """

    def on_engine_ready(self, facts: EngineFacts) -> None:
        """Receive the facts of the started engine, right after the bind."""

    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int | None:
        """How much more of the prefix could be loaded than the GPU holds.

        May be asked again, in this step or a later one, before any blocks come.

        Args:
            request: The request to be scheduled; it has no blocks yet.
            num_computed_tokens: Tokens that the GPU prefix cache already hits; the
                same as ``request.num_computed_tokens``.

        Returns:
            Tokens beyond ``num_computed_tokens``; the sum is a multiple of
            ``scheduler_block_size`` and leaves at least one token to compute.
            None to be asked again in a later step.
        """
        return 0

    def on_blocks_allocated(
        self,
        request: RequestInfo,
        block_ids: BlockIds,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        """Blocks were allocated for a request that is about to start.

        Args:
            request: The request.
            block_ids: Its whole block table, per group.
            num_computed_tokens: Tokens that the GPU prefix cache hit.
            num_external_tokens: Tokens to load, right behind those: at most what
                ``match_prefix`` promised, 0 when nothing is to be loaded. Of each group
                the blocks of ``required_blocks`` of the sum are needed, no others.
        """

    def plan_step(self, step: StepInfo) -> StepPlan:
        """Say what the worker half does in this step; called once a step.

        1. Every request whose blocks were allocated with external tokens since
           the last plan must have all its loads in this one.
        """
        return StepPlan()

    def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
        """Hear how jobs ended, in order of completion (CONN-3)."""

    def on_request_preempted(self, request: RequestInfo, block_ids: BlockIds) -> None:
        """A request loses its blocks, or has just lost them; it comes back later.

        Args:
            request: The request; ``num_computed_tokens`` says how much KV its blocks have.
            block_ids: Its block table, per group; a block that is no longer its
                own is the null block here.
        """

    def on_request_finished(
        self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
    ) -> None:
        """A request is about to give its blocks back; touch what must stay.

        Args:
            request: The request; ``num_computed_tokens`` says how much KV its blocks have,
                which is less than ``num_tokens`` when a token was sampled.
            block_ids: Its block table, per group; empty when it never had blocks.
            reason: Whether it came to its end.
        """

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Events since the last call (EVENT-1 to EVENT-5)."""
        return ()

    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping although nothing is scheduled."""
        return False

    def reset_cache(self) -> bool:
        """Forget what was offloaded. False when it cannot be done now (CONN-11)."""
        return True

    def shutdown(self) -> None:
        """Release everything held; callable twice."""


@runtime_checkable
class SupportsSkippedBlocks(Protocol):
    """A scheduler half that counts what it did not store, for an engine's metrics."""

    num_skipped_blocks: int
    """Blocks since the start that could have been stored and were not: the pin budget was
    used up, too few blocks were free, or its tier was busy."""


class WorkerConnector(Hooked):
    """The half beside the KV bytes. Every method has a default that does nothing."""

    def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
        """Receive the KV-cache tensors, once, before the first plan."""

    def start_plan(self, plan: StepPlan) -> None:
        """Start the jobs of one step; must not wait for them."""

    def get_finished(self) -> list[TransferResult]:
        """Jobs that ended since the last call; never blocks."""
        return []

    def wait(self, job_ids: Sequence[int]) -> None:
        """Block until these jobs ended; their results still come by ``get_finished``."""

    def shutdown(self) -> None:
        """Release memory; callable twice."""


class Connector(Hooked):
    """What a target names: a class that builds the two halves.

    In one process or in two: each side builds its own instance from an equal
    configuration and asks it for its half.

    Args:
        config: Geometry and the user's options.

    Raises:
        ConfigError: An option is unknown or has an impossible value.
    """

    contract_version: ClassVar[str] = CONTRACT_VERSION
    """The version of the contract that the class was written to, "1.0" for example; an
    engine refuses one that this kvview does not keep. Left out: the installed one."""

    def __init__(self, config: ConnectorConfig) -> None:
        self.config = config

    def make_scheduler(self) -> SchedulerConnector:
        """Build the half beside the scheduler."""
        return SchedulerConnector()

    def make_worker(self) -> WorkerConnector:
        """Build the half beside the KV bytes."""
        return WorkerConnector()
