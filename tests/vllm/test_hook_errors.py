"""An error in a connector's hook in vLLM: kvview logs the first line, then the policy decides.

Every hook of the contract is made to fail under the real scheduler. A new hook gets a case by
itself; a hook that a release never calls must be listed here.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from kvview import (
    Connector,
    ConnectorError,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    HookError,
    SchedulerConnector,
    StepPlan,
    TransferJob,
    TransferResult,
    ViewClosedError,
    WorkerConnector,
)
from kvview.connector.hooks import hooks_of
from kvview_vllm.connector import worker
from kvview_vllm.connector.containment import Faults
from kvview_vllm.connector.messages import KVViewMetadata
from kvview_vllm.releases import installed
from kvview_vllm.simulation.scheduler.capabilities import can_fail_loads
from kvview_vllm.simulation.scheduler.cpu_scheduler import connector_config
from tests.vllm.server import EXAMPLE, FAULTY, HIT_TOKENS, Server

ROOT = Path(__file__).parents[2]
TARGET = f"{FAULTY}:BrokenConnector"
_release = installed().connector
_POLICY: Any = importlib.import_module("vllm.config").KVTransferConfig
needs_policy = pytest.mark.skipif(
    "kv_load_failure_policy" not in {each.name for each in fields(_POLICY)},
    reason="up to 0.12 a failed load is always computed",
)


def hooks_that_fail() -> dict[str, bool]:
    """Return the hooks that this release calls, and whether a fault in each ends the engine."""
    at_start = {
        *("__init__", *hooks_of(Connector), "SchedulerConnector.bind_gpu_block_pool_view"),
        *("SchedulerConnector.on_engine_ready", "WorkerConnector.register_kv_caches"),
    }
    hooks = {
        f"{half.__name__}.{name}"
        for half in (SchedulerConnector, WorkerConnector)
        for name in hooks_of(half)
    }
    if _release.worker_metadata:
        hooks.remove("WorkerConnector.wait")  # because loads end between steps
    if not _release.connector_reset:
        hooks.remove("SchedulerConnector.reset_cache")
    ends = {*at_start, "WorkerConnector.wait"}
    return {hook: hook in ends for hook in sorted(at_start | hooks)}


def broken(hook: str, **more: Any) -> dict[str, Any]:
    return connector_config(TARGET, cpu_blocks=64, fails_in=hook) | more


def serve_with_fault(config: dict[str, Any]) -> None:
    """Serve requests, of which one is preempted, with a connector whose hook raises."""
    server = Server(config, num_blocks=16)
    free = server.num_free_blocks()
    requests = [server.ask("one", 64), server.ask("other", 64, family=2)]
    server.run()
    assert server.stats.preemptions
    server.evict()
    server.reset()
    requests.append(server.ask("again"))
    server.run()
    server.shutdown()
    assert all(request.is_finished() for request in requests)
    assert server.num_free_blocks() == free


def first_line(caplog: pytest.LogCaptureFixture) -> str:
    errors = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert errors, "no error was logged"
    return errors[0].getMessage()


@pytest.mark.parametrize(("hook", "ends"), hooks_that_fail().items())
def test_the_first_line_names_the_connector_and_the_hook(
    hook: str, ends: bool, caplog: pytest.LogCaptureFixture
) -> None:
    # FAULT-1, FAULT-2, FAULT-3
    if ends:
        with pytest.raises(ConnectorError, match="planted"):
            serve_with_fault(broken(hook))
    else:
        serve_with_fault(broken(hook))
    line = first_line(caplog)
    assert line.startswith(f"kvview: connector {TARGET} ")
    assert "faulty_connectors.py:" in line
    assert f"{hook.rpartition('.')[2]} raised RuntimeError: planted" in line
    assert ("continues without it" in line) is not ends


@needs_policy
@pytest.mark.parametrize("hook", ["SchedulerConnector.plan_step", "WorkerConnector.get_finished"])
def test_the_policy_fail_ends_the_engine(hook: str, caplog: pytest.LogCaptureFixture) -> None:
    # FAULT-2
    with pytest.raises(ConnectorError, match=f"connector {TARGET}: .*raised RuntimeError"):
        serve_with_fault(broken(hook, kv_load_failure_policy="fail"))
    assert "The engine ends: kv_load_failure_policy is not recompute" in first_line(caplog)


@needs_policy
@pytest.mark.skipif(not _release.connector_reset, reason="no reset reaches a connector")
def test_the_policy_fail_ends_an_engine_that_swallowed_the_error() -> None:
    # FAULT-2: the caller of a reset over HTTP gets the error, and the engine continues
    server = Server(broken("SchedulerConnector.reset_cache", kv_load_failure_policy="fail"))
    server.ask("one")
    server.run()
    for name in ("reset", "step"):
        with pytest.raises(ConnectorError, match="reset_cache raised RuntimeError: planted"):
            getattr(server, name)()
    server.connector.shutdown()  # releases all holds, and raises nothing


def evicted(**extra: Any) -> Server:
    """Return a server whose connector has the KV of a prompt that is not on the GPU."""
    config = connector_config(EXAMPLE, cpu_blocks=64)
    config["kv_connector_extra_config"] |= extra
    server = Server(config)
    server.ask("first")
    server.run()
    server.evict()
    return server


def test_a_promise_without_a_load_is_computed_or_raised() -> None:
    # FAULT-2, SCHED-4: the request waits for a load that is never planned
    for is_contained in (True, False) if can_fail_loads() else (False,):
        server = evicted(contain_faults=is_contained)
        half, free = server.half, server.num_free_blocks()
        half.on_blocks_allocated = lambda *_: None
        if not is_contained:
            server.ask("again")
            with pytest.raises(ConnectorError, match="planned no load"):
                server.run()
            return
        half.view.touch_blocks([3, 4])  # holds at the time of the error are released
        again = server.ask("again")
        server.run()
        assert again.is_finished()
        assert server.num_free_blocks() == free
        with pytest.raises(ViewClosedError):
            half.view.touch_blocks([3])


def test_a_worker_with_loads_in_flight_ends_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    # FAULT-3
    server = evicted()
    server.ask("again")

    def start_plan(plan: StepPlan) -> None:
        raise HookError("x.py:1: start_plan raised RuntimeError: planted")

    server.worker._worker_side._half.start_plan = start_plan
    with pytest.raises(HookError, match=r"x\.py:1: start_plan raised"):
        server.run()
    assert "of request 'again' may still write into the KV cache" in first_line(caplog)


def documented() -> dict[str, Any]:
    """Return the first configuration of docs/vllm.md, word for word, with its pin budget."""
    page = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
    (config, *_), (budget,) = (
        re.findall(pattern, page, re.DOTALL)
        for pattern in (r"--kv-transfer-config '(.*?)'", r'`("pin_budget": [\d.]+)`')
    )
    given: dict[str, Any] = json.loads(config)
    given["kv_connector_extra_config"].update(json.loads(f"{{{budget}}}"))
    return given


@needs_policy
def test_the_documented_pin_budget_costs_stores_and_no_response(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(ROOT)  # the page names the example relative to it
    server = Server(documented(), num_blocks=26)  # of which 5 may be held
    server.ask("first")
    server.run()
    server.evict()
    server.ask("again")
    server.run()
    assert server.half.num_skipped_blocks == 1  # the counter of /metrics
    assert server.hits["again"] == HIT_TOKENS - 16
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []


@needs_policy
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_setting_that_loses_responses_is_one_warning(
    caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    Server(connector_config(EXAMPLE, cpu_blocks=64) | {"kv_load_failure_policy": policy})
    warnings = [each.getMessage() for each in caplog.records if "policy" in each.getMessage()]
    assert len(warnings) == (policy == "fail")
    for warning in warnings:
        assert EXAMPLE in warning
        assert 'Add "kv_load_failure_policy": "recompute" next to "kv_connector"' in warning


class ReportsLater(WorkerConnector):
    """Has no ``wait``, and reports its jobs in the third call after their plan."""

    def __init__(self) -> None:
        self.jobs: list[int] = []
        self.num_calls = 0

    @override
    def start_plan(self, plan: StepPlan) -> None:
        self.jobs += [job.job_id for job in plan.loads]

    @override
    def get_finished(self) -> list[TransferResult]:
        self.num_calls += 1
        jobs, self.jobs = (self.jobs, []) if self.num_calls == 3 else ([], self.jobs)
        return [TransferResult(job_id, success=True) for job_id in jobs]


@pytest.mark.parametrize("seconds", [30.0, 0.0])
def test_a_step_waits_for_the_loads_that_it_needs(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    # WORK-1
    monkeypatch.setattr(worker, "_LONGEST_LOAD", seconds)
    load = TransferJob(1, CPULoadStoreSpec([0]), GPULoadStoreSpec([1], [1], [0]), "r1")
    faults = Faults("my.py:Mine", "worker", resumes=False)
    side = worker.WorkerSide(ReportsLater(), None, 0, installed().connector, faults)
    message = KVViewMetadata("me", StepPlan([load]), wait_for_loads=True, acknowledged=())
    if seconds:
        side.start(message)
        return
    with pytest.raises(ConnectorError, match=r"WORK-1: .* ReportsLater does not report"):
        side.start(message)
