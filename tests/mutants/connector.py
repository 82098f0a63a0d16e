"""Wrong connectors: each a few lines over a right one, each tagged with the law it breaks.

They live over :class:`~kvview_reference.connector.OffloadConnector` (stores the blocks of
the last step, once), over the example (stores the blocks of a request when it ends), or over two
more right ones below: :class:`WalkingConnector` (stores the next victims of eviction) and
:class:`EagerConnector` (offers all blocks of a request in every step).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar, cast

from kvview import (
    BlockHash,
    BlockIds,
    CanonicalKVCaches,
    Connector,
    ConnectorConfig,
    FinishReason,
    FullBlock,
    GPUBlockPoolView,
    GPULoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    RequestInfo,
    SchedulerConnector,
    StepInfo,
    StepPlan,
    TransferJob,
    TransferResult,
    WorkerConnector,
    full_blocks,
    make_offload_key,
)
from kvview.testing import LawBroken, Mutant
from kvview.testing.connector import check_connector
from kvview.testing.connector.coverage import not_exercised
from kvview.testing.connector.generate import STEADY_PLACES
from kvview_reference.connector.offload import (
    OffloadConnector,
    OffloadOptions,
    OffloadScheduler,
    OffloadWorker,
    _Store,
)

SEEDS = 100
"""Seeds in which every one of them must show itself."""

STEADY_SEEDS = [hundred + place for hundred in (0, 100) for place in STEADY_PLACES]
"""Seeds of long runs."""

NOT_EXERCISED = "coverage"
"""In place of a law, for a connector that breaks none and does not do its work."""


@dataclass(frozen=True)
class ConnectorMutant(Mutant):
    """One wrong connector; its factory is the class."""

    seeds: Sequence[int] = range(SEEDS)

    def first_failure(self) -> LawBroken | None:
        """Simulate it, seed after seed, until its law is broken; otherwise another broken law."""
        connector = cast("type[Connector]", self.factory)
        broken: LawBroken | None = None
        coverage: Counter[str] = Counter()
        for seed in self.seeds:
            report = check_connector(connector, seeds=1, first_seed=seed, max_shrink_runs=0)
            coverage.update(report.coverage)
            for failure in report.failures:
                if broken is None or failure.law == self.law:
                    broken = LawBroken(
                        failure.law,
                        self.what,
                        got=failure.message,
                        expected="no law broken in any seed",
                        script=failure.script,
                    )
            if broken is not None and broken.law == self.law:
                return broken
        for gap in () if broken else not_exercised(coverage):
            return LawBroken(
                NOT_EXERCISED, self.what, got=str(gap), expected="it happens", script=""
            )
        return broken


Register = Callable[[type[Connector]], type[Connector]]


def breaker(mutants: list[Mutant], seeds: Sequence[int] = range(SEEDS)) -> Callable[..., Register]:
    """Makes the decorator that registers a class as wrong."""

    def breaks(law: str, what: str, incident: str | None = None) -> Register:
        def register(connector: type[Connector]) -> type[Connector]:
            played = range(8) if law == NOT_EXERCISED else seeds
            mutants.append(ConnectorMutant(connector, law, what, incident, seeds=played))
            return connector

        return register

    return breaks


MUTANTS: list[Mutant] = []
breaks = breaker(MUTANTS)


# --- over the default connector ---


class Offload(OffloadConnector):
    """The right one, with places to put wrong halves."""

    scheduler: ClassVar[type[OffloadScheduler]] = OffloadScheduler
    worker: ClassVar[type[OffloadWorker]] = OffloadWorker

    def make_scheduler(self) -> SchedulerConnector:
        return self.scheduler(self.config, self.options)

    def make_worker(self) -> WorkerConnector:
        return self.worker(self.options)


class WalkingScheduler(OffloadScheduler):
    """Stores the next victims of eviction, under every hash that they have."""

    def _plan_store(self, step: StepInfo) -> TransferJob | None:
        if self._view is None or not step.scheduled:
            return None
        items = islice(self._view.iter_free_block_ids_with_hash(), 8)
        blocks = [FullBlock(0, 0, block_id, key) for block_id, key in items]
        return self._store(blocks, self._room())

    def _let_go(self, blocks: Sequence[FullBlock], *, may_hold: bool) -> None:
        pass


class WalkingConnector(Offload):
    """The right one: looks at the next victims in every step."""

    scheduler = WalkingScheduler


@breaks("POOL-4", "touches a block with two hashes once, frees it twice", "vllm#42571")
class FreesDuplicates(WalkingConnector):
    class scheduler(WalkingScheduler):
        def bind_gpu_block_pool_view(self, view: GPUBlockPoolView) -> None:
            class Deduplicating:
                def __init__(self) -> None:
                    self.iter_free_block_ids_with_hash = view.iter_free_block_ids_with_hash
                    self.free_blocks = view.free_blocks

                def touch_blocks(self, block_ids: Sequence[int], /) -> None:
                    view.touch_blocks(list(set(block_ids)))

            super().bind_gpu_block_pool_view(Deduplicating())


@breaks("CONN-4", "touches a block with two hashes twice, frees it once")
class FreesASet(WalkingConnector):
    class scheduler(WalkingScheduler):
        def _free(self, block_ids: Sequence[int]) -> None:
            super()._free(list(set(block_ids)))


@breaks("CONN-3", "counts loads under way, and a failed one stays counted", "vllm#43742")
class CountsFailedLoads(Offload):
    class scheduler(OffloadScheduler):
        num_loading = 0

        def plan_step(self, step: StepInfo) -> StepPlan:
            plan = super().plan_step(step)
            self.num_loading += len(plan.loads)
            return plan

        def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
            self.num_loading -= sum(r.success for r in results if r.job_id in self._loads)
            super().on_transfers_finished(results)

        def has_pending_work(self) -> bool:
            return super().has_pending_work() or self.num_loading > 0


@breaks("CONN-4", "forgets the blocks of a store that failed")
class LeaksFailedStores(Offload):
    class scheduler(OffloadScheduler):
        def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
            for result in results:
                if not result.success and result.job_id in self._stores:
                    self._stores[result.job_id] = replace(self._stores[result.job_id], block_ids=())
            super().on_transfers_finished(results)


@breaks("CONN-4", "pins the blocks of a load, an abort forgets the pin", "ascend#16662")
class AbortLeaks(Offload):
    class scheduler(OffloadScheduler):
        def __init__(self, config: ConnectorConfig, options: OffloadOptions) -> None:
            super().__init__(config, options)
            self.pinned: dict[str, list[int]] = {}

        def on_blocks_allocated(
            self,
            request: RequestInfo,
            block_ids: BlockIds,
            num_computed_tokens: int,
            num_external_tokens: int,
        ) -> None:
            super().on_blocks_allocated(
                request, block_ids, num_computed_tokens, num_external_tokens
            )
            if num_external_tokens and self._view:
                pinned = [block for table in block_ids for block in table]
                self.pinned[request.request_id] = pinned
                self._view.touch_blocks(pinned)
                self.load_of = self._planned_loads[-1].job_id
                self.jobs = {**getattr(self, "jobs", {}), self.load_of: request.request_id}

        def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
            super().on_transfers_finished(results)
            for result in results:
                request_id = getattr(self, "jobs", {}).pop(result.job_id, "")
                self._free(self.pinned.pop(request_id, []))

        def on_request_finished(
            self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
        ) -> None:
            if reason is FinishReason.ABORTED:
                self.pinned.pop(request.request_id, None)


@breaks("CONN-6", "chooses blocks in one step, stores them unpinned in the next", "vllm#46951")
class StoresAStepLater(Offload):
    class scheduler(OffloadScheduler):
        chosen: TransferJob | None = None

        def _plan_store(self, step: StepInfo) -> TransferJob | None:
            ready, self.chosen = self.chosen, super()._plan_store(step)
            if self.chosen is not None:
                store = self._stores[self.chosen.job_id]
                self._free(store.block_ids)
                self._stores[self.chosen.job_id] = replace(store, block_ids=())
            return ready


@breaks("CONN-6", "releases the source blocks when the store is planned")
class FreesWhenPlanned(Offload):
    class scheduler(OffloadScheduler):
        def _plan_store(self, step: StepInfo) -> TransferJob | None:
            job = super()._plan_store(step)
            if job is not None:
                store = self._stores[job.job_id]
                self._free(store.block_ids)
                self._stores[job.job_id] = replace(store, block_ids=())
            return job


@breaks(NOT_EXERCISED, "looks keys up under a hash that nothing has", "vllm#53498")
class NeverHits(Offload):
    class scheduler(OffloadScheduler):
        def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int | None:
            stamped = [BlockHash(block_hash[::-1]) for block_hash in request.block_hashes]
            return super().match_prefix(replace(request, block_hashes=stamped), num_computed_tokens)


@breaks("CONN-2", "remembers a hit after the key was evicted", "vllm#42289")
class RemembersHits(Offload):
    class scheduler(OffloadScheduler):
        def __init__(self, config: ConnectorConfig, options: OffloadOptions) -> None:
            super().__init__(config, options)
            self.seen: set[OffloadKey] = set()
            lookup = self._manager.lookup

            def remembered(key: OffloadKey, ctx: ReqContext | None = None, /) -> LookupResult:
                result = LookupResult.HIT if key in self.seen else lookup(key)
                if result is LookupResult.HIT:
                    self.seen.add(key)
                return result

            def num_leading_hits(keys: Sequence[OffloadKey]) -> int:
                hits = [remembered(key) is LookupResult.HIT for key in keys]
                return [*hits, False].index(False)

            self._manager.lookup = remembered  # type: ignore[method-assign]
            self._manager.num_leading_hits = num_leading_hits  # type: ignore[method-assign]


@breaks("CONN-2", "promises blocks, not whole scheduler blocks, and the last token too")
class PromisesTheLastToken(Offload):
    class scheduler(OffloadScheduler):
        def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int | None:
            one_more = replace(request, num_tokens=request.num_tokens + 1)
            return super().match_prefix(one_more, num_computed_tokens)


@breaks("CONN-2", "loads blocks that hit on the GPU, which the host may not have", "vllm#43884")
class LoadsLocalHits(Offload):
    class scheduler(OffloadScheduler):
        def on_blocks_allocated(
            self,
            request: RequestInfo,
            block_ids: BlockIds,
            num_computed_tokens: int,
            num_external_tokens: int,
        ) -> None:
            num_tokens = num_computed_tokens + num_external_tokens
            super().on_blocks_allocated(
                request, block_ids, 0, num_tokens if num_external_tokens else 0
            )


@breaks("CONN-2", "plans the loads of a step only when nothing is computed in it")
class PlansLoadsLate(Offload):
    class scheduler(OffloadScheduler):
        def plan_step(self, step: StepInfo) -> StepPlan:
            plan = super().plan_step(step)
            if step.scheduled:
                self._planned_loads += plan.loads
                return StepPlan([], plan.stores)
            return plan


@breaks("CONN-4", "keeps every block that it sees, so that it is not evicted", "vllm#42085")
class PinsEverything(Offload):
    class scheduler(OffloadScheduler):
        def plan_step(self, step: StepInfo) -> StepPlan:
            plan = super().plan_step(step)
            if self._view is not None:
                self._view.touch_blocks(
                    [block for block, _ in self._view.iter_free_block_ids_with_hash()]
                )
            return plan


@breaks("CONN-3", "asserts at completion that the block is still the one found", "vllm#57505")
class AssertsTheHash(Offload):
    class scheduler(OffloadScheduler):
        def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
            view: Any = self._view
            for result in results:
                if store := self._stores.get(result.job_id):
                    for key, block in zip(store.keys, store.block_ids, strict=True):
                        assert view.find_cached_block(key) == block, "the block moved"
            super().on_transfers_finished(results)


@breaks("CONN-5", "one job id for all stores")
class OneStoreJobId(Offload):
    class scheduler(OffloadScheduler):
        def _plan_store(self, step: StepInfo) -> TransferJob | None:
            job = super()._plan_store(step)
            if job is None:
                return None
            self._stores[-1] = self._stores.pop(job.job_id)
            return replace(job, job_id=-1)


@breaks("CONN-4", "leaves the pins of stores in flight behind at shutdown")
class LeaksAtShutdown(Offload):
    class scheduler(OffloadScheduler):
        def shutdown(self) -> None:
            self._stores.clear()
            super().shutdown()


@breaks("EVENT-4", "takes a failed store for a successful one")
class AdvertisesFailedStores(Offload):
    class scheduler(OffloadScheduler):
        def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
            super().on_transfers_finished([replace(result, success=True) for result in results])


@breaks("EVENT-2", "advertises keys when their store starts", "vllm#57159")
class AdvertisesEarly(Offload):
    class scheduler(OffloadScheduler):
        early: tuple[OffloadingEvent, ...] = ()

        def _plan_store(self, step: StepInfo) -> TransferJob | None:
            job = super()._plan_store(step)
            if job is not None:
                keys = tuple(self._stores[job.job_id].keys)
                self.early += (OffloadingEvent(keys, "CPU", removed=False),)
            return job

        def take_events(self) -> Iterable[OffloadingEvent]:
            early, self.early = self.early, ()
            return (*early, *super().take_events())


@breaks("EVENT-1", "reports the removal of a key twice")
class RemovesTwice(Offload):
    class scheduler(OffloadScheduler):
        def take_events(self) -> Iterable[OffloadingEvent]:
            for event in super().take_events():
                yield event
                if event.removed:
                    yield event


@breaks("EVENT-5", "reports no removals at a reset")
class ResetsSilently(Offload):
    class scheduler(OffloadScheduler):
        before: tuple[OffloadingEvent, ...] = ()

        def reset_cache(self) -> bool:
            self.before = tuple(self.take_events())
            done = super().reset_cache()
            super().take_events()
            return done

        def take_events(self) -> Iterable[OffloadingEvent]:
            before, self.before = self.before, ()
            return (*before, *super().take_events())


@breaks("CONN-3", "looks up the hashes of blocks that a step in flight completes")
class LooksUpWhatItCounts(Offload):
    class scheduler(OffloadScheduler):
        def plan_step(self, step: StepInfo) -> StepPlan:
            size = self._geometry.hash_block_size
            for running in step.scheduled:
                end = running.num_computed_tokens + running.num_scheduled_tokens
                for number in range(running.num_computed_tokens // size, end // size):
                    assert running.request.block_hashes[number]
            return super().plan_step(step)


# --- worker halves ---


@breaks("XFER-1", "reports stores as done before another stream runs them", "vllm#45704")
class ReportsTooEarly(Offload):
    class worker(OffloadWorker):
        late: Sequence[TransferJob] = ()
        early: tuple[TransferResult, ...] = ()

        def start_plan(self, plan: StepPlan) -> None:
            super().start_plan(StepPlan(plan.loads, self.late))
            late_ids = {job.job_id for job in self.late}
            self.late = plan.stores
            results = [r for r in super().get_finished() if r.job_id not in late_ids]
            self.early += (*results, *(TransferResult(job.job_id, True) for job in self.late))

        def get_finished(self) -> list[TransferResult]:
            early, self.early = self.early, ()
            return list(early)


@breaks("CONN-3", "the fifth report of all never arrives", "ROCm/ATOM#2261")
class LosesAReport(Offload):
    class worker(OffloadWorker):
        num_reported = 0

        def get_finished(self) -> list[TransferResult]:
            results = super().get_finished()
            kept = [r for i, r in enumerate(results, self.num_reported) if i != 4]
            self.num_reported += len(results)
            return kept


@breaks("CONN-3", "reports the results of the last step once more")
class ReportsTwice(Offload):
    class worker(OffloadWorker):
        last: tuple[TransferResult, ...] = ()

        def get_finished(self) -> list[TransferResult]:
            again, self.last = self.last, tuple(super().get_finished())
            return [*again, *self.last]


@breaks("XFER-1", "copies the first layer only")
class CopiesOneLayer(Offload):
    class worker(OffloadWorker):
        def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
            refs = [group_refs[:1] for group_refs in kv_caches.group_data_refs]
            super().register_kv_caches(replace(kv_caches, group_data_refs=refs))


@breaks("XFER-2", "loads into another block than the one named")
class LoadsElsewhere(Offload):
    class worker(OffloadWorker):
        def start_plan(self, plan: StepPlan) -> None:
            super().start_plan(replace(plan, loads=[self.shifted(job) for job in plan.loads]))

        def shifted(self, job: TransferJob) -> TransferJob:
            assert isinstance(job.dst, GPULoadStoreSpec)
            ids = list(job.dst.block_ids)
            ids[-1] = next(block for block in range(ids[-1] - 1, -1, -1) if block not in ids)
            return replace(job, dst=replace(job.dst, block_ids=ids))


# --- over the eager connector ---


class EagerScheduler(OffloadScheduler):
    """Stores the blocks that earlier steps computed for the requests of this step."""

    null_block = 0

    def _plan_store(self, step: StepInfo) -> TransferJob | None:
        victims: dict[OffloadKey, int] = {}
        for scheduled in step.scheduled:
            for index, group in enumerate(self._geometry.groups):
                table = scheduled.block_ids[index]
                for number in range(self.num_ready_tokens(scheduled) // group.block_size):
                    key = self.key_of(scheduled.request, index, number)
                    if table[number] != self.null_block and key is not None:
                        victims.setdefault(key, table[number])
        return self.store(victims)

    def _let_go(self, blocks: Sequence[FullBlock], *, may_hold: bool) -> None:
        pass

    def num_ready_tokens(self, scheduled: Any) -> int:
        return int(scheduled.num_computed_tokens)

    def key_of(self, request: RequestInfo, group: int, number: int) -> OffloadKey | None:
        return self._geometry.block_key(request.block_hashes, group, number)

    def store(self, victims: dict[OffloadKey, int]) -> TransferJob | None:
        ctx = ReqContext()
        missing = [k for k in victims if self._manager.lookup(k, ctx) is LookupResult.MISS]
        output = self._manager.prepare_store(missing[: self._manager.num_blocks], ctx)
        if output is None or not output.keys_to_store:
            return None
        block_ids = [victims[key] for key in output.keys_to_store]
        self.hold(block_ids)
        job_id = next(self._job_ids)
        self._stores[job_id] = _Store(output.keys_to_store, block_ids)
        specs = self._by_group(output.keys_to_store, block_ids, output.store_spec)
        return TransferJob(job_id, *specs)

    def hold(self, block_ids: Sequence[int]) -> None:
        assert self._view is not None
        self._view.touch_blocks(block_ids)


class EagerConnector(Offload):
    """The right one: stores at once, holds until it is reported."""

    scheduler = EagerScheduler


@breaks(
    "CONN-6",
    "does not hold the blocks of a store, which its request loses when preempted",
    "vllm#52360",
)
class PreemptedWhileStored(EagerConnector):
    class scheduler(EagerScheduler):
        def hold(self, block_ids: Sequence[int]) -> None:
            pass

        def _free(self, block_ids: Sequence[int]) -> None:
            pass


@breaks("CONN-8", "stores blocks in the step that computes them")
class StoresTooEarly(EagerConnector):
    class scheduler(EagerScheduler):
        def num_ready_tokens(self, scheduled: Any) -> int:
            return int(scheduled.num_computed_tokens + scheduled.num_scheduled_tokens)


@breaks("CONN-8", "takes the tokens of a request for those that are computed")
class NamesByTokens(EagerConnector):
    class scheduler(EagerScheduler):
        def num_ready_tokens(self, scheduled: Any) -> int:
            groups = zip(self._geometry.groups, scheduled.block_ids, strict=True)
            room = min(len(table) * group.block_size for group, table in groups)
            return min(room, int(scheduled.request.num_tokens))


class AtTheEndScheduler(EagerScheduler):
    """Stores the blocks of requests when they end or are preempted."""

    def __init__(self, config: ConnectorConfig, options: OffloadOptions) -> None:
        super().__init__(config, options)
        self.ready: list[TransferJob] = []

    def num_stored_tokens(self, request: RequestInfo, block_ids: BlockIds) -> int:
        return request.num_computed_tokens

    def on_request_finished(
        self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
    ) -> None:
        self.on_request_preempted(request, block_ids)

    def on_request_preempted(self, request: RequestInfo, block_ids: BlockIds) -> None:
        num_tokens = self.num_stored_tokens(request, block_ids)
        counted = replace(request, num_computed_tokens=num_tokens)
        found = full_blocks(self._geometry, counted, block_ids)
        if job := self.store({block.key: block.block_id for block in found}):
            self.ready.append(job)

    def plan_step(self, step: StepInfo) -> StepPlan:
        loads, self._planned_loads = self._planned_loads, []
        stores, self.ready = self.ready, []
        return StepPlan(loads, stores)


class AtTheEnd(Offload):
    """The right one: stores the computed blocks when a request releases them."""

    scheduler = AtTheEndScheduler


@breaks("CONN-8", "counts a finished request's tokens: the last one was not computed")
class StoresTheLastToken(AtTheEnd):
    class scheduler(AtTheEndScheduler):
        def on_request_finished(
            self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
        ) -> None:
            request = replace(request, num_computed_tokens=request.num_tokens)
            super().on_request_finished(request, block_ids, reason)


@breaks("CONN-8", "stores the last block that is begun, under a name of its own")
class StoresThePartialBlock(AtTheEnd):
    class scheduler(AtTheEndScheduler):
        def num_stored_tokens(self, request: RequestInfo, block_ids: BlockIds) -> int:
            (size, *_) = (group.block_size for group in self._geometry.groups)
            number, is_begun = divmod(request.num_tokens, size)
            if is_begun and len(block_ids[0]) > number and block_ids[0][number]:
                hashed = BlockHash(request.request_id.encode() + bytes([number]))
                key = make_offload_key(hashed, 0)
                if job := self.store({key: block_ids[0][number]}):
                    self.ready.append(job)
            return request.num_computed_tokens


@breaks("XFER-1", "stores the null blocks of a block table too", "UCM#1053")
class StoresNullBlocks(EagerConnector):
    class scheduler(EagerScheduler):
        null_block = -1


@breaks("EVENT-2", "names a block by the hash at its start, not at its end")
class NamesTheBlockBefore(EagerConnector):
    class scheduler(EagerScheduler):
        def key_of(self, request: RequestInfo, group: int, number: int) -> OffloadKey | None:
            return super().key_of(request, group, max(0, number - 1))


@breaks("CONN-4", "pins of one life of a request id are lost with the next life", "vllm#46014")
class HoldsByRequest(EagerConnector):
    class scheduler(EagerScheduler):
        def __init__(self, config: ConnectorConfig, options: OffloadOptions) -> None:
            super().__init__(config, options)
            self.job_of: dict[str, int] = {}

        def plan_step(self, step: StepInfo) -> StepPlan:
            plan = super().plan_step(step)
            for scheduled in step.scheduled[:1]:
                for job in plan.stores:
                    old = self.job_of.get(scheduled.request.request_id)
                    self.job_of[scheduled.request.request_id] = job.job_id
                    if old in self._stores:
                        self._stores[old] = replace(self._stores[old], block_ids=())
            return plan
