"""The jobs in flight of one connector, from the plan to the report of the last worker.

Laws: CONN-2, CONN-3 and CONN-5.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvview.connector.plan import StepPlan, TransferJob
from kvview.connector.request import RequestInfo
from kvview.errors import ConnectorError
from kvview.geometry import CacheGeometry
from kvview.transfer import TransferResult


def check_promise(
    geometry: CacheGeometry, request: RequestInfo, num_computed_tokens: int, num_tokens: int
) -> None:
    """Check the return value of ``match_prefix``.

    Raises:
        ConnectorError: The prefix ends inside a block, or leaves no token to compute (CONN-2).
    """
    end = num_computed_tokens + num_tokens
    alignment = geometry.scheduler_block_size
    if num_tokens < 0 or (num_tokens and end % alignment) or end >= request.num_tokens:
        raise ConnectorError(
            f"CONN-2: match_prefix promised {num_tokens} tokens beyond {num_computed_tokens} to "
            f"request {request.request_id!r} of {request.num_tokens} tokens: the sum must be a "
            f"multiple of {alignment} and leave a token to compute"
        )


class EndedJob(NamedTuple):
    """A job that all workers have reported."""

    job: TransferJob
    is_load: bool
    result: TransferResult
    """The last result, or a failed one with the blocks that all workers moved, if one failed."""
    is_last_load: bool
    """Whether no other load of the job's request is in flight."""
    load_failed: bool
    """Whether a load of the job's request failed."""


@dataclass(slots=True)
class _InFlight:
    job: TransferJob
    is_load: bool
    ranks: set[int] = field(default_factory=set)
    failed: TransferResult | None = None


@dataclass(slots=True)
class _Loads:
    job_ids: set[int] = field(default_factory=set)
    failed: bool = False


class JobTracker:
    """Tracks the promises and jobs in flight, and the workers that have reported each job.

    1. A plan is checked before its jobs are tracked; a check that raises has changed nothing.
    2. A job ends with the report of its last worker.

    Args:
        num_workers: Number of workers, each of which reports each job.
    """

    def __init__(self, num_workers: int = 1) -> None:
        self._num_workers = num_workers
        self._promised: dict[str, int] = {}
        self._in_flight: dict[int, _InFlight] = {}
        self._loads: dict[str, _Loads] = {}

    def __len__(self) -> int:
        """Jobs in flight."""
        return len(self._in_flight)

    def __iter__(self) -> Iterator[int]:
        """Ids of the jobs in flight, oldest first."""
        return iter(self._in_flight)

    def jobs(self) -> Iterator[TransferJob]:
        """The jobs in flight, oldest first."""
        return (flight.job for flight in self._in_flight.values())

    def promise(self, request_id: str, num_tokens: int) -> None:
        """Record that blocks were allocated for a load of this many tokens."""
        self._promised[request_id] = num_tokens

    def check(self, plan: StepPlan) -> None:
        """Check a plan against the jobs in flight and the promises.

        Raises:
            ConnectorError: A job id is in flight or is used twice (CONN-5), a load is for a
                request that does not wait for a load, or a promise has no load (CONN-2).
        """
        planned: set[int] = set()
        for job in (*plan.loads, *plan.stores):
            if job.job_id in planned or job.job_id in self._in_flight:
                raise ConnectorError(
                    f"CONN-5: job id {job.job_id} is in flight and was planned again; use each job "
                    f"id once in the life of the connector"
                )
            planned.add(job.job_id)
        broken = dict(self._promised)
        for job in plan.loads:
            broken.pop(job.request_id or "", None)
            if job.request_id not in self._promised:
                planner = f" of {job.owner}" if job.owner else ""
                raise ConnectorError(
                    f"CONN-2: load job {job.job_id}{planner} names request {job.request_id!r}, "
                    f"which does not wait for a load; plan all loads of a request in the step in "
                    f"which its blocks were allocated"
                )
        for request_id, num_tokens in broken.items():
            raise ConnectorError(
                f"CONN-2: the connector promised {num_tokens} tokens to request {request_id!r} but "
                f"planned no load for it"
            )

    def begin(self, plan: StepPlan) -> None:
        """Start to track the jobs of a checked plan; its loads fulfil all promises."""
        self._promised.clear()
        for job in plan.loads:
            self._in_flight[job.job_id] = _InFlight(job, is_load=True)
            self._loads.setdefault(job.request_id or "", _Loads()).job_ids.add(job.job_id)
        for job in plan.stores:
            self._in_flight[job.job_id] = _InFlight(job, is_load=False)

    def awaits(self, job_id: int, rank: int = 0) -> bool:
        """Return whether a worker has not reported a job in flight yet."""
        job = self._in_flight.get(job_id)
        return job is not None and rank not in job.ranks

    def end(self, result: TransferResult, rank: int = 0) -> EndedJob | None:
        """Record a worker's report.

        Returns:
            The job if its last worker has now reported it, otherwise None.

        Raises:
            ConnectorError: The worker has already reported the job, or the job is not in
                flight (CONN-3).
        """
        if not self.awaits(result.job_id, rank):
            raise ConnectorError(
                f"CONN-3: job {result.job_id} was reported but is not in flight; report each job "
                f"once"
            )
        flight = self._in_flight[result.job_id]
        flight.ranks.add(rank)
        if not result.success:
            flight.failed = _joined(flight.failed, result)
        if len(flight.ranks) < self._num_workers:
            return None
        del self._in_flight[result.job_id]
        result = flight.failed or result
        if not flight.is_load:
            return EndedJob(flight.job, False, result, False, False)
        request_id = flight.job.request_id or ""
        loads = self._loads[request_id]
        loads.job_ids.remove(result.job_id)
        loads.failed |= not result.success
        if not loads.job_ids:
            del self._loads[request_id]
        return EndedJob(flight.job, True, result, not loads.job_ids, loads.failed)


def _joined(before: TransferResult | None, result: TransferResult) -> TransferResult:
    """Merge the failed results of a job; a block counts as moved only if every worker moved it."""
    if before is None or result.moved is None or before.moved is None:
        return result if before is None else replace(before, moved=None)
    moved = [a and b for a, b in zip(before.moved, result.moved, strict=False)]
    return replace(before, moved=moved)
