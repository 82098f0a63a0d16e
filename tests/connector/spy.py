"""A child for multi-connectors that reports each call that is not passed on to it.

A missing call shows in none of the multi-connector's own results. So :class:`SpyConnector` is one
of its children, besides others that store and load. It stores nothing and promises nothing. It
holds a block of some requests that end for some steps, and its worker half keeps a thread until
shutdown.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from kvview import (
    BlockIds,
    CanonicalKVCaches,
    Connector,
    EngineFacts,
    FinishReason,
    GPUBlockPoolView,
    RequestInfo,
    SchedulerConnector,
    StepInfo,
    StepPlan,
    SupportsPinBudget,
    TransferResult,
    WorkerConnector,
)
from kvview.testing.connector.judge.invariants import InvariantBroken

_STEPS = 3  # for which a block of a request is held
_MOST_HELD = 2


class SpyConnector(Connector):
    """Raises the law that its multi-connector breaks."""

    @override
    def make_scheduler(self) -> SchedulerConnector:
        return SpyScheduler()

    @override
    def make_worker(self) -> WorkerConnector:
        return SpyWorker()


class SpyScheduler(SchedulerConnector):
    """Compares each call with the calls before it."""

    def __init__(self) -> None:
        self._view: GPUBlockPoolView | None = None
        self._facts: EngineFacts | None = None
        self._with_blocks: set[str] = set()
        self._running: set[str] = set()  # those whose loads, of any child, have ended
        self._held: list[list[int]] = []  # a block, and the steps until its release

    @override
    def bind_gpu_block_pool_view(self, view: GPUBlockPoolView) -> None:
        if self._view is not None or self._facts is not None:
            raise InvariantBroken("CONN-1", "a child is bound twice, or not first of all")
        self._view = view

    @override
    def on_engine_ready(self, facts: EngineFacts) -> None:
        if self._view is None or self._facts is not None:
            raise InvariantBroken(
                "CONN-1", "on_engine_ready of a child is called once, after the bind"
            )
        self._facts = facts

    def _check_ready(self, hook: str) -> None:
        if self._view is None or self._facts is None:
            missing = "bind_gpu_block_pool_view" if self._view is None else "on_engine_ready"
            raise InvariantBroken("CONN-1", f"{hook} of a child is called before {missing}")

    @override
    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int | None:
        self._check_ready("match_prefix")
        return 0

    @override
    def on_blocks_allocated(
        self,
        request: RequestInfo,
        block_ids: BlockIds,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        name = request.request_id
        if num_external_tokens:
            raise InvariantBroken(
                "CONN-2",
                f"a child that promised nothing is to load {num_external_tokens} tokens of "
                f"request {name!r}",
            )
        if name in self._running:
            raise InvariantBroken(
                "CONN-1",
                f"request {name!r} gets blocks again, and a child was not notified how it lost its "
                f"earlier ones: pass on_request_preempted and on_request_finished to each child",
            )
        self._with_blocks.add(name)

    @override
    def plan_step(self, step: StepInfo) -> StepPlan:
        self._check_ready("plan_step")
        for held in self._held:
            held[1] -= 1
        self._release(lambda steps: steps <= 0)
        for running in step.scheduled:
            name = running.request.request_id
            if name not in self._with_blocks:
                raise InvariantBroken(
                    "CONN-1",
                    f"request {name!r} is scheduled, and a child was not notified of its blocks: "
                    f"pass on_blocks_allocated to each child",
                )
            self._running.add(name)
        return StepPlan()

    @override
    def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
        if results:
            raise InvariantBroken("CONN-3", f"a child without jobs receives {list(results)}")

    @override
    def on_request_preempted(self, request: RequestInfo, block_ids: BlockIds) -> None:
        self._forget(request)

    def _forget(self, request: RequestInfo) -> None:
        self._with_blocks.discard(request.request_id)
        self._running.discard(request.request_id)

    @override
    def on_request_finished(
        self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
    ) -> None:
        self._forget(request)
        view = self._view
        blocks = [block for table in block_ids for block in table]
        if isinstance(view, SupportsPinBudget) and not view.num_pinnable_blocks():
            return
        if blocks and view is not None and len(self._held) < _MOST_HELD:
            view.touch_blocks(blocks[-1:])
            self._held.append([blocks[-1], _STEPS])

    @override
    def has_pending_work(self) -> bool:
        return bool(self._held)

    @override
    def shutdown(self) -> None:
        self._release(lambda steps: True)

    def _release(self, is_due: Callable[[int], bool]) -> None:
        due = [block for block, steps in self._held if is_due(steps)]
        if due and self._view is not None:
            self._view.free_blocks(due)
        self._held = [held for held in self._held if not is_due(held[1])]


class SpyWorker(WorkerConnector):
    """Keeps a thread from its registration to its shutdown."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    @override
    def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
        if self._thread is not None:
            raise InvariantBroken("CONN-1", "register_kv_caches of a child is called once")
        self._thread = threading.Thread(target=self._is_over.wait, name="spy", daemon=True)
        self._thread.start()

    @override
    def start_plan(self, plan: StepPlan) -> None:
        if self._thread is None or plan.loads or plan.stores:
            raise InvariantBroken(
                "CONN-3",
                "a child gets its own plan, after register_kv_caches; this one has no jobs",
            )

    @override
    def shutdown(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
