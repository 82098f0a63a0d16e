"""KVViewConnector under the real Scheduler of vLLM: settings, binding, the guard of the view.

All else is in ``test_simulation.py``, and errors of connectors in ``test_hook_errors.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvview import (
    ConfigError,
    GuardedView,
    PinBudgetExceeded,
    UnsupportedContractError,
    ViewClosedError,
    ViewNotBoundError,
)
from kvview_vllm.simulation.scheduler.capabilities import can_fail_loads
from kvview_vllm.simulation.scheduler.cpu_scheduler import connector_config, multi_config
from tests.vllm.server import EXAMPLE, FAULTY, Server


def test_another_child_does_not_retry_a_failed_load() -> None:
    # SCHED-2
    if not can_fail_loads():
        pytest.skip("0.11.0 cannot report a failed load")
    targets = f"{FAULTY}:FailingConnector", EXAMPLE
    server = Server(multi_config(*(connector_config(one, cpu_blocks=64) for one in targets)))
    server.ask("first")
    server.run()
    server.evict()
    again = server.ask("again")
    server.run()
    assert again.is_finished()
    if server.connector._connectors[0]._scheduler_side.asynchronous:
        assert server.hits["again"] == 0


def test_binding_another_pool_closes_the_view_and_binding_again_does_not() -> None:
    # BIND-2
    server = Server()
    connector = server.connector
    view = connector.block_pool_view
    connector.bind_gpu_block_pool(server.scheduler.pool)
    connector.bind_kv_cache_manager(server.scheduler.manager)
    assert connector.block_pool_view is view
    connector.bind_gpu_block_pool(Server().scheduler.pool)
    assert connector.block_pool_view is not view


def test_the_view_is_guarded() -> None:
    config = connector_config(EXAMPLE, cpu_blocks=64)
    config["kv_connector_extra_config"] |= {"pin_budget": 0.25, "trace_holds": True}
    view = Server(config).half.view
    assert isinstance(view, GuardedView)
    held = list(range(1, 1 + view.num_blocks // 4))
    view.touch_blocks(held)
    with pytest.raises(PinBudgetExceeded, match=f"its budget is {len(held)}"):
        view.touch_blocks([len(held) + 1])
    (leak,) = view.leaks()
    assert "test_scheduler.py" in str(leak.taken_at)


@pytest.mark.parametrize(
    "hook", ["on_blocks_allocated", "on_request_preempted", "on_request_finished"]
)
def test_a_hold_is_attributed_to_the_request_of_the_hook(hook: str) -> None:
    server = Server(num_blocks=16)
    view, planned = server.connector.block_pool_view, getattr(server.half, hook)
    attributed: list[tuple[str, str | None]] = []

    def hold_first(request: Any, block_ids: Any, *args: Any) -> None:
        before = set(view.held_blocks())
        block = next(block for block in block_ids[0] if block and block not in before)
        view.touch_blocks([block])
        (leak,) = [leak for leak in view.leaks() if block in leak.block_ids]
        attributed.append((request.request_id, leak.request_id))
        view.free_blocks([block])
        planned(request, block_ids, *args)

    setattr(server.half, hook, hold_first)
    server.ask("one", 64)
    server.ask("other", 64, family=2)
    server.run()
    assert attributed
    assert all(called == named for called, named in attributed)


def test_holds_at_shutdown_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    half = server.half
    half.view.touch_blocks([7])

    def fail() -> None:
        raise RuntimeError("no shutdown")

    half.shutdown = fail
    with pytest.raises(RuntimeError, match="no shutdown"):
        server.connector.shutdown()
    assert "holds 1 references" in caplog.text
    assert "blocks [7]" in caplog.text
    with pytest.raises(ViewClosedError):
        half.view.free_blocks([7])


def test_an_unbound_connector_names_the_flag() -> None:
    # BIND-3
    server = Server()
    server.connector.close_block_pool_view()
    server.ask("first")
    with pytest.raises(ViewNotBoundError, match="--scheduler-cls kvview_vllm"):
        server.step()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"conector": "x:Y"}, "conector: .*Known options: connector, options, pin_budget, trace"),
        ({"connector": "x:Y", "pin_budget": 2}, "pin_budget"),
        ({"connector": "no.such.module:Connector"}, "cannot be imported"),
        ({"connector": EXAMPLE, "options": {"cpu": 1}}, "cpu_blocks"),
        ({"connector": f"{FAULTY}:LaterConnector"}, r"LaterConnector was .* contract 1\.7"),
    ],
    ids=["unknown key", "wrong share", "unknown target", "unknown option", "later contract"],
)
def test_a_wrong_setting_is_an_error_at_start(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, UnsupportedContractError), match=message):
        Server({**connector_config(EXAMPLE), "kv_connector_extra_config": wrong})
