"""Watches the scheduler half of a connector: what it raises, promises and advertises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from inspect import getattr_static
from typing import Any, cast

from typing_extensions import override

from kvview import (
    BlockIds,
    CacheGeometry,
    EngineFacts,
    FinishReason,
    FullAttention,
    GPUBlockPoolView,
    GuardedView,
    OffloadingEvent,
    OffloadKey,
    RequestInfo,
    SchedulerConnector,
    StepInfo,
    StepPlan,
    SupportsFindCachedBlock,
    SupportsPinBudget,
    SupportsSilentTiers,
    SupportsSkippedBlocks,
    TransferResult,
    make_offload_key,
)
from kvview.testing.connector.coverage import rows_of
from kvview.testing.connector.faults import Flight
from kvview.testing.connector.hook_calls import hook, require_type
from kvview.testing.connector.invariants import (
    EventFold,
    InvariantBroken,
    check_advertised,
    check_promise,
    check_reset,
)

_LAW_OF_HOOK = {
    "make_scheduler": "CONN-1",
    "make_worker": "CONN-1",
    "bind_gpu_block_pool_view": "CONN-1",
    "on_engine_ready": "CONN-1",
    "match_prefix": "CONN-2",
    "on_blocks_allocated": "CONN-2",
    "plan_step": "CONN-3",
    "on_transfers_finished": "CONN-3",
    "has_pending_work": "CONN-3",
    "take_events": "EVENT-3",
}  # the others: CONN-4


class History:
    """What was stored, failed and advertised so far, and how often what happened.

    Args:
        geometry: Block sizes of the engine.
    """

    def __init__(self, geometry: CacheGeometry) -> None:
        self.geometry = geometry
        self.events = EventFold()
        self.stored: set[OffloadKey] = set()  # by stores reported as a success, since a reset
        self.failed: set[OffloadKey] = set()
        self._stored_whole: set[OffloadKey] = set()  # by jobs without a failure
        self._current: set[Flight] = set()  # begun since the last reset
        self.coverage: Counter[str] = Counter()
        self.num_tokens_to_load = 0
        self.was_full = False  # what was stored was let go, and came again
        self._rows = list(rows_of(geometry))
        self._loading: set[Flight] = set()
        self._gpu_hits: dict[str, str] = {}  # of requests that load
        # By request: what was promised since, and what was advertised then, None when the
        # tier that it comes from gives no events.
        self._promises: dict[str, tuple[list[OffloadKey], set[OffloadKey] | None]] = {}

    def on_started(self, flight: Flight) -> None:
        """Note the start of a job."""
        self._current.add(flight)
        if flight.is_load:
            self._loading.add(flight)

    def on_reported(self, flight: Flight, success: bool) -> None:
        """Note the end of a job; what a store from before a reset brings is not held (OFF-8)."""
        kind = "loads" if flight.is_load else "stores"
        self.coverage[kind if success else f"failed {kind}"] += 1
        if flight.is_load:
            if not success:
                self._count("failed", flight)
            elif flight.age > 1:
                self._count("late", flight)
            self._loading.discard(flight)
        elif flight in self._current:
            stored = flight.stored_keys
            # A key whose load failed is rightly let go; a part of a job, or a block with two
            # keys, may be stored again.
            whole = {keys[0] for keys in flight.keys_of.values() if len(keys) == 1}
            if success and not self.coverage["failed loads"]:
                self.was_full = self.was_full or bool(whole & self._stored_whole)
                self._stored_whole |= whole
            self.stored |= stored
            self.failed |= flight.keys - stored
        self._current.discard(flight)

    def _count(self, end: str, flight: Flight) -> None:
        """Count how a load ends, or what happens to it, in the table of coverage."""
        hit = self._gpu_hits.get(flight.job.request_id or "", "no-gpu-hit")
        self.coverage.update(f"loads/{row}/{hit}/{end}" for row in self._rows)

    def on_aborted(self, request_id: str) -> None:
        """A request ends early."""
        for flight in self._loading:
            if flight.job.request_id == request_id:
                self._count("aborted", flight)

    def on_reset_asked(self) -> None:
        """The caches are about to be reset, if the connector can."""
        self.coverage["resets with loads in flight"] += bool(self._loading)
        for flight in self._loading:
            self._count("reset", flight)

    def forget(self) -> None:
        """The caches were reset, which ends every promise (CONN-2)."""
        check_reset(self.events.advertised)
        self.stored.clear()
        self._stored_whole.clear()
        self.failed.clear()
        self._current.clear()
        self._promises.clear()

    def check(self) -> None:
        """What is advertised was stored."""
        check_advertised(self.events.advertised, self.stored, self.failed)

    def on_promise(
        self, request: RequestInfo, num_computed: int, num_promised: int, is_silent: bool = False
    ) -> None:
        """Check what ``match_prefix`` answered, perhaps for a tier that gives no events."""
        self.coverage["hits"] += num_promised > 0
        self.coverage["tokens asked about"] += request.num_tokens
        self.coverage["tokens hit on the GPU"] += num_computed
        self.coverage["tokens promised"] += num_promised
        num_tokens = num_computed + num_promised
        if num_tokens % self.geometry.scheduler_block_size or num_tokens >= request.num_tokens:
            return  # the engine says so
        promised = self._keys_to_load(request, num_computed, num_tokens)
        check_promise(request.request_id, promised, self.stored, None)
        advertised = None if is_silent else self.events.advertised
        self._promises[request.request_id] = promised, advertised

    def has_promise(self, request_id: str) -> bool:
        """Whether it was promised something since it got blocks last."""
        return bool(self._promises.get(request_id, ((), None))[0])

    def on_blocks_allocated(
        self, request_id: str, num_computed_tokens: int = 0, num_external_tokens: int = 0
    ) -> None:
        """The blocks of a promise came and its loads are planned: was it advertised?"""
        if num_external_tokens:
            self.num_tokens_to_load += num_external_tokens
            self._gpu_hits[request_id] = "gpu-hit" if num_computed_tokens else "no-gpu-hit"
        promised, advertised = self._promises.pop(request_id, ([], None))
        if self.events.num_events:
            check_promise(request_id, promised, self.stored, advertised)

    def _keys_to_load(
        self, request: RequestInfo, num_computed: int, num_tokens: int
    ) -> list[OffloadKey]:
        hashes, hash_index = request.block_hashes, self.geometry.block_hash_index
        return [
            make_offload_key(hashes[hash_index(index, block)], index)
            for index, group in enumerate(self.geometry.groups)
            for block in group.required_blocks(num_tokens)
            if block >= num_computed // group.block_size
        ]


class WatchedScheduler(SchedulerConnector):
    """Passes every call on; what is raised, and what is promised, is looked at.

    Args:
        inner: The real scheduler half.
        history: Where it is noted.
    """

    def __init__(self, inner: SchedulerConnector, history: History) -> None:
        self._inner = inner
        self._history = history
        self._view: GPUBlockPoolView | None = None
        self._untaken: list[OffloadingEvent] = []  # in the history, not with the engine
        self.unanswered: set[str] = set()  # requests that are to be asked about again
        self._promised_to: str | None = None  # until any other hook is called
        self.has_refused_reset = False  # the last one

    def _call(self, name: str, *args: Any) -> Any:
        if name != "take_events":
            self._promised_to = None
        with hook(name, _LAW_OF_HOOK.get(name, "CONN-4")):
            return getattr(self._inner, name)(*args)

    def fold_events(self) -> None:
        """Take the events so far into the history."""
        with hook("take_events", "EVENT-3"):  # it may be a generator
            events = list(self._call("take_events"))
            require_type("take_events", events, "EVENT-3")
            self._history.coverage["events"] += len(events)
        self._untaken += events
        self._history.events.apply(events)

    def expiring_blocks(self) -> Counter[int]:
        """References by block of its leases that have a deadline."""
        view = self._view
        if not isinstance(view, GuardedView):
            return Counter()
        deadlines = [entry for guard in view.guards() for entry in guard.deadlines]
        leases = {lease for _, _, lease in deadlines if lease.is_active}
        return Counter(block_id for lease in leases for block_id in lease.block_ids)

    @property
    def num_told_as_skipped(self) -> int | None:
        """What it counts as not stored; None when it does not count."""
        # Not by isinstance: to it a property that raises AttributeError is not there.
        if getattr_static(self._inner, "num_skipped_blocks", None) is None:
            return None
        with hook("num_skipped_blocks", "CONN-13"):
            return cast("SupportsSkippedBlocks", self._inner).num_skipped_blocks

    @override
    def bind_gpu_block_pool_view(self, view: GPUBlockPoolView) -> None:
        self._view = view
        self.asks_for_budget = False
        if isinstance(view, SupportsPinBudget):
            view.num_pinnable_blocks = self._note_asked(view.num_pinnable_blocks)  # type: ignore[method-assign]
        self._call("bind_gpu_block_pool_view", view)

    def _note_asked(self, ask: Callable[[], int]) -> Callable[[], int]:
        def num_pinnable_blocks() -> int:
            self.asks_for_budget = True
            return ask()

        return num_pinnable_blocks

    @override
    def on_engine_ready(self, facts: EngineFacts) -> None:
        self._call("on_engine_ready", facts)

    @override
    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int | None:
        answer: int | None = self._call("match_prefix", request, num_computed_tokens)
        if answer is None:
            self.unanswered.add(request.request_id)
            return None
        self.unanswered.discard(request.request_id)
        require_type("match_prefix", answer, "CONN-2")
        if not self._history.has_promise(request.request_id):  # else it may be asked again, later
            self._check_gpu_hit(request, num_computed_tokens)
        self.fold_events()
        self._history.on_promise(
            request, num_computed_tokens, answer, self._is_silent(request.request_id)
        )
        self._promised_to = request.request_id
        return answer

    def _check_gpu_hit(self, request: RequestInfo, num_computed_tokens: int) -> None:
        """The engine hits all that its own pool holds of a prefix: one group of full attention."""
        view, geometry = self._view, self._history.geometry
        is_one = len(geometry.groups) == 1 and isinstance(geometry.groups[0], FullAttention)
        if not is_one or not isinstance(view, SupportsFindCachedBlock):
            return

        def is_there(group: int, block: int) -> bool:
            key = geometry.block_key(request.block_hashes, group, block)
            return key is not None and view.find_cached_block(key) is not None

        longest = geometry.longest_prefix(request.num_tokens - 1, is_there)
        if num_computed_tokens != longest:
            raise InvariantBroken(
                "ENGINE",
                f"request {request.request_id!r} is said to hit {num_computed_tokens} tokens on "
                f"the GPU, and the pool holds {longest} of its {request.num_tokens}",
            )

    def _is_silent(self, request_id: str) -> bool:
        if not isinstance(self._inner, SupportsSilentTiers):
            return False
        with hook("comes_from_silent_tier", "EVENT-2"):
            return self._inner.comes_from_silent_tier(request_id)

    @override
    def on_blocks_allocated(
        self,
        request: RequestInfo,
        block_ids: BlockIds,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        if num_external_tokens and self._promised_to != request.request_id:
            raise InvariantBroken(
                "ENGINE",
                f"the blocks of a promise to request {request.request_id!r} come after other "
                f"calls: ask match_prefix again (CONN-2)",
            )
        self._call(
            "on_blocks_allocated", request, block_ids, num_computed_tokens, num_external_tokens
        )
        self._history.on_blocks_allocated(
            request.request_id, num_computed_tokens, num_external_tokens
        )

    @override
    def plan_step(self, step: StepInfo) -> StepPlan:
        plan: StepPlan = self._call("plan_step", step)
        require_type("plan_step", plan, "CONN-3")
        return plan

    @override
    def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
        self._call("on_transfers_finished", results)

    @override
    def on_request_preempted(self, request: RequestInfo, block_ids: BlockIds) -> None:
        self._call("on_request_preempted", request, block_ids)

    @override
    def on_request_finished(
        self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
    ) -> None:
        if reason is FinishReason.ABORTED:
            self._history.on_aborted(request.request_id)
        self._call("on_request_finished", request, block_ids, reason)

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        self.fold_events()
        events, self._untaken = self._untaken, []
        return events

    @override
    def has_pending_work(self) -> bool:
        with hook("has_pending_work", _LAW_OF_HOOK["has_pending_work"]):
            return bool(self._call("has_pending_work"))

    @override
    def reset_cache(self) -> bool:
        self._history.on_reset_asked()
        with hook("reset_cache", "CONN-4"):
            self.has_refused_reset = not self._call("reset_cache")
        if self.has_refused_reset:
            return False
        self.fold_events()
        self._history.forget()
        return True

    @override
    def shutdown(self) -> None:
        self._call("shutdown")
