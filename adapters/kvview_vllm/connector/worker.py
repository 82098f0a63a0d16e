"""The worker's side of ``KVViewConnector``: runs plans, reports how jobs ended.

- WORK-1 A request that loads **must** be named to the engine once, when all its
  loads have ended, failed ones included.
- WORK-2 A failed load **must** reach the engine in words that it has: block ids
  with one KV-cache group, request ids with several (0.30 and later). Where it has
  none, :class:`~kvview.ConnectorError` ends the worker; nothing is computed on
  bytes that never came.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kvview import ConnectorError, GPULoadStoreSpec, TransferJob, WorkerConnector
from kvview.connector.job_book import JobBook
from kvview_vllm.connector.messages import JobReport, KVViewMetadata
from kvview_vllm.releases import ConnectorSeam, reading
from kvview_vllm.transfer import canonical_kv_caches

_logger = logging.getLogger(__name__)


class WorkerSide:
    """One worker.

    Args:
        half: The connector's worker half.
        kv_cache_config: vLLM's ``KVCacheConfig``, None in 0.11.0.
        rank: Of this worker in its engine.
        release: How this vLLM is told of a failed load.
    """

    def __init__(
        self,
        half: WorkerConnector,
        kv_cache_config: Any | None,
        rank: int,
        release: ConnectorSeam,
    ) -> None:
        self._half = half
        self._kv_cache_config = kv_cache_config
        self._num_groups = len(kv_cache_config.kv_cache_groups) if kv_cache_config else 1
        self._rank = rank
        self._release = release
        self._owner = ""
        self._unacknowledged: dict[int, JobReport] = {}
        self._jobs = JobBook()
        self._loaded: set[str] = set()
        self._failed_requests: set[str] = set()
        self._failed_blocks: set[int] = set()

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Receive the tensors of all layers."""
        with reading("geometry", "the layout of the KV cache"):
            canonical = canonical_kv_caches(kv_caches, self._kv_cache_config)
        self._half.register_kv_caches(canonical)

    def start(self, metadata: KVViewMetadata) -> None:
        """Start the plan of one step."""
        self._owner = metadata.owner
        for job_id in metadata.acknowledged:
            self._unacknowledged.pop(job_id, None)
        plan = metadata.plan
        self._jobs.begin(plan)
        if plan:
            self._half.start_plan(plan)
        if metadata.wait_for_loads and plan.loads:
            self._half.wait([job.job_id for job in plan.loads])
            self.poll()
            late = [job.job_id for job in plan.loads if job.job_id not in self._unacknowledged]
            if late:
                raise ConnectorError(
                    f"WORK-1: {type(self._half).__name__}.wait returned before load jobs {late} "
                    f"were reported by get_finished, and the step computes on what they load"
                )
            self._loaded.clear()  # the engine waits for asynchronous loads only

    def poll(self) -> None:
        """Hear of jobs that ended."""
        for result in self._half.get_finished():
            if not self._jobs.awaits(result.job_id):
                _logger.warning(
                    "CONN-3: %s reported job %s, which is not in flight; nobody is told",
                    *(type(self._half).__name__, result.job_id),
                )
                continue
            self._unacknowledged[result.job_id] = JobReport(self._owner, self._rank, result)
            ended = self._jobs.end(result)
            if ended is None or not ended.is_load:
                continue
            if not result.success:
                self._say_failed(ended.job, result.error)
            if ended.is_last_load:
                self._loaded.add(ended.job.request_id or "")

    def take_loaded(self) -> set[str]:
        """Requests whose loads have all ended since the last call (WORK-1)."""
        loaded, self._loaded = self._loaded, set()
        return loaded

    def take_failed_requests(self) -> set[str]:
        """Those among them of which a load failed, where the engine asks for requests."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_failed_blocks(self) -> set[int]:
        """Blocks that were not loaded, where the engine asks for blocks."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def reports(self) -> list[JobReport]:
        """Reports that the scheduler's side has not acknowledged (MSG-1)."""
        return list(self._unacknowledged.values())

    def shutdown(self) -> None:
        """Release memory."""
        self._half.shutdown()

    def _say_failed(self, job: TransferJob, error: str | None) -> None:
        one_group = self._num_groups == 1
        target = job.dst if one_group and self._release.failed_blocks else None
        if isinstance(target, GPULoadStoreSpec):
            self._failed_blocks.update(target.block_ids)
        elif self._release.failed_requests:
            self._failed_requests.add(job.request_id or "")
        else:
            raise ConnectorError(
                f"WORK-2: load job {job.job_id} of request {job.request_id!r} failed ({error}), "
                f"and this vLLM cannot be told so with {self._num_groups} KV-cache groups: it "
                f"would compute on what was never loaded. Needs 0.11.1 with one group, 0.30 with "
                f"several"
            )
