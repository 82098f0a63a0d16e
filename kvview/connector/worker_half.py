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
        """Receive the KV-cache tensors, once, before the first plan."""

    def start_plan(self, plan: StepPlan) -> None:
        """Start the jobs of one step, without waiting for them."""

    def get_finished(self) -> list[TransferResult]:
        """Return the results of jobs that ended since the last call; never blocks."""
        return []

    def wait(self, job_ids: Sequence[int]) -> None:
        """Block until these jobs have ended; ``get_finished`` still returns their results."""

    def shutdown(self) -> None:
        """Release memory; may be called twice."""
