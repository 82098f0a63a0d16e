"""A canary for the scheduler's side, in which the installed vLLM's scheduler serves a few requests.

A real ``Scheduler`` with two KV-cache groups and its own pool serves four requests, and
:class:`~kvview_vllm.connector.KVViewConnector` runs a connector that compares each hook call with
the hook calls of every tested release: block ids, bytes of keys, units of matches and loads, new
blocks of a step, and the order of finish and free.

1. A vLLM whose results differ is refused when a connector is bound, and by ``kvview doctor``.
2. The trial run leaves no trace: no device, process, thread, file, event or log line, and the root
   of vLLM's block hashes is restored.
3. If the scheduler cannot serve these requests even without a connector, vLLM is not refused,
   because a server may configure the scheduler in another way. The adapter then runs unchecked,
   with a warning. A vLLM in which an object of the trial run cannot be made is refused.

Source: the order of calls in vllm/v1/core/sched/scheduler.py, 0.11.0 to 0.33.0.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

from kvview import KVViewError, TransferJob, TransferResult, UnsupportedEngineError
from kvview.errors import one_line
from kvview_vllm.connector.canary_half import (
    CANARY_TARGET,
    LENGTHS,
    LORA,
    NUM_BLOCKS,
    PROMPTS,
    SALT,
    CanaryHalf,
)
from kvview_vllm.connector.messages import JobReport, KVViewWorkerMetadata, stats_of
from kvview_vllm.releases import ConnectorSeam, engine_version, installed, reading, refusal
from kvview_vllm.releases.samples import (
    make_filled,
    make_model_output,
    make_request,
    make_scheduler,
    own_hash_root,
)
from kvview_vllm.releases.versions import vllm

_SEAM = ConnectorSeam.seam
_MOST_STEPS = 12

_logger = logging.getLogger(__name__)


@cache
def check_scheduler_steps(kind: type) -> str:
    """Serve the requests once per process.

    Args:
        kind: ``KVViewConnector``.

    Returns:
        Reason why the trial run was impossible; empty after a trial run.

    Raises:
        UnsupportedEngineError: A result differs from that of the tested releases.
    """
    try:
        with reading(_SEAM, "the steps of a scheduler"), _alone():
            _Play(kind).run()
    except KVViewError as error:
        if error.__cause__ is not None and (problem := _problem_without_connector()):
            _logger.warning(
                "kvview: vLLM %s serves no request in a trial run, even without a connector "
                "(%s), so KVViewConnector is used unchecked",
                *(engine_version(), problem),
            )
            return problem
        if isinstance(error, UnsupportedEngineError):
            raise
        raise refusal(
            _SEAM, one_line(error), "the same steps as in every tested release"
        ) from error
    return ""


def _problem_without_connector() -> str:
    try:
        with _alone():
            _Play(None).run()
    except KVViewError:
        raise
    except Exception as error:
        return one_line(error)
    return ""


@contextmanager
def _alone() -> Iterator[None]:
    """Keep a trial run from writing to the server's log and from changing its block hashes."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with own_hash_root():
            yield
    finally:
        logging.disable(before)


class _Play:
    """The scheduler, and a replacement for its workers.

    Args:
        kind: Class of the connector; None for no connector.
    """

    def __init__(self, kind: type | None) -> None:
        binding, self._release = installed().binding, installed().connector
        scheduler: Any = vllm("v1.core.sched.scheduler").Scheduler
        if kind is not None and not binding.optional_pool_hook:
            scheduler = import_module("kvview_vllm.scheduler").ViewScheduler
        self._half: CanaryHalf | None = None
        transfer_config: dict[str, Any] | None = None
        num_groups = 2 if self._release.several_groups else 1
        if kind is not None:
            self._half = CanaryHalf(num_groups)
            transfer_config = {
                "kv_connector": kind.__name__,
                "kv_connector_module_path": kind.__module__,
                "kv_role": "kv_both",
                "engine_id": "kvview canary",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "connector": CANARY_TARGET,
                    "options": {"half": self._half},
                    "contain_faults": False,
                },
            }
        self._scheduler = make_scheduler(scheduler, NUM_BLOCKS, num_groups, transfer_config)

    def run(self) -> None:
        """Serve the requests, and compare the calls that the connector receives."""
        half = self._half
        self._add("a")
        self._step()
        self._add("b")
        self._add("c")
        self._step()
        if half is not None:
            half.expect_ended("a")
        self._step_until("c")
        aborted = vllm("v1.request").RequestStatus.FINISHED_ABORTED
        self._scheduler.finish_requests("c", aborted)
        if half is not None:
            half.expect_ended("b", "c")
            half.release_held()
        self._add("d")
        self._step_until("d")
        if half is not None:
            half.expect_ended("d")
            half.expect_all_free()
            self._scheduler.connector.shutdown()

    def _add(self, name: str) -> None:
        lora = LORA if name == "c" else None
        request = make_request(name, PROMPTS[name], LENGTHS[name], cache_salt=SALT, lora=lora)
        self._scheduler.add_request(request)

    def _step_until(self, name: str) -> None:
        """Step until the connector has received every call for a request but the one at its end."""
        for _ in range(_MOST_STEPS):
            self._step()
            if self._half is not None and self._half.is_ready_to_end(name):
                return

    def _step(self) -> None:
        """Schedule a step, report the end of its loads, and process its tokens."""
        output = self._scheduler.schedule()
        transfers = None
        if self._half is not None and (jobs := self._half.take_jobs()):
            owner = output.kv_connector_metadata.owner
            transfers = self._transfers(jobs, owner, self._half.failing)
        requests = self._scheduler.requests
        sampled = {
            name: [7] if requests[name].num_computed_tokens >= requests[name].num_tokens else []
            for name in output.num_scheduled_tokens
        }
        self._scheduler.update_from_output(output, make_model_output(output, sampled, transfers))

    def _transfers(self, jobs: Sequence[TransferJob], owner: str, failing: set[str]) -> Any:
        """Make a worker's report, in which only the loads of the requests in ``failing`` failed."""
        failed = failing.intersection(job.request_id or "" for job in jobs)
        reports = [
            JobReport(owner, 0, TransferResult(job.job_id, success=job.request_id not in failed))
            for job in jobs
        ]
        values: dict[str, Any] = {"kv_connector_stats": stats_of(reports)}
        if self._release.worker_metadata:
            values = {
                "finished_recving": {job.request_id for job in jobs},
                "kv_connector_worker_meta": KVViewWorkerMetadata(reports),
            }
        if failed:
            values["failed_recving"] = failed
        return make_filled(vllm("v1.outputs").KVConnectorOutput, **values)
