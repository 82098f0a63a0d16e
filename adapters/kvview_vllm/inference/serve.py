"""Serves the traffic of some seeds with one connector, in one arrangement, in this process."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvview import ConfigError
from kvview.errors import line_of, split_law
from kvview.testing import watchdog
from kvview.testing.connector.invariants import InvariantBroken
from kvview_vllm.inference.planted import make_spoilt
from kvview_vllm.inference.server import Server
from kvview_vllm.inference.traffic import SeededTraffic, Served
from kvview_vllm.simulation.raw.stand_ins import StandIns
from kvview_vllm.simulation.raw.target import registered
from kvview_vllm.simulation.raw.watched import Watch, make_watched

NUM_BLOCKS = {"llama": 18, "gemma": 36}
"""Not room for four requests: there are preemptions. Of groups, each has blocks of its own."""

_OF_WORKER = re.compile(r"Worker failed with error '(.*)', please check")
_TOKENS_PER_STEP = 64  # prompts take several steps


@dataclass(frozen=True)
class ServeJob:
    """One engine, and what it serves.

    Args:
        name: Of the arrangement, for people.
        kind: Of the model.
        model: Its folder.
        seeds: Of the traffic.
        config: ``kv_transfer_config``; None for no connector.
        connector_class: The class that it names.
        classes: That class, and those of children.
        is_own: Whether the connector is kvview's, which has a pool of its own to check.
        resets: Whether the connector can be reset.
        truth: Answers without a connector.
        control: "spoilt" plants the fault, "loads off" lets it load nothing.
        more: Arguments of ``vllm.LLM``.
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
    hook_seconds: float = watchdog.HOOK_SECONDS

    def __str__(self) -> str:
        return f"{self.name}, {self.control}" if self.control else self.name


def serve(job: ServeJob, on_progress: Callable[[str], None]) -> Served:
    """Serve it, and say what came out.

    Args:
        job: What.
        on_progress: Told what is done, often.
    """
    import torch

    torch.set_num_threads(1)  # two that wait for each other are 20 times slower
    served = Served()
    watch = Watch(loads=job.control != "loads off")
    stand_ins = StandIns(())
    engines: list[Server] = []
    watched = None if job.connector_class is None else _watched(job, watch, engines)
    try:
        with (
            watchdog.limit(job.hook_seconds),
            watchdog.watching(),
            registered(watched),
            stand_ins.installed(job.classes),
        ):
            config = None if watched is None else {**(job.config or {}), **_named(watched)}
            more = {"max_num_batched_tokens": _TOKENS_PER_STEP, **job.more}
            server = Server(job.model, config, NUM_BLOCKS[job.kind], **more)
            engines.append(server)
            served.is_up = True
            if config is not None and not job.is_own:
                watch.watch_pool(server.pool)
            _play(job, server, watch, served, stand_ins, on_progress)
    except BaseException as error:  # whatever ends it is the result
        _tell_broken(error, served)
    served.coverage.update(watch.coverage)
    served.coverage.update(dict.fromkeys(stand_ins.used, 1))
    return served


def _play(
    job: ServeJob,
    server: Server,
    watch: Watch,
    served: Served,
    stand_ins: StandIns,
    on_progress: Callable[[str], None],
) -> None:
    traffic = None
    _count_preemptions(server.scheduler, served)
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
        by = sorted(set(watch.places.values()))[:3]
        told = f"; last touched by {', '.join(by)}" if by else ""
        raise InvariantBroken(
            "CONN-4", f"{leaked} blocks of the KV cache are held when everything has ended{told}"
        )


def _count_preemptions(scheduler: Any, served: Served) -> None:
    preempt = scheduler._preempt_request

    def counted(*args: Any, **kwargs: Any) -> Any:
        served.coverage["preemptions"] += 1
        return preempt(*args, **kwargs)

    scheduler._preempt_request = counted


def _watched(job: ServeJob, watch: Watch, engines: list[Server]) -> type:
    assert job.connector_class is not None, "without a connector there is none to watch"
    watched = make_watched(job.connector_class, watch)
    if job.control == "spoilt":
        return make_spoilt(watched, watch, lambda: engines[0].scheduler)
    return watched


def _named(connector_class: type) -> dict[str, Any]:
    """How a configuration names a class that was made here."""
    setattr(sys.modules[__name__], connector_class.__name__, connector_class)
    return {
        "kv_connector": connector_class.__name__,
        "kv_connector_module_path": __name__,
    }


def _tell_broken(error: BaseException, served: Served) -> None:
    """The law that an error breaks, and what is said of it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConfigError) or isinstance(cause.__cause__, ConfigError):
            served.is_refused = not served.is_up
        if isinstance(cause, InvariantBroken):
            served.law, served.message = cause.law, cause.message
            return
        cause = cause.__cause__ or cause.__context__
    text = line_of(error)
    if in_worker := _OF_WORKER.search(text):
        text = in_worker[1]
    law, said = split_law(text)
    when = "the engine ended" if served.is_up else "the engine did not start"
    served.law = law or "ENGINE"
    served.message = said if law else f"{when}: {type(error).__name__}: {said}"
