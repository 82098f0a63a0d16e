"""The reference under the conformance kit: ``kvview check kvview_reference.harness:pool``."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvview import (
    CacheGeometry,
    CacheGroup,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPUBlockPoolView,
    GuardedView,
    OffloadingManager,
)
from kvview.testing.harness import Capability
from kvview_reference.geometry.coordinator import KVCacheCoordinator, make_coordinator
from kvview_reference.offloading import CPUOffloadingManager
from kvview_reference.pool import NULL_BLOCK_ID, BlockPool

if TYPE_CHECKING:
    from kvview.testing import GeometryHarness, ManagerHarness, PoolHarness, TransferHarness
    from kvview_reference.transfer import CPUGPUTransferWorker

_BLOCK_SIZE = 16


class ReferencePool:
    """The block pool, and a view of it.

    Args:
        num_blocks: Blocks in the pool, the null block included.
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
            Capability.RESUMABLE_WALK,
            Capability.REUSE_NOTICE,
            Capability.HOLDS,
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

    def allocate(self, num_blocks: int) -> list[int]:
        return self.pool.allocate_blocks(num_blocks)

    def release(self, block_ids: Sequence[int]) -> None:
        self.pool.free_blocks(block_ids)

    def cache(
        self, block_ids: Sequence[int], block_hashes: Sequence[bytes], group_idx: int
    ) -> None:
        self.pool.cache_blocks(block_ids, block_hashes, block_size=_BLOCK_SIZE, group_idx=group_idx)

    def evict(self, block_ids: Sequence[int]) -> None:
        self.pool.evict_blocks(block_ids)

    def reset(self) -> bool:
        return self.pool.reset_prefix_cache()

    def close(self) -> Mapping[int, int]:
        still_held: Mapping[int, int] = self.view.close()  # type: ignore[attr-defined]
        return still_held

    def sized(self, num_blocks: int) -> ReferencePool:
        return type(self)(num_blocks)


class GuardedReferencePool(ReferencePool):
    """The same pool behind a guard, with a clock that stands still until it is moved."""

    capabilities = ReferencePool.capabilities | {
        Capability.LEASES,
        Capability.PIN_BUDGET,
        Capability.ONE_THREAD,
    }

    def __init__(self, num_blocks: int = 24, pin_budget: float | None = None) -> None:
        self.seconds = 0.0
        self.pin_budget = pin_budget
        super().__init__(num_blocks)

    def make_view(self) -> GPUBlockPoolView:
        return GuardedView(
            super().make_view(),
            owner="conformance",
            pin_budget=self.pin_budget,
            clock=lambda: self.seconds,
        )

    def advance(self, seconds: float) -> None:
        self.seconds += seconds

    def budgeted(self, num_blocks: int) -> GuardedReferencePool:
        return type(self)(self.num_blocks, pin_budget=num_blocks / self.num_blocks)


class ReferenceGeometry:
    """The coordinator that fits a geometry, over a block pool.

    Args:
        geometry: Block sizes and groups.
    """

    capabilities = frozenset(
        {
            Capability.SLIDING_WINDOW,
            Capability.CHUNKED_LOCAL,
            Capability.MAMBA,
            Capability.HYBRID,
        }
    )
    null_block_id = NULL_BLOCK_ID
    num_blocks = 80

    def __init__(self, geometry: CacheGeometry | None = None) -> None:
        self.geometry = geometry or CacheGeometry.single(_BLOCK_SIZE)
        self.pool = BlockPool(self.num_blocks)
        self.coordinator = self.make_coordinator()

    def make_coordinator(self) -> KVCacheCoordinator:
        """The coordinator under test."""
        return make_coordinator(self.pool, self.geometry, enable_caching=True)

    def with_geometry(
        self, scheduler_block_size: int, hash_block_size: int, groups: Sequence[CacheGroup]
    ) -> ReferenceGeometry:
        return type(self)(CacheGeometry(scheduler_block_size, hash_block_size, tuple(groups)))

    def cache(self, block_hashes: Sequence[bytes], group_idx: int, block: int) -> int:
        blocks = self.pool.allocate_blocks(1)
        block_hash = block_hashes[self.geometry.block_hash_index(group_idx, block)]
        block_size = self.geometry.groups[group_idx].block_size
        self.pool.cache_blocks(blocks, [block_hash], block_size=block_size, group_idx=group_idx)
        self.pool.free_blocks(blocks)
        return blocks[0]


class ReferenceManager:
    """The offloading manager of a CPU tier.

    Args:
        cache_policy: Name of the policy.
        capacity: Keys that fit.
    """

    capabilities = frozenset(
        {Capability.EVENTS, Capability.PAGES, Capability.RESET, Capability.POLICIES}
    )
    policies = ("lru", "arc")

    def __init__(self, cache_policy: str = "lru", capacity: int = 12) -> None:
        self.capacity = capacity
        self.manager: OffloadingManager = self.with_policy(cache_policy)

    def with_policy(self, name: str) -> OffloadingManager:
        return CPUOffloadingManager(self.capacity, name, enable_events=True)


class ReferenceTransfer:
    """The CPU<->GPU worker over CPU tensors with padding, gaps and a shared tensor."""

    capabilities = frozenset({Capability.FAIL, Capability.PAUSE})
    num_cpu_blocks = 24
    blocks_per_chunk = 3
    num_blocks = 24

    def __init__(self) -> None:
        import torch

        rows = ((64, 0), (48, 16), (20, 5))  # bytes of a page, bytes to the next
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
            ],
        )
        self.worker = self.make_worker()
        self._gate: threading.Event | None = None

    def make_worker(self) -> CPUGPUTransferWorker:
        """The worker under test."""
        from kvview_reference.transfer import CPUGPUTransferWorker

        return CPUGPUTransferWorker(
            self.kv_caches,
            self.num_cpu_blocks,
            blocks_per_chunk=self.blocks_per_chunk,
            inline_bytes=0,
        )

    def pause(self) -> None:
        # All copies go through one lane: what waits in it holds back the rest.
        self._gate = threading.Event()
        self.worker._copier._lane.submit(self._gate.wait)  # type: ignore[attr-defined]

    def resume(self) -> None:
        assert self._gate is not None, "resume follows pause"
        self._gate.set()

    def fail_next(self) -> None:
        copier: Any = self.worker._copier
        copy = copier._copy

        def fail(*copies: Any) -> None:
            copier._copy = copy
            raise RuntimeError("the copy failed, as it was told to")

        copier._copy = fail


def pool() -> ReferencePool:
    """The block pool and its own view."""
    return ReferencePool()


def guarded_pool() -> GuardedReferencePool:
    """The block pool behind a :class:`~kvview.GuardedView`."""
    return GuardedReferencePool()


def geometry() -> ReferenceGeometry:
    """The coordinators, over the block pool."""
    return ReferenceGeometry()


def offloading_lru() -> ReferenceManager:
    """The CPU tier with the LRU policy."""
    return ReferenceManager("lru")


def offloading_arc() -> ReferenceManager:
    """The CPU tier with the ARC policy."""
    return ReferenceManager("arc")


def transfer() -> ReferenceTransfer:
    """The CPU<->GPU worker, on CPU tensors."""
    return ReferenceTransfer()


if TYPE_CHECKING:

    def _fit() -> tuple[PoolHarness, GeometryHarness, ManagerHarness, TransferHarness]:
        return pool(), geometry(), offloading_lru(), transfer()
