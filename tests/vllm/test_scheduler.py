"""KVViewConnector under the real Scheduler of vLLM, with a simulated worker.

Late, failed and lost transfers, aborts, preemptions and resets are in ``test_simulation.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import engine as lane  # type: ignore[import-not-found]
from kvview import (
    ConfigError,
    ConnectorError,
    GuardedView,
    PinBudgetExceeded,
    ViewClosedError,
    ViewNotBoundError,
)

FAULTY = Path(__file__).with_name("faulty_connectors.py")
TOKENS = range(10, 10 + 6 * lane.BLOCK_SIZE + 4)
HIT_TOKENS = 6 * lane.BLOCK_SIZE

MakeEngine = Callable[..., lane.Engine]


@pytest.fixture
def make_engine(tmp_path: Path) -> MakeEngine:
    def make(transfer_config: dict[str, Any] | None = None, **options: Any) -> lane.Engine:
        config = transfer_config or lane.connector_config(cpu_blocks=64)
        return lane.Engine(tmp_path / "model", config, **options)

    return make


def side(engine: lane.Engine) -> Any:
    return engine.scheduler.connector._scheduler_side


def serve_and_forget(engine: lane.Engine, tokens: range = TOKENS) -> None:
    """Store the KV of one request with the connector, and overwrite the KV on the GPU."""
    engine.add("first", tokens)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    engine.scribble()


def test_another_child_does_not_retry_a_failed_load(make_engine: MakeEngine) -> None:
    # SCHED-2
    if not lane.can_fail_loads():
        pytest.skip("0.11.0 cannot report a failed load")
    failing = lane.connector_config(f"{FAULTY}:FailingConnector", cpu_blocks=64)
    engine = make_engine(lane.multi_config(failing, lane.connector_config(cpu_blocks=64)))
    free = engine.num_free_blocks()
    serve_and_forget(engine)
    again = engine.add("again", TOKENS)
    engine.run()
    assert again.is_finished()
    children = engine.scheduler.connector._connectors
    if children[0]._scheduler_side.asynchronous:
        assert engine.hits["again"] == 0
    assert engine.num_free_blocks() == free


def test_the_children_of_multi_connector_are_bound(make_engine: MakeEngine) -> None:
    # BIND-1
    child = lane.connector_config(cpu_blocks=64)
    engine = make_engine(lane.multi_config(child, child))
    free = engine.num_free_blocks()
    children = engine.scheduler.connector._connectors
    assert len(children) == 2
    assert all(child.block_pool_view is not None for child in children)
    serve_and_forget(engine)
    assert all(len(child._scheduler_side.half.slots) >= 6 for child in children)
    again = engine.add("again", TOKENS)
    engine.run()
    assert again.is_finished()
    assert engine.hits["again"] == HIT_TOKENS
    assert engine.num_free_blocks() == free


def test_binding_another_pool_closes_the_view_and_binding_again_does_not(
    make_engine: MakeEngine,
) -> None:
    # BIND-2
    engine = make_engine()
    connector = engine.scheduler.connector
    view = connector.block_pool_view
    connector.bind_gpu_block_pool(engine.pool)
    connector.bind_kv_cache_manager(engine.scheduler.kv_cache_manager)
    assert connector.block_pool_view is view
    connector.bind_gpu_block_pool(make_engine().pool)
    assert connector.block_pool_view is not view


def test_the_view_is_guarded(make_engine: MakeEngine) -> None:
    config = lane.connector_config(cpu_blocks=64)
    config["kv_connector_extra_config"] |= {"pin_budget": 0.25, "trace_holds": True}
    engine = make_engine(config)
    view = side(engine).half.view
    assert isinstance(view, GuardedView)
    held = list(range(1, 1 + view.num_blocks // 4))
    view.touch_blocks(held)
    with pytest.raises(PinBudgetExceeded, match=f"its budget is {len(held)}"):
        view.touch_blocks([len(held) + 1])
    (leak,) = view.leaks()
    assert leak.taken_at is not None
    assert Path(__file__).name in leak.taken_at
    view.free_blocks(held)
    assert not view.leaks()


def test_holds_at_shutdown_are_logged(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    half = side(engine).half
    half.view.touch_blocks([7])

    def fail() -> None:
        raise RuntimeError("no shutdown")

    half.shutdown = fail
    with pytest.raises(RuntimeError, match="no shutdown"):
        engine.scheduler.connector.shutdown()
    assert "holds 1 references" in caplog.text
    assert "blocks [7]" in caplog.text
    with pytest.raises(ViewClosedError):
        half.view.free_blocks([7])


def test_an_unbound_connector_names_the_flag(make_engine: MakeEngine) -> None:
    # BIND-3
    engine = make_engine()
    engine.scheduler.connector.close_block_pool_view()
    engine.add("first", TOKENS)
    with pytest.raises(ViewNotBoundError, match="--scheduler-cls kvview_vllm"):
        engine.step()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"conector": "x:Y"}, "conector: .*Known options: connector, options, pin_budget, trace"),
        ({"connector": "x:Y", "pin_budget": 2}, "pin_budget"),
        ({"connector": "no.such.module:Connector"}, "cannot be imported"),
        ({"connector": f"{lane.EXAMPLE}:HostCacheConnector", "options": {"cpu": 1}}, "cpu_blocks"),
    ],
    ids=["unknown key", "wrong share", "unknown target", "unknown option"],
)
def test_a_wrong_setting_is_an_error_at_start(
    make_engine: MakeEngine, wrong: dict[str, Any], message: str
) -> None:
    config = {**lane.connector_config(), "kv_connector_extra_config": wrong}
    with pytest.raises(ConfigError, match=message):
        make_engine(config)


def test_a_promise_without_a_load_is_refused(make_engine: MakeEngine) -> None:
    # SCHED-4
    config = lane.connector_config(cpu_blocks=64)
    config["kv_connector_extra_config"]["contain_faults"] = False
    engine = make_engine(config)
    serve_and_forget(engine)
    side(engine).half.on_blocks_allocated = lambda *_: None
    engine.add("again", TOKENS)
    with pytest.raises(ConnectorError, match="planned no load"):
        engine.run()
