"""The reference's suites and harnesses for the kit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
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
from kvview.testing import Capability, GatedComputeStream, PoolConformance, TierConformance
from kvview_reference.free_queue import NULL_BLOCK_ID
from kvview_reference.offloading import CPUOffloadingManager
from kvview_reference.pool import BlockPool
from kvview_reference.tier import FileStore

if TYPE_CHECKING:
    from kvview.testing import (
        ManagerHarness,
        TransferHarness,
    )
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

    def make_with_events(self, num_blocks: int) -> ReferenceEnginePool:
        """Make a pool that emits events."""
        return self.engine_class(num_blocks, enable_events=True)


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


def offloading_lru() -> ReferenceManager:
    """The CPU tier with the LRU policy."""
    return ReferenceManager("lru")


def offloading_arc() -> ReferenceManager:
    """The CPU tier with the ARC policy."""
    return ReferenceManager("arc")


def transfer() -> ReferenceTransfer:
    """The CPU<->GPU worker, on CPU tensors."""
    return ReferenceTransfer()


class Tier(TierConformance):
    """The tier of files."""

    store = FileStore
    options: ClassVar[Mapping[str, str]] = {"root": "{tmp}"}


if TYPE_CHECKING:

    def _fit() -> tuple[ManagerHarness, TransferHarness]:
        return offloading_lru(), transfer()
