"""An error in a connector's hook in vLLM: kvview logs the first line, then the policy decides.

Every hook of the contract is made to fail under the real scheduler. A new hook gets a case by
itself; a hook that a release never calls must be listed here.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import engine as lane  # type: ignore[import-not-found]
from kvview import (
    ConnectorError,
    HookError,
    StepPlan,
    ViewClosedError,
)
from kvview_vllm.releases import installed

ROOT = Path(__file__).parents[2]
FAULTY = Path(__file__).with_name("faulty_connectors.py")
TARGET = lane.FAULTY_CONNECTOR
TOKENS = lane.TOKENS
_release = installed().connector

Serve = Callable[..., lane.Engine]
MakeEngine = Callable[..., lane.Engine]


@pytest.fixture
def make_engine(tmp_path: Path) -> MakeEngine:
    return lambda config: lane.Engine(tmp_path / "model", config)


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    return partial(lane.serve_with_fault, tmp_path / "model")


def documented() -> dict[str, Any]:
    """Return the first configuration of docs/vllm.md, word for word, with its pin budget."""
    page = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
    (config, *_), (budget,) = (
        re.findall(pattern, page, re.DOTALL)
        for pattern in (r"--kv-transfer-config '(.*?)'", r'`("pin_budget": [\d.]+)`')
    )
    given: dict[str, Any] = json.loads(config)
    given["kv_connector_extra_config"].update(json.loads(f"{{{budget}}}"))
    if not has_policy():
        del given["kv_load_failure_policy"]
    return given


def test_the_documented_pin_budget_costs_stores_and_no_response(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(ROOT)  # the page names the example relative to it
    engine = make_engine(documented())  # 64 blocks, of which 12 may be held
    half = engine.scheduler.connector._scheduler_side.half
    tokens = range(10, 10 + 26 * lane.BLOCK_SIZE + 4)  # more blocks than may be held
    first = engine.add("first", tokens)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    engine.scribble()
    again = engine.add("again", tokens)
    engine.run()
    assert first.is_finished()
    assert again.is_finished()
    assert half.num_skipped_blocks >= 26 - 12  # the counter of /metrics
    assert engine.hits["again"] == 12 * lane.BLOCK_SIZE
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []


def has_policy() -> bool:
    config: Any = importlib.import_module("vllm.config").KVTransferConfig
    return "kv_load_failure_policy" in {each.name for each in fields(config)}


def first_line(caplog: pytest.LogCaptureFixture) -> str:
    errors = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert errors, "no error was logged"
    return errors[0].getMessage()


@pytest.mark.parametrize(("hook", "ends"), lane.hooks_that_fail().items())
def test_the_first_line_names_the_connector_and_the_hook(
    hook: str, ends: bool, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    # FAULT-1, FAULT-2, FAULT-3
    if ends:
        with pytest.raises(ConnectorError, match="planted"):
            serve(hook)
    else:
        serve(hook)
    line = first_line(caplog)
    name = hook.rpartition(".")[2]
    assert line.startswith(f"kvview: connector {TARGET} ")
    assert f"{FAULTY.name}:" in line
    assert f"{name} raised RuntimeError: planted" in line
    assert ("continues without it" in line) is not ends


@pytest.mark.parametrize("hook", ["SchedulerConnector.plan_step", "WorkerConnector.get_finished"])
def test_the_policy_fail_ends_the_engine(
    hook: str, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    # FAULT-2
    if not has_policy():
        pytest.skip("up to 0.12 a failed load is always computed")
    with pytest.raises(ConnectorError, match=f"connector {TARGET}: .*raised RuntimeError"):
        serve(hook, "fail")
    assert "The engine ends: kv_load_failure_policy is not recompute" in first_line(caplog)


def test_the_policy_fail_ends_an_engine_that_swallowed_the_error(make_engine: MakeEngine) -> None:
    # FAULT-2: the caller of a reset over HTTP gets the error, and the engine continues
    if not has_policy() or not _release.connector_reset:
        pytest.skip("no policy, or no reset that reaches a connector")
    config = lane.connector_config(TARGET, cpu_blocks=64, fails_in="SchedulerConnector.reset_cache")
    engine = make_engine(config | {"kv_load_failure_policy": "fail"})
    engine.add("one", TOKENS)
    engine.run()
    with pytest.raises(ConnectorError, match="reset_cache raised RuntimeError: planted"):
        engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.add("two", TOKENS)
    with pytest.raises(ConnectorError, match="reset_cache raised RuntimeError: planted"):
        engine.run()
    engine.scheduler.connector.shutdown()  # releases all holds, and raises nothing


def test_a_promise_without_a_load_is_computed(make_engine: MakeEngine) -> None:
    # FAULT-2: the request waits for a load that is never planned
    engine = make_engine(lane.connector_config(cpu_blocks=64))
    if not lane.can_fail_loads():
        pytest.skip("0.11.0 cannot report a failed load")
    free = engine.num_free_blocks()
    engine.add("first", TOKENS)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    engine.scribble()
    side = engine.scheduler.connector._scheduler_side
    side.half.view.touch_blocks([3, 4])  # holds at the time of the error are released
    side.half.on_blocks_allocated = lambda *_: None
    again = engine.add("again", TOKENS)
    engine.run()
    assert again.is_finished()
    assert side.faults.is_out
    assert engine.num_free_blocks() == free
    with pytest.raises(ViewClosedError):
        side.half.view.touch_blocks([3])


def test_a_worker_with_loads_in_flight_ends_the_engine(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    # FAULT-3
    engine = make_engine(lane.connector_config(cpu_blocks=64))
    engine.add("first", TOKENS)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    half = engine.worker._worker_side._half
    engine.add("again", TOKENS)

    def start_plan(plan: StepPlan) -> None:
        raise HookError("x.py:1: start_plan raised RuntimeError: planted")

    half.start_plan = start_plan
    with pytest.raises(HookError, match=r"x\.py:1: start_plan raised"):
        engine.run()
    assert "of request 'again' may still write into the KV cache" in first_line(caplog)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_setting_that_loses_responses_is_one_warning(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    if not has_policy():
        pytest.skip("up to 0.12 a failed load is always computed")
    make_engine(lane.connector_config(cpu_blocks=64) | {"kv_load_failure_policy": policy})
    warnings = [each.getMessage() for each in caplog.records if "policy" in each.getMessage()]
    assert len(warnings) == (policy == "fail")
    for warning in warnings:
        assert str(lane.EXAMPLE) in warning
        assert 'Add "kv_load_failure_policy": "recompute" next to "kv_connector"' in warning
