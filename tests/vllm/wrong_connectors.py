"""Wrong connectors, and right ones as a control, for real inference and for the kit alike.

Each is a small change to ``examples/host_cache.py`` and says in its docstring what is wrong.
They were drawn from the ways in which a connector can be wrong (names, geometry, lifetimes,
order, failures, resets, aborts, threads, processes), not from what the kit looks at; where a
fault is known to do no harm in an engine, it stays in the list. ``agreement.py`` serves with
each of them in vLLM, and asks the kit about it.

Their copies are late: those of a plan are run some steps later, unless somebody waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypeVar

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
ConnectorT = TypeVar("ConnectorT", bound=type[Connector])


def right(connector: ConnectorT) -> ConnectorT:
    """Add to the control."""
    RIGHT.append(connector)
    return connector


def wrong(connector: ConnectorT) -> ConnectorT:
    """Add to the list."""
    WRONG.append(connector)
    return connector


def why_not_shown(connector: type[Connector]) -> str:
    """The second paragraph: why an engine may not show it."""
    _, _, more = (connector.__doc__ or "").partition("\n\n")
    return " ".join(more.split())


def what_is_wrong(connector: type[Connector]) -> str:
    """The first line of its docstring."""
    return (connector.__doc__ or "").strip().partition("\n")[0].rstrip(".")


class LateWorker(HostCacheWorker):
    """Copies some polls after it was told to, or when it is waited for."""

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
    """All of a plan, loads first."""
    return [*plan.loads, *plan.stores]


@right
class Late(HostCacheConnector):
    """The example, with late copies."""

    scheduler: ClassVar[type[HostCacheScheduler]] = HostCacheScheduler
    worker: ClassVar[type[HostCacheWorker]] = LateWorker
    needs: ClassVar[Literal["", "processes", "async"]] = ""
    """How vLLM must run for it to show: workers of their own process, steps in flight."""

    def make_scheduler(self) -> SchedulerConnector:
        return self.scheduler(self.config, self.cpu_blocks)

    def make_worker(self) -> WorkerConnector:
        return self.worker(self.cpu_blocks)


class FlakyWorker(LateWorker):
    """Every third copy brings half of its pages, and says so."""

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
        return TransferResult(job_id, success=False, error="planted: every third copy fails")


@right
class Flaky(Late):
    """The example, with a medium that fails every third time."""

    worker = FlakyWorker


@right
class Offload(OffloadConnector):
    """The default connector."""


@right
class Lazy(LazyOffloadConnector):
    """The lazy connector."""


# --- names ---


class OneName(CacheGeometry):
    """Names the blocks of all groups as those of the first."""

    def block_key(
        self, block_hashes: Sequence[BlockHash], group_idx: int, block: int
    ) -> OffloadKey | None:
        key = super().block_key(block_hashes, group_idx, block)
        return key if key is None else make_offload_key(BlockHash(key[:-4]), 0)


@wrong
class KeyWithoutGroup(Late):
    """Names a block by its hash alone, in every group the same."""

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


@wrong
class NamesTheBlockBefore(Late):
    """Looks a block up by the hash at its start, not at its end."""

    class scheduler(HostCacheScheduler):
        def key(self, request: RequestInfo, group: int, block: int) -> OffloadKey:
            return super().key(request, group, max(0, block - 1))


@wrong
class ShortKeys(Late):
    """Looks up four bits of a hash: prompts that differ are the same to it."""

    class scheduler(HostCacheScheduler):
        def key(self, request: RequestInfo, group: int, block: int) -> OffloadKey:
            wanted = super().key(request, group, block)
            alike = (k for k in self.slots if k[0] >> 4 == wanted[0] >> 4 and k[-1] == wanted[-1])
            return wanted if wanted in self.slots else next(alike, wanted)


# --- what is computed ---


@wrong
class StoresTheLastToken(Late):
    """Stores the block whose last token was sampled and not computed."""

    class scheduler(HostCacheScheduler):
        def on_request_finished(
            self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
        ) -> None:
            computed = replace(request, num_computed_tokens=request.num_tokens)
            super().on_request_finished(computed, block_ids, reason)


@wrong
class StoresBeforeCompute(Late):
    """Stores prompt blocks in the step that computes them, with a copy at once.

    From 0.29 on, a plan starts when its step was launched.
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


@wrong
class CountsPromptAsComputed(Late):
    """At a preemption and an abort, stores all of the prompt, computed or not.

    vLLM gives a request blocks for what is scheduled only, so its table ends there.
    """

    class scheduler(HostCacheScheduler):
        def on_request_preempted(self, request: RequestInfo, block_ids: BlockIds) -> None:
            computed = replace(request, num_computed_tokens=request.num_tokens)
            super().on_request_preempted(computed, block_ids)

        def on_request_finished(
            self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
        ) -> None:
            if reason is FinishReason.ABORTED and any(block_ids):
                request = replace(request, num_computed_tokens=request.num_tokens)
            super().on_request_finished(request, block_ids, reason)


@wrong
class ReadsHashesOfTheStep(Late):
    """Takes the hash of every block that the step fills, there or not.

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


def edit_loads(
    half: HostCacheScheduler, edit: Callable[[GPULoadStoreSpec, list[int]], tuple[Any, Any]]
) -> None:
    """Change GPU blocks and host pages of the load that was planned last."""
    if half.planned_loads:
        job = half.planned_loads[-1]
        assert isinstance(job.dst, GPULoadStoreSpec)
        assert isinstance(job.src, CPULoadStoreSpec)
        target, pages = edit(job.dst, list(job.src.block_ids))
        half.planned_loads[-1] = replace(job, src=CPULoadStoreSpec(pages), dst=target)


class EditsLoads(HostCacheScheduler):
    """Plans a load and then changes it."""

    def on_blocks_allocated(
        self,
        request: RequestInfo,
        block_ids: BlockIds,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        super().on_blocks_allocated(request, block_ids, num_computed_tokens, num_external_tokens)
        if num_external_tokens:
            edit_loads(self, lambda target, pages: self.edit(target, pages, block_ids))

    def edit(
        self, target: GPULoadStoreSpec, pages: list[int], block_ids: BlockIds
    ) -> tuple[GPULoadStoreSpec, list[int]]:
        raise NotImplementedError

    @staticmethod
    def pick(target: GPULoadStoreSpec, pages: list[int], kept: list[list[int]]) -> Any:
        """Only some positions of each group."""
        ids, chosen, sizes, start = [], [], [], 0
        for size, numbers in zip(target.group_sizes, kept, strict=True):
            ids += [target.block_ids[start + number] for number in numbers]
            chosen += [pages[start + number] for number in numbers]
            sizes.append(len(numbers))
            start += size
        return GPULoadStoreSpec(ids, sizes, list(target.block_indices)), chosen


@wrong
class LeavesOutTheLastBlock(Late):
    """Loads one block less than it promised, at the end."""

    class scheduler(EditsLoads):
        def edit(self, target: GPULoadStoreSpec, pages: list[int], block_ids: BlockIds) -> Any:
            kept = [list(range(size))[: max(1, size - 1)] for size in target.group_sizes]
            return self.pick(target, pages, [k[:size] for k, size in zip(kept, target.group_sizes)])  # noqa: B905


@wrong
class LeavesOutTheFirstOfAWindow(Late):
    """Off by one in required_blocks: begins a window one block late."""

    class scheduler(EditsLoads):
        def edit(self, target: GPULoadStoreSpec, pages: list[int], block_ids: BlockIds) -> Any:
            kept = [
                list(range(size))[1 if first and size > 1 else 0 :]
                for first, size in zip(target.block_indices, target.group_sizes, strict=True)
            ]
            return self.pick(target, pages, kept)


@wrong
class LoadsIntoAnotherGroup(Late):
    """Takes the GPU blocks of the first group for those of every group."""

    class scheduler(EditsLoads):
        def edit(self, target: GPULoadStoreSpec, pages: list[int], block_ids: BlockIds) -> Any:
            ids: list[int] = []
            for first, size in zip(target.block_indices, target.group_sizes, strict=True):
                ids += block_ids[0][first : first + size]
            return replace(target, block_ids=ids), pages[: len(ids)]


@wrong
class LoadsBackwards(Late):
    """Pairs the pages with the blocks from the end."""

    class scheduler(EditsLoads):
        def edit(self, target: GPULoadStoreSpec, pages: list[int], block_ids: BlockIds) -> Any:
            return target, pages[::-1]


@wrong
class WindowAsFullAttention(Late):
    """Loads what a window has left behind too, where there are no blocks."""

    class scheduler(EditsLoads):
        def edit(self, target: GPULoadStoreSpec, pages: list[int], block_ids: BlockIds) -> Any:
            ids: list[int] = []
            sizes: list[int] = []
            more: list[int] = []
            start = 0
            for index, size in enumerate(target.group_sizes):
                end = target.block_indices[index] + size
                own = list(block_ids[index][:end])
                ids += own
                sizes.append(len(own))
                skipped = len(own) - size
                more += [*pages[start : start + 1] * skipped, *pages[start : start + size]]
                start += size
            return GPULoadStoreSpec(ids, sizes, [0] * len(sizes)), more


@wrong
class FullAttentionAsWindow(Late):
    """Loads the last two blocks of every group only."""

    class scheduler(EditsLoads):
        def edit(self, target: GPULoadStoreSpec, pages: list[int], block_ids: BlockIds) -> Any:
            return self.pick(target, pages, [list(range(n))[-2:] for n in target.group_sizes])


@wrong
class LoadsIntoHits(Late):
    """Loads a prompt from its first block, over what the GPU has.

    The bytes are the same; others may be reading them.
    """

    class scheduler(HostCacheScheduler):
        def on_blocks_allocated(
            self,
            request: RequestInfo,
            block_ids: BlockIds,
            num_computed_tokens: int,
            num_external_tokens: int,
        ) -> None:
            known = num_computed_tokens
            if num_external_tokens and self.has_all(request, num_computed_tokens):
                num_external_tokens, num_computed_tokens = num_external_tokens + known, 0
            super().on_blocks_allocated(
                request, block_ids, num_computed_tokens, num_external_tokens
            )

        def has_all(self, request: RequestInfo, num_tokens: int) -> bool:
            return all(
                self.key(request, index, block) in self.slots
                for index, group in enumerate(self.geometry.groups)
                for block in range(num_tokens // group.block_size)
            )


@wrong
class CopiesHalfTheLayers(Late):
    """Copies every second tensor."""

    class worker(LateWorker):
        def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
            super().register_kv_caches(kv_caches)
            self.gpu, self.host = self.gpu[::2], self.host[::2]


@wrong
class CopiesHalfAPage(Late):
    """Copies keys and no values: half of each page."""

    class worker(LateWorker):
        def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
            super().register_kv_caches(kv_caches)
            self.gpu = [tensor[:, : tensor.shape[1] // 2] for tensor in self.gpu]
            self.host = [tensor[:, : tensor.shape[1] // 2] for tensor in self.host]


@wrong
class InventsWhatAWindowLeft(Late):
    """Says of blocks that a window has left behind that it has them: in the page of another."""

    class scheduler(HostCacheScheduler):
        def store(self, request: RequestInfo, block_ids: BlockIds) -> None:
            before = len(self.planned_stores)
            super().store(request, block_ids)
            for job in self.planned_stores[before:]:
                assert isinstance(job.dst, CPULoadStoreSpec)
                slots, _ = self.stores[job.job_id]
                for index in range(len(self.geometry.groups)):
                    table = block_ids[index]
                    null = [number for number, block in enumerate(table) if not block]
                    for number in null:
                        key = self.geometry.block_key(request.block_hashes, index, number)
                        if key is not None and key not in self.slots:
                            slots[key] = next(iter(slots.values()))


@wrong
class PromisesTheLastToken(Late):
    """Promises the whole prompt, and leaves no token to compute."""

    class scheduler(HostCacheScheduler):
        def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int:
            longer = replace(request, num_tokens=request.num_tokens + 1)
            return super().match_prefix(longer, num_computed_tokens)


# --- lifetimes of GPU blocks ---


@wrong
class FreesAtPlan(Late):
    """Gives the hold of a store back when the store is planned."""

    class scheduler(HostCacheScheduler):
        def plan_step(self, step: StepInfo) -> StepPlan:
            for job in self.planned_stores:
                slots, gpu_blocks = self.stores[job.job_id]
                self.release(gpu_blocks)
                self.stores[job.job_id] = slots, []
            return super().plan_step(step)


@wrong
class NeverFrees(Late):
    """Holds what it has stored for ever."""

    class scheduler(HostCacheScheduler):
        def release(self, gpu_blocks: list[int]) -> None:
            pass


@wrong
class NeverFreesAfterFailure(Flaky):
    """Holds what it could not store for ever."""

    class scheduler(HostCacheScheduler):
        def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
            for result in results:
                if result.job_id in self.stores and not result.success:
                    self.stores[result.job_id][1].clear()
            super().on_transfers_finished(results)


@wrong
class FreesOfAborted(Late):
    """Frees the blocks of an aborted request, which the engine frees."""

    class scheduler(HostCacheScheduler):
        def on_request_finished(
            self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
        ) -> None:
            super().on_request_finished(request, block_ids, reason)
            if reason is FinishReason.ABORTED:
                self.release([block for table in block_ids for block in table if block])


@wrong
class FreesTwiceAtReset(Late):
    """A reset gives back what is in flight, and so does the report."""

    class scheduler(HostCacheScheduler):
        def reset_cache(self) -> bool:
            for _, gpu_blocks in self.stores.values():
                self.release(gpu_blocks)
            return super().reset_cache()


@wrong
class LeavesHoldsAtShutdown(Late):
    """Forgets at shutdown what it still holds."""

    class scheduler(HostCacheScheduler):
        def shutdown(self) -> None:
            self.stores.clear()
