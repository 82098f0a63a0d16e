"""The reference's harnesses for the kit, as in ``kvview check kvview_reference.harness:pool``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from kvview import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPUBlockPoolView,
    GPUEvent,
    OffloadingManager,
)
from kvview.testing import Capability, GatedComputeStream, OffloadingConformance, StoreHarness
from kvview_reference.free_queue import NULL_BLOCK_ID
from kvview_reference.offloading import CPUOffloadingManager
from kvview_reference.pool import BlockPool
from kvview_reference.tier import FileStore

if TYPE_CHECKING:
    from kvview.testing import (
        PoolHarness,
        TierHarness,
        TransferHarness,
    )
    from kvview_reference.transfer import CPUGPUTransferWorker

_BLOCK_SIZE = 16


class ReferencePool:
    """The block pool, and a view of it.

    Args:
        num_blocks: Number of blocks of the pool, including the null block.
    """

    capabilities: frozenset[Capability] = frozenset(
        {
            Capability.CACHE,
            Capability.MANY_HASHES,
            Capability.EVICT,
            Capability.RESET,
            Capability.CLOSE,
            Capability.SIZED,
            Capability.POOL_SIZE,
            Capability.FREE_COUNT,
            Capability.IS_FREE,
            Capability.BLOCK_KEYS,
            Capability.FIND_CACHED,
            Capability.FREE_ORDER,
            Capability.GIVE_BACK,
            Capability.RESUMABLE_WALK,
            Capability.REUSE_NOTICE,
            Capability.HOLDS,
            Capability.VIEWS,
            Capability.SHARE,
            Capability.ENGINE_REFUSES,
            Capability.GPU_EVENTS,
        }
    )

    def __init__(self, num_blocks: int = 24) -> None:
        self.pool = BlockPool(num_blocks)
        self.num_blocks = num_blocks
        self.null_block_id: int | None = NULL_BLOCK_ID
        self.view = self.make_view()

    def make_view(self) -> GPUBlockPoolView:
        """The view under test."""
        return self.pool.view("conformance")

    def another_view(self) -> GPUBlockPoolView:
        """Another view of the same pool."""
        return self.pool.view("another")

    def telling(self) -> ReferencePool:
        """A new harness whose engine emits events of its prefix cache."""
        harness = type(self)(self.num_blocks)
        harness.pool = BlockPool(self.num_blocks, enable_events=True)
        harness.view = harness.make_view()
        return harness

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

    def sized(self, num_blocks: int) -> ReferencePool:
        """A new harness over a pool of another size."""
        return type(self)(num_blocks)


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

    lacks = ("lru", "arc", "policies", "tier_counts", "leading_hits")


class ReferenceTransfer:
    """The CPU<->GPU worker over CPU tensors with padding, gaps and a shared tensor.

    The worker has the default settings, so it copies small jobs immediately, jobs of the last group
    on one thread, and jobs of eight blocks on several threads.
    """

    capabilities = frozenset(
        {
            Capability.FAIL,
            Capability.PAUSE,
            Capability.FAIL_BLOCK,
            Capability.COMPUTE,
            Capability.COMPUTE_FAILS,
            Capability.WORKERS,
            Capability.HOST_BYTES,
        }
    )
    num_cpu_blocks = 24
    blocks_per_chunk = 3
    num_blocks = 72  # 18 blocks of the first group are 36 copies, too many to make one by one

    def __init__(self) -> None:
        import torch

        self._compute = GatedComputeStream()
        rows = ((64, 0), (48, 16), (20, 5), (150_000, 0))  # bytes of a page, bytes to the next
        tensors = []
        for page, gap in rows:
            storage = torch.zeros(32 + self.num_blocks * (page + gap) + 32, dtype=torch.int8)
            tensors.append(storage.as_strided((self.num_blocks, page), (page + gap, 1), 32))
        self.kv_caches: CanonicalKVCaches[Any] = CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, tensor.shape[1]) for tensor in tensors],
            [
                [CanonicalKVCacheRef(0, 64), CanonicalKVCacheRef(1, 40)],
                [CanonicalKVCacheRef(1, 48)],
                [CanonicalKVCacheRef(2, 20)],
                [CanonicalKVCacheRef(3, 149_000)],
            ],
            self._compute,
        )
        self.worker = self.make_worker()
        self.num_cpu_blocks = self.worker.num_cpu_blocks
        self.blocks_per_chunk = self.worker.blocks_per_chunk
        self._gate: threading.Event | None = None

    def make_worker(self) -> CPUGPUTransferWorker:
        """The worker under test."""
        from kvview_reference.transfer import CPUGPUTransferWorker

        return CPUGPUTransferWorker(
            self.kv_caches, self.num_cpu_blocks, blocks_per_chunk=self.blocks_per_chunk
        )

    def with_caches(
        self, kv_caches: CanonicalKVCaches[Any], num_cpu_blocks: int
    ) -> CPUGPUTransferWorker:
        """Another worker, over other KV caches."""
        return type(self.worker)(kv_caches, num_cpu_blocks)

    def pause(self) -> None:
        # All copies go through one queue, so a waiting copy delays all later ones.
        """Keep copies from starting."""
        self._gate = threading.Event()
        copier: Any = self.worker._copier
        copier._last = copier._lane.submit(self._gate.wait)

    def resume(self) -> None:
        """Let copies start again."""
        assert self._gate is not None, "resume follows pause"
        self._gate.set()

    def hold_compute(self) -> None:
        """Keep the compute stream busy."""
        self._compute.hold()

    def release_compute(self) -> None:
        """Let the work of the compute stream end."""
        self._compute.release()

    def fail_compute(self, when: str) -> None:
        """Make the compute stream raise an exception at the next job."""
        self._compute.fail(when)

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


def pool() -> ReferencePool:
    """The block pool and its own view."""
    return ReferencePool()


def transfer() -> ReferenceTransfer:
    """The CPU<->GPU worker, on CPU tensors."""
    return ReferenceTransfer()


def tier() -> StoreHarness:
    """The tier of files."""
    return StoreHarness(FileStore, {"root": "{tmp}"})


if TYPE_CHECKING:

    def _fit() -> tuple[PoolHarness, TransferHarness, TierHarness]:
        return pool(), transfer(), tier()
