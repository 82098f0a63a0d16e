"""The worker half of a connector: its hooks, in the order of their calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvview.connector.hooks import Hooked
from kvview.connector.plan import StepPlan
from kvview.transfer import CanonicalKVCaches, TransferResult


class WorkerConnector(Hooked):
    """Worker half of a connector, which moves the KV bytes.

    Every method has a default that does nothing.
    """

    def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
        """Receive the KV-cache tensors, once, before the first plan.

        Examples:
            Allocate a host page for each of 100 blocks of each tensor:

            >>> class Mine(WorkerConnector):
            ...     def register_kv_caches(self, kv_caches):
            ...         sizes = [tensor.page_size_bytes for tensor in kv_caches.tensors]
            ...         self.host = [bytearray(100 * size) for size in sizes]
            >>> (half := Mine()).register_kv_caches(kv_caches)
            >>> [len(pages) for pages in half.host]
            [400]
        """

    def start_plan(self, plan: StepPlan) -> None:
        """Start the jobs of one step, without waiting for them.

        Examples:
            Pass the jobs to a transfer worker, which copies them in the background:

            >>> class Mine(WorkerConnector):
            ...     def start_plan(self, plan):
            ...         for job in [*plan.loads, *plan.stores]:
            ...             worker.transfer_async(job.job_id, (job.src, job.dst))
            >>> Mine().start_plan(StepPlan(stores=[job]))
            >>> [result.job_id for result in worker.get_finished()]  # a small copy ends at once
            [7]
        """

    def get_finished(self) -> list[TransferResult]:
        """Return the results of jobs that ended since the last call; never blocks.

        Examples:
            Take the results to which a thread appends; single operations of a list need no lock:

            >>> class Mine(WorkerConnector):
            ...     done = [TransferResult(7, success=True)]  # by the thread
            ...     def get_finished(self):
            ...         return [self.done.pop(0) for _ in range(len(self.done))]
            >>> [result.job_id for result in Mine().get_finished()]
            [7]
        """
        return []

    def wait(self, job_ids: Sequence[int]) -> None:
        """Block until these jobs have ended; ``get_finished`` still returns their results.

        An engine whose loads end within the step calls it before the forward pass, and then calls
        ``get_finished`` until the loads are reported. So a half may leave it out if each call of
        ``get_finished`` ends all jobs whose compute has ended.

        Examples:
            Wait for a thread, and leave the results to ``get_finished``:

            >>> class Mine(WorkerConnector):
            ...     def wait(self, job_ids):
            ...         worker.wait(job_ids)
            >>> accepted = worker.transfer_async(7, (job.src, job.dst))
            >>> Mine().wait([7])
            >>> [result.job_id for result in worker.get_finished()]
            [7]
        """

    def shutdown(self) -> None:
        """Release memory; may be called twice, and without any call before if a start fails.

        Examples:
            End the threads of a transfer worker, which then refuses jobs:

            >>> class Mine(WorkerConnector):
            ...     def shutdown(self):
            ...         worker.shutdown()
            >>> Mine().shutdown()
            >>> worker.transfer_async(7, (job.src, job.dst))
            False
        """
