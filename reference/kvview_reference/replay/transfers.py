"""Transfers that all end before the next step, so that a replay does not depend on threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from kvview import CanonicalKVCaches, Connector, StepPlan, TransferResult, WorkerConnector


def end_each_step(connector: Connector) -> Connector:
    """Make the worker half of a connector report each transfer before the next step.

    Returns:
        The same object.
    """
    make_worker = connector.make_worker
    object.__setattr__(connector, "make_worker", lambda: _StepWorker(make_worker()))
    return connector


class _StepWorker(WorkerConnector):
    """Waits for the jobs of each plan, and reports them in the order of the plan."""

    def __init__(self, worker: WorkerConnector) -> None:
        self._worker = worker
        self._started: list[int] = []
        self._results: dict[int, TransferResult] = {}

    @override
    def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
        self._worker.register_kv_caches(kv_caches)

    @override
    def start_plan(self, plan: StepPlan) -> None:
        self._started += [job.job_id for job in (*plan.loads, *plan.stores)]
        self._worker.start_plan(plan)

    @override
    def get_finished(self) -> list[TransferResult]:
        if not self._started:
            return []
        self._take_results()
        if late := [job_id for job_id in self._started if job_id not in self._results]:
            self._worker.wait(late)
            self._take_results()
        ended = [job_id for job_id in self._started if job_id in self._results]
        self._started = [job_id for job_id in self._started if job_id not in self._results]
        return [self._results.pop(job_id) for job_id in ended]

    @override
    def wait(self, job_ids: Sequence[int]) -> None:
        pass  # the next get_finished has the results

    @override
    def shutdown(self) -> None:
        self._worker.shutdown()

    def _take_results(self) -> None:
        for result in self._worker.get_finished():
            self._results[result.job_id] = result
