"""Several connectors that the simulated engine uses as one connector.

Each child is bound before any other call (vLLM #39654). The first child that promises a prefix
loads the prefix. Job ids are renumbered, so that the ids of two children cannot collide.

Source: ``vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py`` (0.33.0).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from typing_extensions import override

from kvview import (
    BlockIds,
    CanonicalKVCaches,
    Connector,
    ConnectorError,
    EngineFacts,
    FinishReason,
    GPUBlockPoolView,
    GuardedView,
    RequestInfo,
    SchedulerConnector,
    StepInfo,
    StepPlan,
    TransferJob,
    TransferResult,
    WorkerConnector,
)


class SideBySide(Connector):
    """A connector that combines several connectors that are already built.

    Args:
        children: The connectors, in order of preference for loads.
    """

    def __init__(self, children: Sequence[Connector]) -> None:
        super().__init__(children[0].config)
        self._children = children

    @override
    def make_scheduler(self) -> SchedulerConnector:
        return MultiScheduler([child.make_scheduler() for child in self._children])

    @override
    def make_worker(self) -> WorkerConnector:
        return MultiWorker([child.make_worker() for child in self._children])


@dataclass(frozen=True)
class MultiPlan(StepPlan):
    """The plans of the children, and the merged plan that the engine receives.

    Args:
        children: For each child, its plan, of any class, and a map from the child's job ids to the
            engine's job ids.
    """

    children: Sequence[tuple[StepPlan, Mapping[int, int]]] = ()


class MultiScheduler(SchedulerConnector):
    """The scheduler halves of the children.

    Args:
        children: Scheduler halves of the children, in order of preference for loads.
    """

    def __init__(self, children: Sequence[SchedulerConnector]) -> None:
        self._children = list(children)
        self._names = [f"{index}: {type(child).__name__}" for index, child in enumerate(children)]
        self._job_ids = count()
        self._jobs: dict[int, tuple[int, int]] = {}  # job id -> child, its own job id
        self._chosen: dict[str, int] = {}  # request -> child that promised

    @override
    def bind_gpu_block_pool_view(self, view: GPUBlockPoolView) -> None:
        # A guard for each child, so that no child can free blocks of another child.
        clock = (lambda: view.now()) if isinstance(view, GuardedView) else time.monotonic
        for child, name in zip(self._children, self._names, strict=True):
            child.bind_gpu_block_pool_view(GuardedView(view, owner=name, clock=clock))

    @override
    def on_engine_ready(self, facts: EngineFacts) -> None:
        self._each(lambda child: child.on_engine_ready(facts))

    @override
    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int | None:
        self._chosen.pop(request.request_id, None)
        for index, child in enumerate(self._children):
            num_tokens = child.match_prefix(request, num_computed_tokens)
            if num_tokens is None or num_tokens > 0:
                self._chosen[request.request_id] = index
                return num_tokens
        return 0

    @override
    def on_blocks_allocated(
        self,
        request: RequestInfo,
        block_ids: BlockIds,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        chosen = self._chosen.pop(request.request_id, None)
        for index, child in enumerate(self._children):
            external = num_external_tokens if index == chosen else 0
            child.on_blocks_allocated(request, block_ids, num_computed_tokens, external)

    @override
    def plan_step(self, step: StepInfo) -> StepPlan:
        plans: list[tuple[StepPlan, Mapping[int, int]]] = []
        loads: list[TransferJob] = []
        stores: list[TransferJob] = []
        for index, child in enumerate(self._children):
            plan = child.plan_step(step)
            job_ids: dict[int, int] = {}
            for jobs, all_jobs in ((plan.loads, loads), (plan.stores, stores)):
                for job in jobs:
                    job_id = job_ids[job.job_id] = next(self._job_ids)
                    self._jobs[job_id] = index, job.job_id
                    all_jobs.append(replace(job, job_id=job_id, owner=self._names[index]))
            plans.append((plan, job_ids))
        return MultiPlan(loads, stores, plans)

    @override
    def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
        per_child: defaultdict[int, list[TransferResult]] = defaultdict(list)
        for result in results:
            index, job_id = self._jobs.pop(result.job_id)
            per_child[index].append(replace(result, job_id=job_id))
        for index, own_results in per_child.items():
            self._children[index].on_transfers_finished(own_results)

    @override
    def on_request_preempted(self, request: RequestInfo, block_ids: BlockIds) -> None:
        self._each(lambda child: child.on_request_preempted(request, block_ids))

    @override
    def on_request_finished(
        self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
    ) -> None:
        self._chosen.pop(request.request_id, None)
        self._each(lambda child: child.on_request_finished(request, block_ids, reason))

    @override
    def has_pending_work(self) -> bool:
        return any(child.has_pending_work() for child in self._children)

    @override
    def reset_cache(self) -> bool:
        answers = [child.reset_cache() for child in self._children]  # each is asked
        return all(answers)

    @override
    def shutdown(self) -> None:
        self._each(lambda child: child.shutdown())

    def _each(self, call: Callable[[SchedulerConnector], None]) -> None:
        for child in self._children:
            call(child)


class MultiWorker(WorkerConnector):
    """The worker halves of the children.

    Args:
        children: Worker halves of the children, in the order of the scheduler halves.
    """

    def __init__(self, children: Sequence[WorkerConnector]) -> None:
        self._children = list(children)
        self._job_ids: list[dict[int, int]] = [{} for _ in children]  # own job id -> the engine's

    @override
    def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
        for child in self._children:
            child.register_kv_caches(kv_caches)

    @override
    def start_plan(self, plan: StepPlan) -> None:
        assert isinstance(plan, MultiPlan), "a MultiWorker runs the plans of a MultiScheduler"
        for child, job_ids, (own_plan, new_job_ids) in zip(
            self._children, self._job_ids, plan.children, strict=True
        ):
            job_ids.update(new_job_ids)
            if own_plan:
                child.start_plan(own_plan)

    @override
    def get_finished(self) -> list[TransferResult]:
        results = []
        for child, job_ids in zip(self._children, self._job_ids, strict=True):
            for result in child.get_finished():
                job_id = job_ids.pop(result.job_id, None)
                if job_id is None:
                    raise ConnectorError(
                        f"CONN-3: {type(child).__name__} reported its job {result.job_id}, "
                        f"which is not in flight"
                    )
                results.append(replace(result, job_id=job_id))
        return results

    @override
    def wait(self, job_ids: Sequence[int]) -> None:
        wanted = set(job_ids)
        for child, known in zip(self._children, self._job_ids, strict=True):
            child.wait([own for own, job_id in known.items() if job_id in wanted])

    @override
    def shutdown(self) -> None:
        for child in self._children:
            child.shutdown()
