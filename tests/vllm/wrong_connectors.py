"""Wrong connectors, and right ones as a control, for real inference and for the kit.

Each is a small change to ``examples/host_cache.py``. The first line of its docstring is the
mistake; a second paragraph is the reason why an engine may not show it. The mistakes cover the
ways in which a connector can be wrong (names, geometry, lifetimes, order, failures, resets,
aborts, threads, processes), independently of the checks of the kit. Mistakes that are known to do
no harm in an engine stay in the list. ``agreement.py`` serves with each connector in vLLM and
checks it with the kit.

Their copies are late: those of a plan run some steps later, unless a caller waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from examples.host_cache import HostCacheConnector, HostCacheScheduler, HostCacheWorker
from kvview import (
    BlockHash,
    BlockIds,
    CacheGeometry,
    CanonicalKVCaches,
    ComputeEvent,
    Connector,
    ConnectorConfig,
    CPULoadStoreSpec,
    FinishReason,
    GPULoadStoreSpec,
    OffloadKey,
    RequestInfo,
    SchedulerConnector,
    StepInfo,
    StepPlan,
    TransferJob,
    TransferResult,
    WorkerConnector,
    make_offload_key,
)
from kvview_reference.connector import LazyOffloadConnector, OffloadConnector

LATE_POLLS = 3

RIGHT: list[type[Connector]] = []
WRONG: list[type[Connector]] = []


class LateWorker(HostCacheWorker):
    """Copies some polls later, or when a caller waits."""

    def __init__(self, cpu_blocks: int) -> None:
        super().__init__(cpu_blocks)
        self.num_polls = 0
        self.queue: list[tuple[int, ComputeEvent | None, StepPlan]] = []  # one job each

    def start_plan(self, plan: StepPlan) -> None:
        due = self.num_polls + LATE_POLLS
        mark = self.compute.record_event() if self.compute else None
        self.queue += [(due, mark, StepPlan(loads=[job])) for job in plan.loads]
        self.queue += [(due, mark, StepPlan(stores=[job])) for job in plan.stores]

    def get_finished(self) -> list[TransferResult]:
        self.num_polls += 1
        self.copy_if(lambda due, plan: due <= self.num_polls)
        return super().get_finished()

    def wait(self, job_ids: Sequence[int]) -> None:
        self.copy_if(lambda due, plan: jobs_of(plan)[0].job_id in job_ids)

    def copy_if(self, is_due: Callable[[int, StepPlan], bool]) -> None:
        queue, self.queue = self.queue, []
        for due, mark, plan in queue:
            if is_due(due, plan) and (mark is None or mark.query()):
                self.copy_now(plan)
            else:
                self.queue.append((due, mark, plan))

    def copy_now(self, plan: StepPlan) -> None:
        self.started.append((None, plan))
        self.copy_started()

    def copy(
        self, job_id: int, src: Any, src_pages: list[Any], dst: Any, dst_pages: list[Any]
    ) -> TransferResult:
        try:
            return super().copy(job_id, src, src_pages, dst, dst_pages)
        except RuntimeError as error:
            return TransferResult(job_id, success=False, error=str(error))


def jobs_of(plan: StepPlan) -> list[TransferJob]:
    """Return all jobs of a plan, loads first."""
    return [*plan.loads, *plan.stores]


class Late(HostCacheConnector):
    """The example, with late copies. A subclass is wrong, unless it is defined as right."""

    scheduler: ClassVar[type[HostCacheScheduler]] = HostCacheScheduler
    worker: ClassVar[type[HostCacheWorker]] = LateWorker
    needs: ClassVar[Literal["", "processes", "async"]] = ""
    """How vLLM must run so that the mistake shows: workers in processes, or steps in flight."""

    def __init_subclass__(cls, *, is_right: bool = False) -> None:
        super().__init_subclass__()
        (RIGHT if is_right else WRONG).append(cls)

    def make_scheduler(self) -> SchedulerConnector:
        return self.scheduler(self.config, self.cpu_blocks)

    def make_worker(self) -> WorkerConnector:
        return self.worker(self.cpu_blocks)


class FlakyWorker(LateWorker):
    """Copies half of the pages in every third job, and reports that it failed."""

    def __init__(self, cpu_blocks: int) -> None:
        super().__init__(cpu_blocks)
        self.num_copies = 0

    def copy(
        self, job_id: int, src: Any, src_pages: list[Any], dst: Any, dst_pages: list[Any]
    ) -> TransferResult:
        self.num_copies += 1
        if self.num_copies % 3:
            return super().copy(job_id, src, src_pages, dst, dst_pages)
        for pages in dst_pages:
            for page in dst.block_ids[len(dst.block_ids) // 2 :]:
                pages[page].fill_(0x5A)
        return self.failed(job_id)

    def failed(self, job_id: int) -> TransferResult:
        return TransferResult(job_id, success=False, error="injected: every third copy fails")


class Flaky(Late, is_right=True):
    """The example, with a medium that fails every third time."""

    worker = FlakyWorker


class Offload(OffloadConnector):
    """The default connector."""


class Lazy(LazyOffloadConnector):
    """The lazy connector."""


RIGHT[:] = [Late, Flaky, Offload, Lazy]


# --- names ---


class OneName(CacheGeometry):
    """Names the blocks of all groups like those of the first."""

    def block_key(
        self, block_hashes: Sequence[BlockHash], group_idx: int, block: int
    ) -> OffloadKey | None:
        key = super().block_key(block_hashes, group_idx, block)
        return key if key is None else make_offload_key(BlockHash(key[:-4]), 0)


class KeyWithoutGroup(Late):
    """Names a block by its hash alone, the same in every group."""

    class scheduler(HostCacheScheduler):
        def __init__(self, config: ConnectorConfig, cpu_blocks: int) -> None:
            geometry = config.geometry
            one_name = OneName(
                geometry.scheduler_block_size, geometry.hash_block_size, geometry.groups
            )
            super().__init__(replace(config, geometry=one_name), cpu_blocks)

        def key(self, request: RequestInfo, group: int, block: int) -> OffloadKey:
            key = self.geometry.block_key(request.block_hashes, group, block)
            assert key is not None
            return key


class NamesTheBlockBefore(Late):
    """Looks a block up by the hash at its start, not at its end."""

    class scheduler(HostCacheScheduler):
        def key(self, request: RequestInfo, group: int, block: int) -> OffloadKey:
            return super().key(request, group, max(0, block - 1))


class ShortKeys(Late):
    """Looks up four bits of a hash, so that it confuses prompts."""

    class scheduler(HostCacheScheduler):
        def key(self, request: RequestInfo, group: int, block: int) -> OffloadKey:
            wanted = super().key(request, group, block)
            alike = (k for k in self.slots if k[0] >> 4 == wanted[0] >> 4 and k[-1] == wanted[-1])
            return wanted if wanted in self.slots else next(alike, wanted)


# --- computed tokens ---


class StoresTheLastToken(Late):
    """Stores the block whose last token was sampled and not computed."""

    class scheduler(HostCacheScheduler):
        def on_request_finished(self, request: RequestInfo, tables: BlockIds, reason: Any) -> None:
            computed = replace(request, num_computed_tokens=request.num_tokens)
            super().on_request_finished(computed, tables, reason)


class StoresBeforeCompute(Late):
    """Stores prompt blocks in the step that computes them, and copies at once.

    From 0.29 on, a plan starts after its step was launched.
    """

    worker = HostCacheWorker

    class scheduler(HostCacheScheduler):
        def plan_step(self, step: StepInfo) -> StepPlan:
            for each in step.scheduled:
                end = min(
                    each.num_computed_tokens + each.num_scheduled_tokens, each.request.num_tokens
                )
                self.num_reused.setdefault(each.request.request_id, 0)
                reused = self.num_reused[each.request.request_id]
                self.store(replace(each.request, num_computed_tokens=end), each.block_ids)
                self.num_reused[each.request.request_id] = reused
            return super().plan_step(step)


class CountsPromptAsComputed(Late):
    """Stores the whole prompt of a preempted or aborted request, computed or not.

    vLLM allocates blocks for scheduled tokens only, so the table ends there.
    """

    class scheduler(HostCacheScheduler):
        def on_request_preempted(self, request: RequestInfo, tables: BlockIds) -> None:
            computed = replace(request, num_computed_tokens=request.num_tokens)
            super().on_request_preempted(computed, tables)

        def on_request_finished(self, request: RequestInfo, tables: BlockIds, reason: Any) -> None:
            if reason is FinishReason.ABORTED and any(tables):
                request = replace(request, num_computed_tokens=request.num_tokens)
            super().on_request_finished(request, tables, reason)


class ReadsHashesOfTheStep(Late):
    """Reads the hash of every block that the step fills, whether it exists or not.

    On the CPU no step is ever in flight.
    """

    needs = "async"

    class scheduler(HostCacheScheduler):
        def plan_step(self, step: StepInfo) -> StepPlan:
            for each in step.scheduled:
                end = each.num_computed_tokens + each.num_scheduled_tokens
                for index, group in enumerate(self.geometry.groups):
                    for block in range(each.num_computed_tokens // group.block_size, end):
                        if (block + 1) * group.block_size <= end:
                            self.key(each.request, index, block)
            return super().plan_step(step)


# --- geometry ---


class EditsLoads(HostCacheScheduler):
    """Plans a load, and then changes its GPU blocks and host pages."""

    def on_blocks_allocated(self, request: RequestInfo, tables: BlockIds, *numbers: int) -> None:
        super().on_blocks_allocated(request, tables, *numbers)
        if numbers[1] and self.planned_loads:
            job = self.planned_loads[-1]
            assert isinstance(job.dst, GPULoadStoreSpec)
            assert isinstance(job.src, CPULoadStoreSpec)
            target, pages = self.edit(job.dst, list(job.src.block_ids), tables)
            self.planned_loads[-1] = replace(job, src=CPULoadStoreSpec(pages), dst=target)

    def edit(self, target: GPULoadStoreSpec, pages: list[int], tables: BlockIds) -> Any:
        raise NotImplementedError

    @staticmethod
    def pick(target: GPULoadStoreSpec, pages: list[int], kept: list[list[int]]) -> Any:
        """Return only some positions of each group."""
        ids, chosen, sizes, start = [], [], [], 0
        for size, numbers in zip(target.group_sizes, kept, strict=True):
            ids += [target.block_ids[start + number] for number in numbers]
            chosen += [pages[start + number] for number in numbers]
            sizes.append(len(numbers))
            start += size
        return GPULoadStoreSpec(ids, sizes, list(target.block_indices)), chosen


class SkipsTheLastBlock(Late):
    """Does not load the last block that it promised."""

    class scheduler(EditsLoads):
        def edit(self, target: GPULoadStoreSpec, pages: list[int], tables: BlockIds) -> Any:
            kept = [list(range(size))[: max(1, size - 1)] for size in target.group_sizes]
            return self.pick(target, pages, kept)


class SkipsTheFirstOfAWindow(Late):
    """Starts a window one block late: an error by one in required_blocks."""

    class scheduler(EditsLoads):
        def edit(self, target: GPULoadStoreSpec, pages: list[int], tables: BlockIds) -> Any:
            kept = [
                list(range(size))[1 if first and size > 1 else 0 :]
                for first, size in zip(target.block_indices, target.group_sizes, strict=True)
            ]
            return self.pick(target, pages, kept)


class LoadsIntoAnotherGroup(Late):
    """Loads every group into the GPU blocks of the first."""

    class scheduler(EditsLoads):
        def edit(self, target: GPULoadStoreSpec, pages: list[int], tables: BlockIds) -> Any:
            ids: list[int] = []
            for first, size in zip(target.block_indices, target.group_sizes, strict=True):
                ids += tables[0][first : first + size]
            return replace(target, block_ids=ids), pages[: len(ids)]


class LoadsBackwards(Late):
    """Pairs the pages with the blocks in reverse order."""

    class scheduler(EditsLoads):
        def edit(self, target: GPULoadStoreSpec, pages: list[int], tables: BlockIds) -> Any:
            return target, pages[::-1]


class WindowAsFullAttention(Late):
    """Loads the blocks before a window too, where the table has none."""

    class scheduler(EditsLoads):
        def edit(self, target: GPULoadStoreSpec, pages: list[int], tables: BlockIds) -> Any:
            ids: list[int] = []
            sizes: list[int] = []
            more: list[int] = []
            start = 0
            for index, size in enumerate(target.group_sizes):
                end = target.block_indices[index] + size
                own = list(tables[index][:end])
                ids += own
                sizes.append(len(own))
                skipped = len(own) - size
                more += [*pages[start : start + 1] * skipped, *pages[start : start + size]]
                start += size
            return GPULoadStoreSpec(ids, sizes, [0] * len(sizes)), more


class FullAttentionAsWindow(Late):
    """Loads only the last two blocks of every group."""

    class scheduler(EditsLoads):
        def edit(self, target: GPULoadStoreSpec, pages: list[int], tables: BlockIds) -> Any:
            return self.pick(target, pages, [list(range(n))[-2:] for n in target.group_sizes])


class LoadsIntoHits(Late):
    """Loads a prompt from its first block, over the blocks that the GPU hit.

    The bytes are the same, but other requests may be reading them.
    """

    class scheduler(HostCacheScheduler):
        def on_blocks_allocated(
            self, request: RequestInfo, tables: BlockIds, *numbers: int
        ) -> None:
            num_hit, num_loaded = numbers
            if num_loaded and self.has_all(request, num_hit):
                num_hit, num_loaded = 0, num_hit + num_loaded
            super().on_blocks_allocated(request, tables, num_hit, num_loaded)

        def has_all(self, request: RequestInfo, num_tokens: int) -> bool:
            return all(
                self.key(request, index, block) in self.slots
                for index, group in enumerate(self.geometry.groups)
                for block in range(num_tokens // group.block_size)
            )


class CopiesHalfTheLayers(Late):
    """Copies every second tensor."""

    class worker(LateWorker):
        def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
            super().register_kv_caches(kv_caches)
            self.gpu, self.host = self.gpu[::2], self.host[::2]


class CopiesHalfAPage(Late):
    """Copies half of each page: keys and no values."""

    class worker(LateWorker):
        def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
            super().register_kv_caches(kv_caches)
            self.gpu = [tensor[:, : tensor.shape[1] // 2] for tensor in self.gpu]
            self.host = [tensor[:, : tensor.shape[1] // 2] for tensor in self.host]


class InventsBlocksBeforeAWindow(Late):
    """Claims to have the blocks before a window, in the page of another block."""

    class scheduler(HostCacheScheduler):
        def store(self, request: RequestInfo, tables: BlockIds) -> None:
            before = len(self.planned_stores)
            super().store(request, tables)
            for job in self.planned_stores[before:]:
                assert isinstance(job.dst, CPULoadStoreSpec)
                slots, _ = self.stores[job.job_id]
                for index in range(len(self.geometry.groups)):
                    table = tables[index]
                    null = [number for number, block in enumerate(table) if not block]
                    for number in null:
                        key = self.geometry.block_key(request.block_hashes, index, number)
                        if key is not None and key not in self.slots:
                            slots[key] = next(iter(slots.values()))


class PromisesTheLastToken(Late):
    """Promises the whole prompt, so that no token is left to compute."""

    class scheduler(HostCacheScheduler):
        def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int:
            longer = replace(request, num_tokens=request.num_tokens + 1)
            return super().match_prefix(longer, num_computed_tokens)


# --- lifetimes of GPU blocks ---


class FreesAtPlan(Late):
    """Releases the hold of a store when the store is planned."""

    class scheduler(HostCacheScheduler):
        def plan_step(self, step: StepInfo) -> StepPlan:
            for job in self.planned_stores:
                slots, gpu_blocks = self.stores[job.job_id]
                self.release(gpu_blocks)
                self.stores[job.job_id] = slots, []
            return super().plan_step(step)


class NeverFrees(Late):
    """Holds the stored blocks forever."""

    class scheduler(HostCacheScheduler):
        def release(self, gpu_blocks: list[int]) -> None:
            pass


class NeverFreesAfterFailure(Flaky):
    """Holds the blocks of a failed store forever."""

    class scheduler(HostCacheScheduler):
        def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
            for result in results:
                if result.job_id in self.stores and not result.success:
                    self.stores[result.job_id][1].clear()
            super().on_transfers_finished(results)


class FreesOfAborted(Late):
    """Frees the blocks of an aborted request, which the engine frees too."""

    class scheduler(HostCacheScheduler):
        def on_request_finished(self, request: RequestInfo, tables: BlockIds, reason: Any) -> None:
            super().on_request_finished(request, tables, reason)
            if reason is FinishReason.ABORTED:
                self.release([block for table in tables for block in table if block])


class FreesTwiceAtReset(Late):
    """Releases the holds of jobs in flight at a reset, and again at their report."""

    class scheduler(HostCacheScheduler):
        def reset_cache(self) -> bool:
            for _, gpu_blocks in self.stores.values():
                self.release(gpu_blocks)
            return super().reset_cache()


class LeavesHoldsAtShutdown(Late):
    """Forgets its holds at shutdown."""

    class scheduler(HostCacheScheduler):
        def shutdown(self) -> None:
            self.stores.clear()
