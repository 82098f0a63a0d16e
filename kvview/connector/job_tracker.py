"""The jobs in flight of one connector, from the plan to the last report, for any engine.

Source: the laws CONN-2, CONN-3 and CONN-5 of :mod:`kvview.connector.halves`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvview.connector.plan import StepPlan, TransferJob
from kvview.connector.request import RequestInfo
from kvview.errors import ConnectorError
from kvview.geometry import CacheGeometry
from kvview.transfer import TransferResult


def check_promise(
    geometry: CacheGeometry, request: RequestInfo, num_computed_tokens: int, num_tokens: int
) -> None:
    """Check what ``match_prefix`` answered.

    Raises:
        ConnectorError: The prefix ends inside a block, or leaves nothing to compute (CONN-2).
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
    """A job that every worker has reported."""

    job: TransferJob
    is_load: bool
    result: TransferResult
    """A failed one if there is any, else the last."""
    is_last_load: bool
    """Whether its request waits for no other load."""
    load_failed: bool
    """Whether a load of its request failed."""


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
    """What was promised, what is in flight, and who has reported it.

    1. A plan is checked before it begins; a check that raises has changed nothing.
    2. A job ends with the report of its last worker.

    Args:
        num_workers: Workers that report each job.
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
        """Note that blocks were allocated to load this many tokens into."""
        self._promised[request_id] = num_tokens

    def check(self, plan: StepPlan) -> None:
        """Check a plan against what is in flight and what was promised.

        Raises:
            ConnectorError: A job id is in flight or named twice (CONN-5), a load is for a
                request that waits for none, or a promise has no load (CONN-2).
        """
        planned: set[int] = set()
        for job in (*plan.loads, *plan.stores):
            if job.job_id in planned or job.job_id in self._in_flight:
                raise ConnectorError(
                    f"CONN-5: job id {job.job_id} is in flight and was planned again: number the "
                    f"jobs in the life of the connector"
                )
            planned.add(job.job_id)
        broken = dict(self._promised)
        for job in plan.loads:
            broken.pop(job.request_id or "", None)
            if job.request_id not in self._promised:
                planner = f" of {job.owner}" if job.owner else ""
                raise ConnectorError(
                    f"CONN-2: load job {job.job_id}{planner} names request {job.request_id!r}, "
                    f"which waits for no load: plan all loads of a request in the step in which "
                    f"its blocks came"
                )
        for request_id, num_tokens in broken.items():
            raise ConnectorError(
                f"CONN-2: the connector promised {num_tokens} tokens to request {request_id!r} and "
                f"planned no load for it"
            )

    def begin(self, plan: StepPlan) -> None:
        """Take the jobs of a checked plan in; its promises are kept."""
        self._promised.clear()
        for job in plan.loads:
            self._in_flight[job.job_id] = _InFlight(job, is_load=True)
            self._loads.setdefault(job.request_id or "", _Loads()).job_ids.add(job.job_id)
        for job in plan.stores:
            self._in_flight[job.job_id] = _InFlight(job, is_load=False)

    def awaits(self, job_id: int, rank: int = 0) -> bool:
        """Whether a worker has still to report a job."""
        job = self._in_flight.get(job_id)
        return job is not None and rank not in job.ranks

    def end(self, result: TransferResult, rank: int = 0) -> EndedJob | None:
        """Take a report in.

        Returns:
            The job if this was its last worker, else None.

        Raises:
            ConnectorError: The worker reported it before, or it is not in flight (CONN-3).
        """
        if not self.awaits(result.job_id, rank):
            raise ConnectorError(
                f"CONN-3: job {result.job_id} was reported and is not in flight: report each job "
                f"once"
            )
        flight = self._in_flight[result.job_id]
        flight.ranks.add(rank)
        if not result.success:
            flight.failed = result
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
