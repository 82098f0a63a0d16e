"""Metrics through vLLM's own classes: scheduler, wire, Prometheus registry and stats log."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvview_vllm.metrics.connector_metrics import COUNTERS, GAUGES, Meter
from kvview_vllm.releases import installed
from kvview_vllm.simulation.scheduler.capabilities import can_fail_loads
from kvview_vllm.simulation.scheduler.cpu_scheduler import connector_config, multi_config
from tests.vllm.front_end import PROM, FrontEnd
from tests.vllm.server import EXAMPLE, FAULTY, Server

FAILING = f"{FAULTY}:FailingConnector"
CHILD = connector_config(EXAMPLE, cpu_blocks=64)
needs_prometheus = pytest.mark.skipif(
    PROM is None, reason="0.11.0 has only the log line of a connector, and no metrics"
)


@pytest.fixture(autouse=True)
def _forget_metrics() -> Iterator[None]:
    yield
    importlib.import_module("vllm.v1.metrics.prometheus").unregister_vllm_metrics()


def serve(config: dict[str, Any] = CHILD) -> tuple[Server, FrontEnd]:
    server = Server(config)
    return server, FrontEnd(server, EXAMPLE)


def run(server: Server, *names: str) -> None:
    """Serve requests one after another, each with stats; up to 0.23 they come once a second."""
    workers = getattr(server.worker, "_connectors", [server.worker])
    for name in names:
        for worker in workers:
            worker._worker_side._next_stats = 0.0
        server.ask(name)
        server.run()


def test_loads_and_stores_are_counted() -> None:
    server, front = serve()
    run(server, "first")
    server.evict()
    run(server, "again", "more")
    assert f"{EXAMPLE} stores=1" in front.logged()
    if PROM is None:
        return
    page = sum(server.connector._scheduler_side.meter.page_bytes)
    assert front.value("stores") == 1
    assert front.value("stored_bytes") == 6 * page
    assert front.value("loads") == front.value("loaded_bytes") / (6 * page) >= 1
    assert front.value("failed_loads") in (None, 0)
    for name in ("loads_in_flight", "stores_in_flight", "held_references"):
        assert front.value(name) in (None, 0)


@needs_prometheus
def test_holds_are_reported_while_the_engine_is_idle() -> None:
    # METRIC-2
    server, front = serve()
    before = time.time()
    server.connector.block_pool_view.touch_blocks([40, 41, 42])
    run(server, "first", "last")
    assert front.value("held_references") == 3
    since = front.value("oldest_hold_timestamp_seconds")
    assert since is not None
    assert before - 1 <= since <= time.time()


@pytest.mark.skipif(
    not installed().connector.asked_for_stats,
    reason="read together with the stats of a worker, once a second",
)
def test_stats_that_wait_for_their_second_are_reported_at_the_end() -> None:
    # METRIC-2: once a second while requests run, and at once after the last one
    server, front = serve()
    connector = server.connector
    connector._scheduler_side._next_stats = math.inf
    connector.block_pool_view.touch_blocks([40, 41])
    server.ask("only")
    server.step()
    assert connector.get_kv_connector_stats() is None
    assert front.value("held_references") in (None, 0)
    server.run()
    assert front.value("held_references") == 2
    assert front.value("stores") == 1


@needs_prometheus
def test_every_series_starts_before_its_first_event() -> None:
    # METRIC-1, METRIC-3
    _, front = serve()
    assert {front.value(name) for name in (*GAUGES, *COUNTERS)} == {0}


@needs_prometheus
def test_series_of_vllms_multi_connector_start_at_the_first_step() -> None:
    # METRIC-3: up to 0.21 with the front end; later releases pass it one child of a class
    server, front = serve(multi_config(CHILD, connector_config(FAILING, cpu_blocks=64)))
    assert {front.value(name) for name in (*GAUGES, *COUNTERS)} == {0}
    run(server, "first")
    assert None not in {front.value(name, FAILING) for name in (*GAUGES, *COUNTERS)}


@needs_prometheus
def test_children_of_one_target_are_one_series() -> None:
    """Counters and holds are added."""
    server, front = serve(multi_config(CHILD, CHILD))
    for one in server.connector._connectors:
        if one._bound_view is None:
            pytest.skip("only a ViewScheduler binds children in this release")
        one.block_pool_view.touch_blocks([40])
    run(server, "first", "last")
    assert front.value("stores") == 2
    assert front.value("held_references") == 2
    assert "stores': 2" in front.logged()


@needs_prometheus
@pytest.mark.skipif(not can_fail_loads(), reason="0.11.0 cannot report a failed load")
def test_failed_loads_and_skipped_blocks_are_counted() -> None:
    server, front = serve(connector_config(FAILING, cpu_blocks=4))
    for name in ("first", "again", "last"):
        run(server, name)
        server.evict()
    assert front.value("failed_loads", FAILING) == front.value("loads", FAILING)
    assert (front.value("loads", FAILING) or 0) >= 1
    assert (front.value("skipped_blocks", FAILING) or 0) >= 2


def test_every_metric_has_a_source() -> None:
    """Every exported metric is counted: a typo would keep it at zero forever."""
    server = Server()
    side = server.connector._scheduler_side
    view = server.connector.block_pool_view
    view.touch_blocks([5])
    named = set(side.meter.values(side.half, view, 0.0)) | {"faults"}
    counts = {
        f"{prefix}{kind}{suffix}"
        for kind in ("loads", "stores")
        for prefix, suffix in (("", ""), ("failed_", ""), ("", "_in_flight"))
    }
    assert named | counts | {"loaded_bytes", "stored_bytes"} == {*GAUGES, *COUNTERS}
    assert not Meter(1).values(side.half, None, 0.0).keys() - COUNTERS.keys()


def test_an_old_hold_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    view = server.connector.block_pool_view
    seconds = 0.0
    view.now = view._view.clock = lambda: seconds

    def lines(now: float) -> list[str]:
        nonlocal seconds
        seconds = now
        caplog.clear()
        server.step()
        return [each.getMessage() for each in caplog.records if "holds" in each.getMessage()]

    finish = server.half.on_request_finished

    def leak(request: Any, block_ids: Any, reason: Any) -> None:
        view.touch_blocks([block_ids[0][0]])
        finish(request, block_ids, reason)

    server.half.on_request_finished = leak
    server.ask("careless")
    server.run()
    view.touch_blocks([42])
    assert not lines(20.0)
    found = sorted(lines(75.0), key=lambda line: "careless" not in line)
    assert len(found) == 2
    assert all(f"held for long: {EXAMPLE!r} holds 1 references for" in line for line in found)
    assert "request 'careless', job 'none in flight'" in found[0]
    assert "blocks [42]" in found[1]
    # Less than a minute later, then less than two minutes later.
    assert [len(lines(now)) for now in (100.0, 140.0, 220.0, 270.0)] == [0, 2, 0, 2]
    view.free_blocks([next(iter(set(view.held_blocks()) - {42}))])
    assert len(lines(520.0)) == 1


def test_a_job_that_never_ends_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The worker half died without an error."""
    server = Server()
    server.worker._worker_side._half.get_finished = list
    server.ask("r")
    for _ in range(8):
        server.step()
    begun = server.connector._scheduler_side.meter.begun
    assert begun
    begun.update(dict.fromkeys(begun, time.monotonic() - 75))
    later = time.monotonic() + 75
    server.connector.block_pool_view.now = lambda: later
    server.step()
    assert f"job 0 of {EXAMPLE} (request None) has not ended for 75." in caplog.text
    assert "[0] in flight" in caplog.text, "the line of the hold names its job"
