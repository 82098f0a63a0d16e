"""The end of a run: requests and jobs end, blocks are released, and the caches are reset."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvview.testing.connector.judge.invariants import InvariantBroken, check_drained
from kvview.testing.connector.run.state import RunState

SECONDS_A_STEP = 0.05
"""Duration of a still step, for threads; in all 3 s, more than the usual deadline of a lookup."""

_STEPS_BEFORE_LOST = 12  # steps until lost jobs are reported
_MAX_STILL_STEPS = 80  # steps in which no request and no job ends
_STILL_STEPS_AT_ONCE = 20  # later ones take time, because a thread may still look up a prefix
_MAX_DRAIN_STEPS = 3000  # in which no request ends
_STEPS_TO_REST = 3  # steps after which a connector may no longer refuse a reset


def drain(stage: RunState, raise_stuck: Callable[[], None]) -> None:
    """Step the engine until no work is left.

    Args:
        stage: The engine and its connectors.
        raise_stuck: Called if the remaining work does not end; raises an error with the reason.

    Raises:
        InvariantBroken: Some work never ends, or the connector still holds blocks.
    """
    engine = stage.engine
    engine.squeeze(0)
    number, still, idle, ended, requests = 0, 0, 0, -1, -1
    while idle < _MAX_DRAIN_STEPS:
        if not engine.has_work():
            _check_asleep(stage)
            if not stage.num_in_flight:
                break
        if number >= _STEPS_BEFORE_LOST:
            for worker in stage.workers:
                worker.release_lost()
        stage.step()
        number += 1
        before, requests = requests, engine.stats.finished + engine.stats.aborted
        idle = idle + 1 if requests == before else 0
        before, ended = ended, requests + sum(worker.num_reported for worker in stage.workers)
        still = still + 1 if ended == before else 0
        if still > _STILL_STEPS_AT_ONCE and _threads_may_look_up(stage):
            time.sleep(SECONDS_A_STEP)
        if still > _MAX_STILL_STEPS:
            raise_stuck()
    else:
        raise InvariantBroken(
            "CONN-3",
            f"the connector still has work after {_MAX_DRAIN_STEPS} steps in which no request "
            f"ended, so the engine never becomes idle",
            hint="Plan no new job in plan_step while no request is left.",
        )
    check_drained(engine.held_blocks(), "when everything has ended", stage.touched_at)


def _threads_may_look_up(stage: RunState) -> bool:
    is_looking_up = any(part.scheduler.unanswered for part in stage.parts)
    return is_looking_up and threading.active_count() > 1


def _check_asleep(stage: RunState) -> None:
    """Require pending work while a store holds blocks; an idle engine receives no reports."""
    held = stage.engine.held_blocks()
    for worker in stage.workers:
        for store in worker.stores_in_flight():
            if kept := [block for block in store.gpu_blocks if block in held]:
                raise InvariantBroken(
                    "CONN-3",
                    f"store job {store.job_id} is in flight and holds blocks {kept}, but no "
                    f"request is left and has_pending_work returns False, so the engine makes no "
                    f"further step and the blocks stay held; return True while a store is in "
                    f"flight",
                )


def raise_stuck(stage: RunState) -> None:
    """Raise an error that names the cause of a run that does not end.

    Raises:
        InvariantBroken: Always.
    """
    if lost := [job for worker in stage.workers for job in worker.unreported()]:
        raise InvariantBroken(
            "CONN-3",
            f"jobs {lost} were started but never reported; get_finished of the worker half must "
            f"return a TransferResult for each, once",
        )
    engine = stage.engine
    held = engine.held_blocks()
    unfinished = engine.unfinished()
    if waiting := [request for request, status in unfinished.items() if status == "waiting"]:
        law, why, hint = "CONN-4", "too few blocks are free for them", None
        if not held:
            law, why = "ENGINE", "match_prefix has returned a number"
            if any(part.scheduler.unanswered.intersection(waiting) for part in stage.parts):
                law, why = "CONN-2", "match_prefix always returns None"
                hint = "Return a number from match_prefix after a few calls; 0 is a miss."
        raise InvariantBroken(
            law,
            f"requests {waiting} wait forever: {why}, and the connector holds {len(held)} of "
            f"{engine.num_blocks - 1} blocks",
            hint=hint,
        )
    raise InvariantBroken(
        "CONN-3",
        "has_pending_work returns True forever, although no job is in flight",
        hint="Return True from has_pending_work only while a job is planned or in flight.",
    )


def check_skipped(stage: RunState, *, is_roomy: bool) -> None:
    """Require that no block was skipped in a run with room for all blocks, if all were stored.

    Args:
        stage: The engine and its connectors.
        is_roomy: Whether GPU blocks and tier pages never ran out, and no transfer failed.

    Raises:
        InvariantBroken: CONN-13.
    """
    for part in stage.parts:
        num_skipped = part.scheduler.num_skipped
        # A connector may drop blocks for its own reasons, such as a full queue, and count these.
        if num_skipped and is_roomy and part.record.keys.has_stored_all:
            raise InvariantBroken(
                "CONN-13",
                f"num_skipped_blocks is {num_skipped!r}, although every block was stored; it must "
                "only count blocks that could not be stored",
            )


def reset_at_rest(stage: RunState) -> None:
    """Reset the caches once more; if a connector refuses, make a few steps and reset again.

    Raises:
        InvariantBroken: CONN-11 is broken, because the connector always refuses the reset.
    """
    for part in stage.parts:
        part.scheduler.has_refused_reset = False
    was_reset = stage.reset()
    for _ in range(_STEPS_TO_REST):
        if not any(part.scheduler.has_refused_reset for part in stage.parts):
            break
        stage.step()
        was_reset = stage.reset()
    else:
        raise InvariantBroken(
            "CONN-11",
            f"reset_cache returned False in all {_STEPS_TO_REST + 1} calls, although no job was "
            f"in flight and no request was left, so the KV of a replaced model stays loadable",
        )
    if stage.parts and not was_reset:
        raise InvariantBroken(
            "ENGINE", "the engine does not reset its prefix cache, although no block is in use"
        )
