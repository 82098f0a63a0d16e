"""The worker's side of ``KVViewConnector``: runs plans, reports how jobs ended.

- WORK-1 A request that loads **must** be named to the engine once, when all its
  loads have ended, failed ones included.
- WORK-2 A failed load **must** reach the engine in words that it has: block ids
  with one KV-cache group, request ids with several (0.30 and later). Where it has
  none, :class:`~kvview.ConnectorError` ends the worker; nothing is computed on
  bytes that never came.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvview import ConnectorError, GPULoadStoreSpec, TransferJob, WorkerConnector
from kvview_vllm.connector.messages import JobReport, KVViewMetadata
from kvview_vllm.transfer import canonical_kv_caches


@dataclass
class _Load:
    jobs: dict[int, TransferJob] = field(default_factory=dict)
    failed: bool = False


class WorkerSide:
    """One worker.

    Args:
        half: The connector's worker half.
        kv_cache_config: vLLM's ``KVCacheConfig``, None in 0.11.0.
        rank: Of this worker in its engine.
        flags: What this vLLM's connector seam can do: how a failed load is said.
    """

    def __init__(
        self, half: WorkerConnector, kv_cache_config: Any | None, rank: int, flags: Collection[str]
    ) -> None:
        self._half = half
        self._kv_cache_config = kv_cache_config
        self._num_groups = len(kv_cache_config.kv_cache_groups) if kv_cache_config else 1
        self._rank = rank
        self._flags = flags
        self._owner = ""
        self._unacknowledged: dict[int, JobReport] = {}
        self._loads: dict[str, _Load] = {}
        self._request_of_job: dict[int, str] = {}
        self._loaded: set[str] = set()
        self._failed_requests: set[str] = set()
        self._failed_blocks: set[int] = set()

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Receive the tensors of all layers."""
        self._half.register_kv_caches(canonical_kv_caches(kv_caches, self._kv_cache_config))

    def start(self, metadata: KVViewMetadata) -> None:
        """Start the plan of one step."""
        self._owner = metadata.owner
        for job_id in metadata.acknowledged:
            self._unacknowledged.pop(job_id, None)
        plan = metadata.plan
        for job in plan.loads:
            request_id = job.request_id
            if request_id is not None:
                self._request_of_job[job.job_id] = request_id
                self._loads.setdefault(request_id, _Load()).jobs[job.job_id] = job
        if plan:
            self._half.start_plan(plan)
        if metadata.wait_for_loads and plan.loads:
            self._half.wait([job.job_id for job in plan.loads])
            self.poll()
            late = [job.job_id for job in plan.loads if job.job_id not in self._unacknowledged]
            if late:
                raise ConnectorError(
                    f"{type(self._half).__name__}.wait returned before load jobs {late} were "
                    f"reported by get_finished, and the step computes on what they load"
                )
            self._loaded.clear()  # the engine waits for asynchronous loads only

    def poll(self) -> None:
        """Hear of jobs that ended."""
        for result in self._half.get_finished():
            self._unacknowledged[result.job_id] = JobReport(self._owner, self._rank, result)
            request_id = self._request_of_job.pop(result.job_id, None)
            if request_id is None:
                continue
            load = self._loads[request_id]
            job = load.jobs.pop(result.job_id)
            if not result.success:
                load.failed = True
                self._say_failed(request_id, job, result.error)
            if not load.jobs:
                del self._loads[request_id]
                self._loaded.add(request_id)

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

    def _say_failed(self, request_id: str, job: TransferJob, error: str | None) -> None:
        target = job.dst if self._num_groups == 1 and "failed_blocks" in self._flags else None
        if isinstance(target, GPULoadStoreSpec):
            self._failed_blocks.update(target.block_ids)
        elif "failed_requests" in self._flags:
            self._failed_requests.add(request_id)
        else:
            raise ConnectorError(
                f"load job {job.job_id} of request {request_id!r} failed ({error}), and this vLLM "
                f"cannot be told so with {self._num_groups} KV-cache groups: it would compute on "
                f"what was never loaded. Needs 0.11.1 with one group, 0.30 with several"
            )
