"""Serves the traffic of some seeds with one connector, in one arrangement, in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvview.errors import line_of, split_law
from kvview.testing.connector import watchdog
from kvview.testing.connector.invariants import InvariantBroken
from kvview_vllm.inference.planted import make_spoilt
from kvview_vllm.inference.server import Server
from kvview_vllm.inference.traffic import SeededTraffic, Served
from kvview_vllm.simulation.raw.harness import registered
from kvview_vllm.simulation.raw.watched import Watch, make_watched

NUM_BLOCKS = {"llama": 18, "gemma": 36}
"""Not room for four requests: there are preemptions. Of groups, each has blocks of its own."""

_TOKENS_PER_STEP = 64  # prompts take several steps


@dataclass(frozen=True)
class Job:
    """One engine, and what it serves.

    Args:
        name: Of the arrangement, for people.
        kind: Of the model.
        model: Its folder.
        seeds: Of the traffic.
        config: ``kv_transfer_config``; None for no connector.
        connector_class: The class that it names.
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
    is_own: bool = False
    resets: bool = True
    truth: Mapping[str, Sequence[int]] | None = None
    control: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)
    hook_seconds: float = watchdog.HOOK_SECONDS

    def __str__(self) -> str:
        return f"{self.name}, {self.control}" if self.control else self.name


def serve(job: Job, on_progress: Callable[[str], None]) -> Served:
    """Serve it, and say what came out.

    Args:
        job: What.
        on_progress: Told what is done, often.
    """
    import torch

    torch.set_num_threads(1)  # two that wait for each other are 20 times slower
    served = Served()
    watch = Watch(loads=job.control != "loads off")
    engines: list[Server] = []
    watched = None if job.connector_class is None else _watched(job, watch, engines)
    try:
        with watchdog.limit(job.hook_seconds), watchdog.watching(), registered(watched):
            config = None if watched is None else {**(job.config or {}), **_named(watched)}
            more = {"max_num_batched_tokens": _TOKENS_PER_STEP, **job.more}
            server = Server(job.model, config, NUM_BLOCKS[job.kind], **more)
            engines.append(server)
            if config is not None and not job.is_own:
                watch.watch_pool(server.pool)
            _play(job, server, watch, served, on_progress)
    except BaseException as error:  # whatever ends it is the result
        served.law, served.message = _broken(error, is_up=bool(engines))
    served.coverage.update(watch.coverage)
    return served


def _play(
    job: Job,
    server: Server,
    watch: Watch,
    served: Served,
    on_progress: Callable[[str], None],
) -> None:
    traffic = None
    _count_preemptions(server.scheduler, served)
    for seed in job.seeds:
        traffic = SeededTraffic(server, served, seed, job.truth, job.resets, on_progress)
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


def _watched(job: Job, watch: Watch, engines: list[Server]) -> type:
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


def _broken(error: BaseException, is_up: bool) -> tuple[str, str]:
    """The law that an error breaks, and what is said of it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, InvariantBroken):
            return cause.law, cause.message
        cause = cause.__cause__ or cause.__context__
    law, said = split_law(line_of(error))
    when = "the engine ended" if is_up else "the engine did not start"
    return law or "ENGINE", f"{when}: {type(error).__name__}: {said}"
