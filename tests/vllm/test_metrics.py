"""Metrics through vLLM's own classes: scheduler, wire, Prometheus registry and stats log."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from front_end import PROM, FrontEnd  # type: ignore[import-not-found]

import engine as lane  # type: ignore[import-not-found]
from kvview_vllm.metrics.connector_metrics import COUNTERS, GAUGES, Meter
from kvview_vllm.releases import installed

FAULTY = Path(__file__).with_name("faulty_connectors.py")
TOKENS = range(10, 10 + 6 * lane.BLOCK_SIZE + 4)
EXAMPLE = lane.EXAMPLE_CONNECTOR


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., tuple[lane.Engine, FrontEnd]]]:
    forget: Any = importlib.import_module("vllm.v1.metrics.prometheus").unregister_vllm_metrics

    def make(config: dict[str, Any]) -> tuple[lane.Engine, FrontEnd]:
        engine = lane.Engine(tmp_path / "model", config)
        return engine, FrontEnd(engine, EXAMPLE)

    yield make
    forget()


def needs_prometheus() -> None:
    if PROM is None:
        pytest.skip("0.11.0 has only the log line of a connector, and no metrics")


def test_loads_and_stores_are_counted(serve: Any) -> None:
    engine, front = serve(lane.connector_config(cpu_blocks=64))
    engine.add("first", TOKENS)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    engine.scribble()
    engine.worker._worker_side._next_stats = 0.0  # up to 0.23 its stats are read once a second
    engine.add("again", TOKENS)
    engine.run()
    engine.worker._worker_side._next_stats = 0.0
    engine.add("more", TOKENS)
    engine.run()
    assert f"{EXAMPLE} stores=1" in front.logged()
    needs_prometheus()
    page = sum(engine.scheduler.connector._scheduler_side.meter.page_bytes)
    assert front.value("stores") == 1
    assert front.value("stored_bytes") == 6 * page
    assert front.value("loads") == front.value("loaded_bytes") / (6 * page) >= 1
    assert front.value("failed_loads") in (None, 0)
    for name in ("loads_in_flight", "stores_in_flight", "held_references"):
        assert front.value(name) in (None, 0)


def test_holds_are_reported_while_the_engine_is_idle(serve: Any) -> None:
    # METRIC-2
    needs_prometheus()
    engine, front = serve(lane.connector_config(cpu_blocks=64))
    view = engine.scheduler.connector.block_pool_view
    before = time.time()
    view.touch_blocks([40, 41, 42])
    engine.worker._worker_side._next_stats = 0.0
    engine.add("first", TOKENS)
    engine.run()
    engine.worker._worker_side._next_stats = 0.0
    engine.add("last", TOKENS)
    engine.run()
    assert front.value("held_references") == 3
    since = front.value("oldest_hold_timestamp_seconds")
    assert since is not None
    assert before - 1 <= since <= time.time()


def test_stats_that_wait_for_their_second_are_reported_at_the_end(serve: Any) -> None:
    # METRIC-2: once a second while requests run, and at once after the last one
    if not installed().connector.asked_for_stats:
        pytest.skip("read together with the stats of a worker, once a second")
    engine, front = serve(lane.connector_config(cpu_blocks=64))
    connector = engine.scheduler.connector
    connector._scheduler_side._next_stats = math.inf
    connector.block_pool_view.touch_blocks([40, 41])
    engine.add("only", TOKENS)
    engine.step()
    assert connector.get_kv_connector_stats() is None
    assert front.value("held_references") in (None, 0)
    engine.run()
    assert front.value("held_references") == 2
    assert front.value("stores") == 1


def test_every_series_starts_before_its_first_event(serve: Any) -> None:
    # METRIC-1, METRIC-3
    needs_prometheus()
    _, front = serve(lane.connector_config(cpu_blocks=64))
    assert {front.value(name) for name in (*GAUGES, *COUNTERS)} == {0}


def test_series_of_vllms_multi_connector_start_at_the_first_step(serve: Any) -> None:
    # METRIC-3: up to 0.21 with the front end; later releases pass it one child of a class
    needs_prometheus()
    other = f"{FAULTY}:FailingConnector"
    children = (lane.connector_config(cpu_blocks=64), lane.connector_config(other, cpu_blocks=64))
    engine, front = serve(lane.multi_config(*children))
    assert {front.value(name) for name in (*GAUGES, *COUNTERS)} == {0}
    for one in engine.worker._connectors:
        one._worker_side._next_stats = 0.0
    engine.add("first", TOKENS)
    engine.step()
    engine.run()
    assert None not in {front.value(name, other) for name in (*GAUGES, *COUNTERS)}


def test_failed_loads_and_skipped_blocks_are_counted(serve: Any) -> None:
    needs_prometheus()
    if not lane.can_fail_loads():
        pytest.skip("0.11.0 cannot report a failed load")
    target = f"{FAULTY}:FailingConnector"
    engine, front = serve(lane.connector_config(target, cpu_blocks=4))
    for name in ("first", "again", "last"):
        engine.worker._worker_side._next_stats = 0.0
        engine.add(name, TOKENS)
        engine.run()
        assert engine.scheduler.reset_prefix_cache()
    assert front.value("failed_loads", target) == front.value("loads", target) >= 1
    assert front.value("skipped_blocks", target) >= 2


def test_children_of_vllms_multi_connector_have_one_series(serve: Any) -> None:
    """Two children of one target are one series: counters and holds are added."""
    needs_prometheus()
    child = lane.connector_config(cpu_blocks=64)
    engine, front = serve(lane.multi_config(child, child))
    for one in engine.scheduler.connector._connectors:
        if one._bound_view is None:
            pytest.skip("only a ViewScheduler binds children in this release")
        one.block_pool_view.touch_blocks([40])
    for name in ("first", "last"):
        for one in engine.worker._connectors:
            one._worker_side._next_stats = 0.0
        engine.add(name, TOKENS)
        engine.run()
    assert front.value("stores") == 2
    assert front.value("held_references") == 2
    assert "stores': 2" in front.logged()


def test_every_metric_has_a_source(serve: Any) -> None:
    """Every exported metric is counted: a typo would keep it at zero forever."""
    engine, _ = serve(lane.connector_config(cpu_blocks=64))
    connector = engine.scheduler.connector
    side = connector._scheduler_side
    connector.block_pool_view.touch_blocks([5])
    named = set(side.meter.values(side.half, connector.block_pool_view, 0.0)) | {"faults"}
    counts = {
        f"{prefix}{kind}{suffix}"
        for kind in ("loads", "stores")
        for prefix, suffix in (("", ""), ("failed_", ""), ("", "_in_flight"))
    }
    assert named | counts | {"loaded_bytes", "stored_bytes"} == {*GAUGES, *COUNTERS}
    assert not Meter(1).values(side.half, None, 0.0).keys() - COUNTERS.keys()


def test_an_old_hold_is_logged(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine, _ = serve(lane.connector_config(cpu_blocks=64))
    connector = engine.scheduler.connector
    view = connector.block_pool_view
    seconds = 0.0
    view.now = view._view.clock = lambda: seconds

    def steps(now: float) -> list[str]:
        nonlocal seconds
        seconds = now
        caplog.clear()
        engine.step()
        return [each.getMessage() for each in caplog.records if "holds" in each.getMessage()]

    half = connector._scheduler_side.half
    finish = half.on_request_finished

    def leak(request: Any, block_ids: Any, reason: Any) -> None:
        view.touch_blocks([block_ids[0][0]])
        finish(request, block_ids, reason)

    half.on_request_finished = leak
    engine.add("careless", TOKENS)
    engine.run()
    view.touch_blocks([42])
    assert not steps(20.0)
    lines = sorted(steps(75.0), key=lambda line: "careless" not in line)
    assert len(lines) == 2
    assert all(f"held for long: {EXAMPLE!r} holds 1 references for" in line for line in lines)
    assert "request 'careless', job 'none in flight'" in lines[0]
    assert "blocks [42]" in lines[1]
    assert not steps(100.0), "less than a minute later"
    assert len(steps(140.0)) == 2
    assert not steps(220.0), "less than two minutes later"
    assert len(steps(270.0)) == 2
    view.free_blocks([next(iter(set(view.held_blocks()) - {42}))])
    assert len(steps(520.0)) == 1
    view.free_blocks([42])


def test_a_job_that_never_ends_is_logged(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The worker half died without an error."""
    engine, _ = serve(lane.connector_config(cpu_blocks=64))
    connector = engine.scheduler.connector
    engine.worker._worker_side._half.get_finished = list
    engine.add("r", TOKENS)
    for _ in range(8):
        engine.step()
    begun = connector._scheduler_side.meter.begun
    assert begun
    begun.update(dict.fromkeys(begun, time.monotonic() - 75))
    later = time.monotonic() + 75
    connector.block_pool_view.now = lambda: later
    engine.step()
    assert f"job 0 of {EXAMPLE} (request None) has not ended for 75." in caplog.text
    assert "[0] in flight" in caplog.text, "the line of the hold names its job"
