"""The reference's suites and harnesses for the kit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from kvview import (
    CanonicalKVCaches,
    GPUBlockPoolView,
    GPUEvent,
    OffloadingManager,
    TransferWorker,
)
from kvview.testing import (
    Capability,
    OffloadingConformance,
    PoolConformance,
    TierConformance,
    TransferConformance,
)
from kvview_reference.free_queue import NULL_BLOCK_ID
from kvview_reference.offloading import CPUOffloadingManager
from kvview_reference.pool import BlockPool
from kvview_reference.tier import FileStore

if TYPE_CHECKING:
    from kvview_reference.transfer import CPUGPUTransferWorker

_BLOCK_SIZE = 16


class ReferenceEnginePool:
    """The block pool, a view of it, and the calls of an engine.

    Args:
        num_blocks: Number of blocks of the pool, including the null block.
        enable_events: Whether the pool emits events of its prefix cache.
    """

    pool_class: type[BlockPool] = BlockPool
    null_block_id = NULL_BLOCK_ID

    def __init__(self, num_blocks: int, *, enable_events: bool = False) -> None:
        self.pool = self.pool_class(num_blocks, enable_events=enable_events)
        self.view = self.make_view()

    def make_view(self) -> GPUBlockPoolView:
        """The view under test."""
        return self.pool.view("conformance")

    def another_view(self) -> GPUBlockPoolView:
        """Another view of the same pool."""
        return self.pool.view("another")

    def take_events(self) -> list[GPUEvent]:
        """The events of the prefix cache since the last call."""
        return self.pool.take_events()

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks for a request, one reference each; their hashes are evicted."""
        return self.pool.allocate_blocks(num_blocks)

    def release(self, block_ids: Sequence[int]) -> None:
        """Release a reference of the engine on each block; the first block is evicted first."""
        self.pool.free_blocks(block_ids)

    def share(self, block_ids: Sequence[int]) -> None:
        """Take another reference of the engine on each block, as for a request that hits it."""
        self.pool.touch_blocks(block_ids)

    def cache(
        self, block_ids: Sequence[int], block_hashes: Sequence[bytes], group_idx: int
    ) -> None:
        """Register full blocks in the prefix cache."""
        self.pool.cache_blocks(block_ids, block_hashes, block_size=_BLOCK_SIZE, group_idx=group_idx)

    def evict(self, block_ids: Sequence[int]) -> None:
        """Drop blocks from the prefix cache."""
        self.pool.evict_blocks(block_ids)

    def reset(self) -> bool:
        """Reset the prefix cache; return False if the pool refuses."""
        return self.pool.reset_prefix_cache()

    def close(self) -> Mapping[int, int]:
        """Close the view, as an engine does when it shuts down."""
        still_held: Mapping[int, int] = self.view.close()  # type: ignore[attr-defined]
        return still_held


class ReferencePool(PoolConformance):
    """The tests of the block pool and its own view."""

    engine_class: type[ReferenceEnginePool] = ReferenceEnginePool

    @override
    def make(self, num_blocks: int) -> ReferenceEnginePool:
        return self.engine_class(num_blocks)


class ReferenceManager(OffloadingConformance):
    """The offloading manager of a CPU tier, with the LRU policy."""

    lacks: ClassVar[Collection[str]] = ("arc",)
    policies = ("lru", "arc")
    policy = "lru"
    Manager: type[CPUOffloadingManager] = CPUOffloadingManager

    @override
    def make(self, capacity: int) -> OffloadingManager:
        return self.with_threshold(capacity, 1)

    def with_threshold(self, capacity: int, num_offers: int) -> OffloadingManager:
        """Make a manager that stores a key at a later offer."""
        return self.Manager(capacity, self.policy, enable_events=True, store_threshold=num_offers)

    def with_policy(self, name: str) -> OffloadingManager:
        """Make a manager with another policy."""
        return self.Manager(8, name)


class ReferenceARCManager(ReferenceManager):
    """The offloading manager of a CPU tier, with the ARC policy."""

    lacks = ("lru",)
    policy = "arc"


class PolicyManager(ReferenceManager):
    """The offloading manager with a user's policy, which need not be LRU or ARC."""

    lacks = ("lru", "arc", "policies")


class ReferenceTransfer(TransferConformance):
    """The tests of the CPU<->GPU worker over CPU tensors.

    The worker has the default settings, so it copies small jobs immediately, and large jobs on
    several threads.
    """

    lacks = frozenset({Capability.TIER_SPEC})
    worker: CPUGPUTransferWorker
    _gate = threading.Event()

    @override
    def make(
        self, kv_caches: CanonicalKVCaches[Any], num_cpu_blocks: int, blocks_per_chunk: int
    ) -> TransferWorker:
        from kvview_reference.transfer import CPUGPUTransferWorker

        return CPUGPUTransferWorker(kv_caches, num_cpu_blocks, blocks_per_chunk=blocks_per_chunk)

    def pause(self) -> None:
        """Keep copies from starting."""
        # All copies go through one queue, so a waiting copy delays all later ones.
        self._gate = threading.Event()
        copier: Any = self.worker._copier
        copier._last = copier._lane.submit(self._gate.wait)

    def resume(self) -> None:
        """Let copies start again."""
        self._gate.set()

    def fail_next(self) -> None:
        """Make the next copy fail."""
        self._free_tensors(lambda number: True)

    def fail_block(self, number: int) -> None:
        """Make the copy of one block fail."""
        self._free_tensors(lambda at: at == number)

    def _free_tensors(self, fails: Callable[[int], bool]) -> None:
        """Free the tensors of some blocks of the next job."""
        copier: Any = self.worker._copier
        submit = copier.submit

        def submit_one(job: Any) -> None:
            copier.submit = submit
            moves: list[Any] = []
            for group, blocks, rows in job.moves:
                freed = replace(group, addresses=group.addresses + 1)
                for at in range(len(blocks)):
                    one = freed if fails(len(moves)) else group
                    moves.append((one, blocks[at : at + 1], rows[at : at + 1]))
            submit(replace(job, moves=moves))

        copier.submit = submit_one


class Tier(TierConformance):
    """The tier of files."""

    store = FileStore
    options: ClassVar[Mapping[str, str]] = {"root": "{tmp}"}
