"""The engine and the connectors of a run. After each action the invariants are checked."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from kvview.testing.connector.half.connector import ConnectorInHarness
from kvview.testing.connector.half.worker import WorkerHarness
from kvview.testing.connector.judge.invariants import (
    InvariantBroken,
    check_conservation,
    check_free_list,
)
from kvview.testing.connector.judge.run_log import RunLog
from kvview.testing.connector.result import Snapshot
from kvview.testing.connector.run.engine import SimulatedEngine

_LONGEST_TIMELINE = 2000  # number of steps of which snapshots are kept
_HUGE_POOL = 1000  # size of a pool above which not every block is checked in every step
_STEPS_PER_CHECK_OF_A_HUGE_POOL = 8


class RunState:
    """The engine and the connectors.

    Args:
        coverage: Counters of the run's events.
    """

    def __init__(self, coverage: Counter[str]) -> None:
        self.coverage = coverage
        self.parts: list[ConnectorInHarness] = []
        self.built: SimulatedEngine | None = None
        """The engine; None until it is built."""
        self.num_steps = 0
        self.timeline: deque[Snapshot] = deque(maxlen=_LONGEST_TIMELINE)
        self.log = RunLog()
        self._num_wrong = 0
        self._checked_references: tuple[object, ...] = ()
        self._logged_holds: dict[int, int] = {}

    @property
    def engine(self) -> SimulatedEngine:
        """The engine, once it is built."""
        assert self.built is not None, "the run builds the engine first"
        return self.built

    @property
    def workers(self) -> list[WorkerHarness]:
        """The harnesses of the worker halves."""
        return [worker for part in self.parts for worker in part.workers]

    @property
    def num_in_flight(self) -> int:
        """Jobs that are not reported yet."""
        return sum(worker.num_in_flight for worker in self.workers)

    @property
    def touched_at(self) -> list[dict[int, Sequence[str]]]:
        """The lines of the author's code that last held each block, by connector."""
        return [part.record.touched_at for part in self.parts]

    def blocks_to_load(self) -> set[int]:
        """Blocks that the loads in flight of all connectors write."""
        return {block for worker in self.workers for block in worker.blocks_to_load()}

    # --- actions ---

    def step(self) -> None:
        """Make one step."""
        self.engine.step()
        self.check(is_step=True)

    def abort(self, request_id: str) -> None:
        """End a request early, unless it has ended."""
        status = self.engine.unfinished().get(request_id)
        if status is not None:
            self.coverage[f"aborted {status}"] += 1
            self.engine.abort(request_id)
            self.check()

    def reset(self, *, after_reports: bool = False) -> bool:
        """Reset the caches; returns False if the engine or a connector refuses."""
        self.coverage["resets with jobs in flight"] += bool(self.num_in_flight)
        was_reset = self.engine.reset(after_reports=after_reports)
        self.coverage["resets"] += was_reset
        self.check()
        return was_reset

    # --- the invariants ---

    def check(self, *, is_step: bool = False) -> None:
        """Check all invariants; in a huge pool, all blocks are checked only rarely."""
        self.num_steps += is_step
        is_huge = self.engine.num_blocks > _HUGE_POOL
        if not (is_huge and self.num_steps % _STEPS_PER_CHECK_OF_A_HUGE_POOL):
            self._check_blocks(is_step=is_step)
        before, self._num_wrong = self._num_wrong, self.engine.stats.mismatches
        if self._num_wrong > before:
            mismatch, hint = self._describe_mismatch()
            raise InvariantBroken(
                "XFER-1",
                f"a request reads {self._num_wrong - before} blocks whose bytes are not those of "
                f"their hashes{mismatch and f': {mismatch}'}",
                hint=hint,
            )
        for part in self.parts:
            part.scheduler.fold_events()
            part.record.keys.check_advertised()

    def _describe_mismatch(self) -> tuple[str, str | None]:
        """Return the wrong bytes with the jobs that moved them, and the remedy."""
        text, wrong = self.engine.mismatch, self.engine.wrong_block
        pages = [part.record.pages for part in self.parts]
        if wrong is None or len(pages) != 1:
            return text, None
        history, hint = pages[0].history_of(*wrong)
        return f"{text}{history and f'; {history}'}", hint

    def _check_blocks(self, *, is_step: bool) -> None:
        engine = self.engine
        held = engine.held_blocks()
        blocks = range(1, engine.num_blocks)  # without the null block
        counts = engine.ref_counts(blocks)
        owned = engine.engine_refs()
        free = engine.free_block_ids()
        if is_step:
            if held != self._logged_holds:
                self.log.add(f"step {self.num_steps} ends; blocks held by connectors:", held)
                self._logged_holds = dict(held)
            num_held = len(held.keys() - owned.keys())
            self.timeline.append(
                Snapshot(self.num_steps, len(free), len(owned), num_held, self.num_in_flight)
            )
        references = list(free), counts, dict(owned), dict(held)
        if references != self._checked_references:  # most steps change no reference
            refs = dict(enumerate(counts, 1))
            check_free_list(free, refs)
            check_conservation(refs, owned, held)
            self._checked_references = references
