"""The worker's side of ``KVViewConnector``: runs plans and reports the ends of jobs.

- WORK-1 A request that loads **must** be reported to the engine once, when all its loads have
  ended, including failed ones.
- WORK-2 A failed load **must** be reported to the engine in a form that it supports: block ids with
  one KV-cache group, request ids with several (0.30 and later). If the engine supports neither
  form, :class:`~kvview.ConnectorError` ends the worker, so that no step computes on bytes that were
  not loaded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvview import (
    ConnectorError,
    GPULoadStoreSpec,
    HookError,
    StepPlan,
    TransferJob,
    TransferResult,
    WorkerConnector,
)
from kvview.connector.job_tracker import JobTracker
from kvview_vllm.connector.containment import Faults
from kvview_vllm.connector.handoffs import WorkerWire
from kvview_vllm.connector.messages import JobReport, KVViewMetadata
from kvview_vllm.releases import ConnectorSeam, reading
from kvview_vllm.transfer import canonical_kv_caches

_logger = logging.getLogger(__name__)
_SECONDS_BETWEEN_STATS = 1.0
_SECONDS_BETWEEN_POLLS = 0.0002
_LONGEST_LOAD = 30.0  # seconds


class WorkerSide:
    """One worker.

    Args:
        half: The connector's worker half.
        kv_cache_config: vLLM's ``KVCacheConfig``, None in 0.11.0.
        rank: Rank of this worker in its engine.
        release: Flags of the release, such as the way in which a failed load is reported.
        faults: Records the faults of the half, and applies the failure policy.
        wire: The wire of a half with the hooks for handoffs.
    """

    def __init__(
        self,
        half: WorkerConnector,
        kv_cache_config: Any | None,
        rank: int,
        release: ConnectorSeam,
        faults: Faults,
        wire: WorkerWire | None = None,
    ) -> None:
        self._half = half
        self._kv_cache_config = kv_cache_config
        self._num_groups = len(kv_cache_config.kv_cache_groups) if kv_cache_config else 1
        self._rank = rank
        self._release = release
        self._faults = faults
        self._wire = wire
        self._owner = ""
        self._next_stats = 0.0
        self._unacknowledged: dict[int, JobReport] = {}
        self._jobs = JobTracker()
        self._loaded: set[str] = set()
        self._failed_requests: set[str] = set()
        self._failed_blocks: set[int] = set()

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Receive the tensors of all layers."""
        with reading("geometry", "the layout of the KV cache"):
            canonical = canonical_kv_caches(kv_caches, self._kv_cache_config)
            canonical = replace(canonical, rank=self._rank)
        try:
            self._half.register_kv_caches(canonical)
        except HookError as error:
            self._faults.on_fault(error, "it cannot start")

    def start(self, metadata: KVViewMetadata) -> None:
        """Start the plan of one step."""
        self._owner = metadata.owner
        if self._wire is not None:
            self._wire.bind(metadata.owner)
        for job_id in metadata.acknowledged:
            self._unacknowledged.pop(job_id, None)
        plan, lost = metadata.plan, metadata.lost
        self._jobs.begin(plan)
        if plan.loads or plan.stores or lost or metadata.acknowledged:
            self._next_stats = 0.0  # because the other side has new metrics
        if lost:
            self._jobs.begin(StepPlan(lost))
            self._lose(lost, "its promise has ended")
        if plan and not self._faults.is_out:
            try:
                self._half.start_plan(plan)
            except HookError as error:
                self._give_up(error)
        elif plan:
            self._lose((*plan.loads, *plan.stores))
        if metadata.wait_for_loads and (plan.loads or lost):
            job_ids = [job.job_id for job in plan.loads]
            if job_ids and not self._faults.is_out:
                try:
                    self._half.wait(job_ids)
                except HookError as error:
                    self._give_up(error)
            self._poll_until_loaded(job_ids)
            self._loaded.clear()  # because the engine waits for asynchronous loads only

    def _poll_until_loaded(self, job_ids: Sequence[int]) -> None:
        """Wait for loads whose bytes the step needs, also if ``wait`` of the half does nothing."""
        end = time.monotonic() + _LONGEST_LOAD
        self.poll()
        while late := [job_id for job_id in job_ids if job_id not in self._unacknowledged]:
            if time.monotonic() > end:
                raise ConnectorError(
                    f"WORK-1: connector {self._faults.target}: get_finished of "
                    f"{type(self._half).__name__} does not report load jobs {late} within "
                    f"{_LONGEST_LOAD:g} s, although the step computes on their bytes"
                )
            time.sleep(_SECONDS_BETWEEN_POLLS)
            self.poll()

    def wait_for_all(self) -> None:
        """Wait for all jobs in flight."""
        if in_flight := [job.job_id for job in self._jobs.jobs()]:
            try:
                self._half.wait(in_flight)
            except HookError as error:
                self._give_up(error)
            self.poll()

    def poll(self) -> None:
        """Take the results of ended jobs."""
        if self._faults.is_out:
            return
        try:
            self._take(self._half.get_finished())
        except HookError as error:
            self._give_up(error)

    def _give_up(self, error: HookError) -> None:
        """Stop calling the half, and report all its jobs as failed (FAULT-2, FAULT-3)."""
        loads = [job for job in self._jobs.jobs() if job.request_id is not None]
        why = f"load job {loads[0].job_id} of request {loads[0].request_id!r}" if loads else ""
        self._faults.on_fault(error, why and f"{why} may still write into the KV cache")
        self._lose(list(self._jobs.jobs()))

    def _lose(self, jobs: Iterable[TransferJob], why: str = "its connector has failed") -> None:
        self._take(TransferResult(job.job_id, success=False, error=why) for job in jobs)

    def _take(self, results: Iterable[TransferResult]) -> None:
        for result in results:
            if not self._jobs.awaits(result.job_id):
                _logger.warning(
                    "CONN-3: connector %s: %s reported job %s, which is not in flight, so the "
                    "report is dropped",
                    *(self._faults.target, type(self._half).__name__, result.job_id),
                )
                continue
            self._unacknowledged[result.job_id] = JobReport(self._owner, self._rank, result)
            ended = self._jobs.end(result)
            if ended is None or not ended.is_load:
                continue
            if not result.success:
                self._report_failed(ended.job, result.error)
            if ended.is_last_load:
                self._loaded.add(ended.job.request_id or "")

    def take_loaded(self) -> set[str]:
        """Return the requests whose loads have all ended since the last call (WORK-1)."""
        loaded, self._loaded = self._loaded, set()
        return loaded

    def take_failed_requests(self) -> set[str]:
        """Return the requests whose load failed since the last call, if the engine accepts ids."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks that were not loaded, for engines that accept block ids."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def reports(self) -> list[JobReport]:
        """Return the reports that the scheduler's side has not acknowledged (MSG-1)."""
        return list(self._unacknowledged.values())

    def is_stats_due(self) -> bool:
        """Whether stats are due, even if no value has changed."""
        now = time.monotonic()
        if now < self._next_stats:
            return False
        self._next_stats = now + _SECONDS_BETWEEN_STATS
        return True

    def shutdown(self) -> None:
        """Release memory."""
        try:
            self._half.shutdown()
        except HookError as error:
            self._faults.on_fault(error)
        finally:
            if self._wire is not None:
                self._wire.close()

    def _report_failed(self, job: TransferJob, error: str | None) -> None:
        one_group = self._num_groups == 1
        target = job.dst if one_group and self._release.failed_blocks else None
        if isinstance(target, GPULoadStoreSpec):
            self._failed_blocks.update(target.block_ids)
        elif self._release.failed_requests:
            self._failed_requests.add(job.request_id or "")
        else:
            raise ConnectorError(
                f"WORK-2: load job {job.job_id} of request {job.request_id!r} by connector "
                f"{self._faults.target} failed ({error}), but with {self._num_groups} KV-cache "
                f"groups this vLLM does not accept reports of failed loads and would compute on "
                f"bytes that were never loaded. Use 0.11.1 or later with one group, 0.30 or later "
                f"with several"
            )
