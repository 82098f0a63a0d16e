"""The traffic of some seeds, served with one connector in one arrangement in this process."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from kvview import ConfigError
from kvview.connector.job_tracker import EndedJob
from kvview.errors import line_of, split_law
from kvview.testing.connector.exercised.coverage import FAILED_BY_THEMSELVES, LEFT_ALONE
from kvview.testing.connector.judge.invariants import InvariantBroken
from kvview.testing.supervision import watchdog
from kvview_vllm.inference.planted import make_corrupting
from kvview_vllm.inference.runner_v2 import use_runner
from kvview_vllm.inference.server import Server
from kvview_vllm.inference.traffic import REJECTED_DRAFTS, STEPS_AHEAD, SeededTraffic, Served
from kvview_vllm.metrics.connector_metrics import Meter
from kvview_vllm.simulation.raw.call_recorder import CallRecorder, make_recorded, refused_settings
from kvview_vllm.simulation.raw.stand_ins import StandIns
from kvview_vllm.simulation.raw.transfer_config import registered
from kvview_vllm.simulation.scheduler.model_runner import invalid_blocks

NUM_BLOCKS = {"llama": 18, "gemma": 36}
"""Number of blocks, which is too small for four requests, so that there are preemptions.

Each group has its own blocks.
"""

_OF_WORKER = re.compile(r"Worker failed with error '(.*)', please check")
_TOKENS_PER_STEP = 64  # prompts take several steps


@dataclass(frozen=True)
class ServeJob:
    """One engine, and its traffic.

    Args:
        name: Name of the arrangement, for reports.
        kind: Kind of the model.
        model: Folder of the model.
        seeds: Seeds of the traffic.
        config: ``kv_transfer_config``; None for no connector.
        connector_class: The class that the configuration names.
        classes: The class of the connector, and the classes of its children.
        is_own: Whether the connector is a kvview connector, whose pool calls are not recorded.
        resets: Whether the connector can be reset.
        truth: Answers without a connector.
        control: "corrupted" injects the fault, and "loads off" makes the connector load nothing.
        more: Further arguments of ``vllm.LLM``.
        is_v2: Whether Model Runner V2 runs; otherwise V1.
        hook_seconds: CPU seconds that one call of a method may take.
    """

    name: str
    kind: str
    model: Path
    seeds: Sequence[int]
    config: dict[str, Any] | None = None
    connector_class: type | None = None
    classes: Sequence[type] = ()
    is_own: bool = False
    resets: bool = True
    truth: Mapping[str, Sequence[int]] | None = None
    control: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)
    is_v2: bool = False
    hook_seconds: float = watchdog.HOOK_SECONDS

    def __str__(self) -> str:
        return f"{self.name}, {self.control}" if self.control else self.name


def serve(job: ServeJob, on_progress: Callable[[str], None]) -> Served:
    """Serve a job, and return its results.

    Args:
        job: The job.
        on_progress: Called at short intervals, with a text about the progress.
    """
    import torch

    torch.set_num_threads(1)  # because two threads that wait for each other are 20 times slower
    served = Served()
    recorder = CallRecorder(loads=job.control != "loads off")
    stand_ins = StandIns(())
    engines: list[Server] = []
    recorded = None
    if job.connector_class is not None:
        recorded = make_recorded(job.connector_class, recorder)
        if job.control == "corrupted":
            recorded = make_corrupting(recorded, recorder, lambda: engines[0].scheduler)
    try:
        with (
            watchdog.limit(job.hook_seconds),
            watchdog.watching(),
            registered(recorded),
            stand_ins.installed(job.classes),
        ):
            config = None if recorded is None else {**(job.config or {}), **_named(recorded)}
            use_runner(job.is_v2)
            more = {"max_num_batched_tokens": _TOKENS_PER_STEP, **job.more}
            server = Server(job.model, config, NUM_BLOCKS[job.kind], **more)
            engines.append(server)
            served.is_up = True
            if config is not None and not job.is_own:
                recorder.record_pool(server.pool)
            _play(job, server, recorder, served, stand_ins, on_progress)
    except BaseException as error:  # any exception is the result
        _record_broken(error, served)
    served.coverage.update(recorder.coverage)
    if not job.is_own:
        found = recorder.coverage
        served.coverage[LEFT_ALONE["loads"]] = sum(
            found[kind] for kind in ("loads between steps", "loads within a step")
        )
    served.coverage.update(dict.fromkeys(stand_ins.used, 1))
    return served


def _play(
    job: ServeJob,
    server: Server,
    recorder: CallRecorder,
    served: Served,
    stand_ins: StandIns,
    on_progress: Callable[[str], None],
) -> None:
    traffic = None
    _count_calls(server, served)
    if job.is_own:
        _count_jobs(served)
    else:
        _count_failed_loads(server, served)
    for seed in job.seeds:
        traffic = SeededTraffic(
            server, served, seed, job.truth, job.resets, job.is_own, on_progress
        )
        traffic.on_step = stand_ins.tick
        traffic.play()
        served.lost += [name for name in traffic.prompts if name not in served.answers]
    if traffic is not None:
        traffic.rest()
    if leaked := server.leaked_blocks():
        by = sorted(set(recorder.laws.places.values()))[:3]
        touched = f"; last touched by {', '.join(by)}" if by else ""
        message = f"{leaked} blocks of the KV cache are held when everything has ended{touched}"
        raise InvariantBroken("CONN-4", message)


def _count_calls(server: Server, served: Served) -> None:
    """Count preemptions, rejected drafts, and steps launched while another step is in flight."""
    scheduler = server.scheduler
    preempt, schedule = scheduler._preempt_request, scheduler.schedule
    update = scheduler.update_from_output

    def counted_preempt(*args: Any, **kwargs: Any) -> Any:
        served.coverage["preemptions"] += 1
        return preempt(*args, **kwargs)

    def counted_schedule(*args: Any, **kwargs: Any) -> Any:
        num_in_flight = server.num_steps_in_flight()
        output = schedule(*args, **kwargs)
        if num_in_flight and output.total_num_scheduled_tokens:
            served.coverage[STEPS_AHEAD] += 1
        return output

    def counted_update(output: Any, answer: Any) -> Any:
        for name, drafts in output.scheduled_spec_decode_tokens.items():
            sampled = answer.sampled_token_ids[answer.req_id_to_index[name]]
            served.coverage[REJECTED_DRAFTS] += len(drafts) + 1 - len(sampled)
        return update(output, answer)

    scheduler._preempt_request, scheduler.schedule = counted_preempt, counted_schedule
    scheduler.update_from_output = counted_update


def _count_jobs(served: Served) -> None:
    """Count the jobs of a kvview connector and those that failed, and note the first error."""
    log = logging.getLogger("kvview.tier")
    log.addHandler(_FirstError(served))
    log.setLevel(logging.DEBUG)
    end = Meter.end

    def counted_end(meter: Meter, ended: EndedJob) -> None:
        kind = "loads" if ended.is_load else "stores"
        served.coverage[LEFT_ALONE[kind]] += 1
        if not ended.result.success:
            served.coverage[FAILED_BY_THEMSELVES[kind]] += 1
            served.first_error = served.first_error or line_of(ended.result.error or "")
        end(meter, ended)

    Meter.end = counted_end  # type: ignore[assignment, method-assign]


class _FirstError(logging.Handler):
    """Notes the first exception of a store, which the results of jobs do not contain."""

    def __init__(self, served: Served) -> None:
        super().__init__()
        self._served = served

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self._served.first_error = self._served.first_error or line_of(record.getMessage())


def _count_failed_loads(server: Server, served: Served) -> None:
    """Count the loads of which the connector reports invalid blocks."""
    update = server.scheduler.update_from_output

    def counted_update(output: Any, answer: Any) -> Any:
        transfers = answer.kv_connector_output
        has_failed = bool(transfers and invalid_blocks(transfers))
        served.coverage[FAILED_BY_THEMSELVES["loads"]] += has_failed
        return update(output, answer)

    server.scheduler.update_from_output = counted_update


def _named(connector_class: type) -> dict[str, Any]:
    """Return the configuration keys that name the class."""
    setattr(sys.modules[__name__], connector_class.__name__, connector_class)
    return {
        "kv_connector": connector_class.__name__,
        "kv_connector_module_path": __name__,
    }


def _record_broken(error: BaseException, served: Served) -> None:
    """Record the law that an error breaks, and its message."""
    is_refused = False
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, InvariantBroken):
        is_refused |= isinstance(cause, ConfigError)
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        served.law, served.message = cause.law, cause.message
        is_refused |= isinstance(cause.__cause__, ConfigError)
    else:
        text = line_of(error)
        if in_worker := _OF_WORKER.search(text):
            text = in_worker[1]
        law, message = split_law(text)
        when = "the engine ended" if served.is_up else "the engine did not start"
        served.law = law or "ENGINE"
        served.message = message if law else f"{when}: {type(error).__name__}: {message}"
    is_refused |= refused_settings(served.message) is not None
    served.is_refused = is_refused and not served.is_up
