"""The reference's harnesses for the kit, as in ``kvview check kvview_reference.harness:pool``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kvview import (
    CacheGeometry,
    CacheGroup,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPUBlockPoolView,
    GPUEvent,
    GuardedView,
    OffloadingManager,
)
from kvview.testing import Capability, GatedComputeStream, GuardedStoreHarness, StoreHarness
from kvview_reference.free_queue import NULL_BLOCK_ID
from kvview_reference.geometry.coordinator import KVCacheCoordinator
from kvview_reference.offloading import CPUOffloadingManager
from kvview_reference.pool import BlockPool
from kvview_reference.tier import FileStore

if TYPE_CHECKING:
    from kvview.testing import (
        GeometryHarness,
        ManagerHarness,
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


class GuardedReferencePool(ReferencePool):
    """The block pool behind a guard, with a clock that only ``advance`` moves."""

    Guard: type[GuardedView] = GuardedView

    capabilities = ReferencePool.capabilities | {
        Capability.LEASES,
        Capability.LEAKS,
        Capability.PIN_BUDGET,
        Capability.GUARDS,
        Capability.STATS,
        Capability.TRACE,
        Capability.ENGINE_SIDE,
        Capability.ONE_THREAD,
    }

    def __init__(
        self, num_blocks: int = 24, pin_budget: float | None = None, trace: bool = False
    ) -> None:
        self.seconds = 0.0
        self.pin_budget = pin_budget
        self.trace = trace
        super().__init__(num_blocks)

    @override
    def make_view(self) -> GPUBlockPoolView:
        return self.Guard(
            super().make_view(),
            owner="conformance",
            pin_budget=self.pin_budget,
            clock=lambda: self.seconds,
            trace=self.trace,
        )

    def guard_over(self, view: GPUBlockPoolView, num_blocks: int | None) -> GuardedView:
        """A guard over a view of this kind."""
        budget = None if num_blocks is None else num_blocks / self.num_blocks
        return self.Guard(view, owner="another", pin_budget=budget, clock=lambda: self.seconds)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.seconds += seconds

    def budgeted(self, num_blocks: int) -> GuardedReferencePool:
        """A new harness whose guard has a budget."""
        return type(self)(self.num_blocks, pin_budget=num_blocks / self.num_blocks)

    def traced(self) -> GuardedReferencePool:
        """A new harness whose guard records the line that took each hold."""
        return type(self)(self.num_blocks, trace=True)


class ReferenceGeometry:
    """The coordinator of a geometry, over a block pool.

    Args:
        geometry: Block sizes and groups.
    """

    capabilities = frozenset(
        {
            Capability.SLIDING_WINDOW,
            Capability.CHUNKED_LOCAL,
            Capability.MAMBA,
            Capability.HYBRID,
            Capability.CACHING_OFF,
        }
    )
    null_block_id = NULL_BLOCK_ID
    num_blocks = 80

    def __init__(
        self, geometry: CacheGeometry | None = None, *, enable_caching: bool = True
    ) -> None:
        self.geometry = geometry or CacheGeometry.single(_BLOCK_SIZE)
        self.pool = BlockPool(self.num_blocks, enable_caching=enable_caching)
        self.coordinator = self.make_coordinator()

    def make_coordinator(self) -> KVCacheCoordinator:
        """The coordinator under test."""
        return KVCacheCoordinator(
            self.geometry.groups,
            self.pool,
            scheduler_block_size=self.geometry.scheduler_block_size,
            hash_block_size=self.geometry.hash_block_size,
        )

    def with_geometry(
        self, scheduler_block_size: int, hash_block_size: int, groups: Sequence[CacheGroup]
    ) -> ReferenceGeometry:
        """A new harness of another geometry; unless its sizes divide each other, raise (GEO-2)."""
        return type(self)(CacheGeometry(scheduler_block_size, hash_block_size, tuple(groups)))

    def without_caching(self) -> ReferenceGeometry:
        """A new harness of this geometry whose prefix cache is off."""
        return type(self)(self.geometry, enable_caching=False)

    def cache(self, block_hashes: Sequence[bytes], group_idx: int, block: int) -> int:
        """Cache only block number ``block`` of a request in a group, and return its id."""
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
        store_threshold: Number of offers that a key needs before it is stored.
    """

    Manager: type[CPUOffloadingManager] = CPUOffloadingManager
    policies = ("lru", "arc")

    def __init__(
        self, cache_policy: str = "lru", capacity: int = 12, store_threshold: int = 1
    ) -> None:
        self.cache_policy = cache_policy
        self.capacity = capacity
        self.store_threshold = store_threshold
        self.manager: OffloadingManager = self.with_policy(cache_policy)

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The capabilities of a manager, and of its policy."""
        has = {Capability.EVENTS, Capability.PAGES, Capability.RESETS, Capability.POLICIES}
        has |= {Capability.STORE_THRESHOLD, Capability.TIER_COUNTS, Capability.LEADING_HITS}
        has.add(Capability.SIZED)
        return frozenset(has | {Capability[self.cache_policy.upper()]})

    def with_policy(self, name: str) -> OffloadingManager:
        """A new manager with another policy."""
        threshold = self.store_threshold
        return self.Manager(self.capacity, name, enable_events=True, store_threshold=threshold)

    def sized(self, capacity: int) -> ReferenceManager:
        """A new harness whose manager holds this number of keys."""
        return type(self)(self.cache_policy, capacity, self.store_threshold)

    def with_threshold(self, num_offers: int) -> ReferenceManager:
        """A new harness whose manager stores a key after this number of offers."""
        return type(self)(self.cache_policy, self.capacity, num_offers)


class PolicyManager(ReferenceManager):
    """The offloading manager with a user's policy, which need not be LRU or ARC."""

    capabilities = frozenset(
        {
            Capability.EVENTS,
            Capability.PAGES,
            Capability.RESETS,
            Capability.SIZED,
            Capability.STORE_THRESHOLD,
        }
    )


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


def tier() -> StoreHarness:
    """The tier of files."""
    return StoreHarness(FileStore, {"root": "{tmp}"})


def guarded_tier() -> GuardedStoreHarness:
    """The tier of files behind a :class:`~kvview.tier.GuardedTier`."""
    return GuardedStoreHarness(FileStore, {"root": "{tmp}", "checksum": "none"})


if TYPE_CHECKING:

    def _fit() -> tuple[PoolHarness, GeometryHarness, ManagerHarness, TransferHarness, TierHarness]:
        return pool(), geometry(), offloading_lru(), transfer(), tier()
