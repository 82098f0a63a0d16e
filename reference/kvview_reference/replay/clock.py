"""The simulated clock of a replay, and the ends of steps and transfers by the time model.

No wall clock is read, so a replay gives the same figures on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from kvview import (
    CacheGeometry,
    CanonicalKVCaches,
    Connector,
    GPULoadStoreSpec,
    LoadStoreSpec,
    StepPlan,
    TransferResult,
    WorkerConnector,
)
from kvview.errors import ConfigError
from kvview_reference.engine import Engine
from kvview_reference.replay.time_model import TimeModel

_DECODE_STEPS = 16
"""Tokens that a running request generates in one engine step without a prompt."""

_MAX_STEPS = 2**50
"""Largest number of ``decode_step_s`` from the start; a step does not change a later time."""


class _Link:
    """One direction of the host link, which moves its jobs one after another."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self.busy_s = 0.0

    def book(self, now: float, num_bytes: float) -> float:
        """Add a job that starts now, and return the time of its end."""
        seconds = num_bytes / self._bytes_per_s
        self.busy_s += seconds
        self._free_at = max(now, self._free_at) + seconds
        return self._free_at


class Clock:
    """The time of a replay and of its transfers.

    Args:
        model: The durations.
        geometry: Geometry of the engine.
    """

    def __init__(self, model: TimeModel, geometry: CacheGeometry) -> None:
        self.model = model
        self.now = 0.0
        self.loads = _Link(model.load_gb_per_s * 1e9)
        self.stores = _Link(model.store_gb_per_s * 1e9)
        groups = geometry.groups
        self._block_bytes: Sequence[float] = model.group_bytes or [
            model.token_bytes * group.block_size / len(groups) for group in groups
        ]
        self._ends: dict[int, float] = {}  # by job in flight
        self._decoded = 0

    def begin(self, plan: StepPlan) -> None:
        """Add the jobs of a plan."""
        for job in plan.loads:
            self._ends[job.job_id] = self.loads.book(self.now, self._num_bytes(job.dst))
        for job in plan.stores:
            self._ends[job.job_id] = self.stores.book(self.now, self._num_bytes(job.src))

    def take_ended(self) -> list[int]:
        """Take the jobs that have ended since the last call, in the order of their ends."""
        ended = [job_id for job_id, end in self._ends.items() if end <= self.now]
        ended.sort(key=self._ends.__getitem__)
        for job_id in ended:
            del self._ends[job_id]
        return ended

    def step(self, engine: Engine, next_arrival_s: float | None) -> None:
        """Run one step of the engine and advance the time by its duration.

        Args:
            engine: The engine.
            next_arrival_s: Arrival time of the next request; None at the end of the trace.

        Raises:
            ConfigError: The time is so late that a step of ``decode_step_s`` would not change it.
        """
        if not self.now / self.model.decode_step_s <= _MAX_STEPS:
            raise ConfigError(
                f"a request arrives or ends {self.now:.3g} s after the start, too late for steps "
                f"of {self.model.decode_step_s:.3g} s: correct the trace's timestamps, or the "
                "options --speed, --prefill-rate and --decode-step"
            )
        decoded = int(self.now / self.model.decode_step_s)
        engine.decode_tokens, self._decoded = decoded - self._decoded, decoded
        num_decoding = sum(r.num_tokens - r.num_computed_tokens <= 1 for r in engine.running)
        engine.max_tokens_per_step = self.model.step_tokens + num_decoding * engine.decode_tokens
        before = engine.stats.prefill_tokens
        engine.step()
        computed = engine.stats.prefill_tokens - before
        if computed:
            self.now += computed / self.model.prefill_tokens_per_s
            return
        events = [end for end in self._ends.values() if end > self.now]
        if next_arrival_s is not None and not engine.waiting:
            events.append(next_arrival_s)
        step_s = self.model.decode_step_s
        if engine.running or not events:
            events.append(self.now + _DECODE_STEPS * step_s)
        self.now = max(self.now + (step_s if engine.running else 0.0), min(events))

    def _num_bytes(self, spec: LoadStoreSpec) -> float:
        if not isinstance(spec, GPULoadStoreSpec):
            return 0.0  # the engine reports the wrong spec
        return sum(n * size for n, size in zip(spec.group_sizes, self._block_bytes, strict=True))


class OneStep:
    """Replaces the clock in a replay without times; each transfer ends before the next step."""

    def __init__(self) -> None:
        self._started: list[int] = []

    def begin(self, plan: StepPlan) -> None:
        """Add the jobs of a plan."""
        self._started += [job.job_id for job in (*plan.loads, *plan.stores)]

    def take_ended(self) -> list[int]:
        """Take the jobs that were added since the last call, in this order."""
        ended, self._started = self._started, []
        return ended


def time_transfers(connector: Connector, clock: Clock | OneStep) -> Connector:
    """Make the worker half of a connector report each transfer at its simulated end.

    Returns:
        The same object.
    """
    make_worker = connector.make_worker
    object.__setattr__(connector, "make_worker", lambda: _TimedWorker(make_worker(), clock))
    return connector


class _TimedWorker(WorkerConnector):
    """Moves the bytes immediately, and reports each job at its simulated end."""

    def __init__(self, worker: WorkerConnector, clock: Clock | OneStep) -> None:
        self._worker, self._clock = worker, clock
        self._ended: list[int] = []
        self._results: dict[int, TransferResult] = {}

    @override
    def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
        self._worker.register_kv_caches(kv_caches)

    @override
    def start_plan(self, plan: StepPlan) -> None:
        self._clock.begin(plan)
        self._worker.start_plan(plan)

    @override
    def get_finished(self) -> list[TransferResult]:
        self._ended += self._clock.take_ended()
        if not self._ended:
            return []
        self._take_results()
        if late := [job_id for job_id in self._ended if job_id not in self._results]:
            self._worker.wait(late)
            self._take_results()
        due = [self._results.pop(job_id) for job_id in self._ended if job_id in self._results]
        reported = {result.job_id for result in due}
        self._ended = [job_id for job_id in self._ended if job_id not in reported]
        return due

    @override
    def wait(self, job_ids: Sequence[int]) -> None:
        pass  # the end is simulated, so the next get_finished has the results

    @override
    def shutdown(self) -> None:
        self._worker.shutdown()

    def _take_results(self) -> None:
        for result in self._worker.get_finished():
            self._results[result.job_id] = result
