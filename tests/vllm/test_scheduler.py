"""KVViewConnector under the real Scheduler of the installed vLLM, worker simulated."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(  # a submodule: this very folder is named vllm
    "vllm.version",
    reason="needs vLLM's Python sources: tests/vllm/sources.py",
    exc_type=ImportError,
)

import engine as lane  # type: ignore[import-not-found]
from kvview import (
    MEDIUM_CPU,
    ConfigError,
    ConnectorError,
    GuardedView,
    OffloadingEvent,
    PinBudgetExceeded,
    StepInfo,
    StepPlan,
    ViewClosedError,
    ViewNotBoundError,
    make_offload_key,
)

FAULTY = Path(__file__).with_name("faulty_connectors.py")
TOKENS = range(10, 10 + 6 * lane.BLOCK_SIZE + 4)
HIT_TOKENS = 6 * lane.BLOCK_SIZE
OTHER_TOKENS = range(200, 200 + 6 * lane.BLOCK_SIZE + 4)

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
    """One request leaves its KV with the connector; the GPU's is overwritten."""
    engine.add("first", tokens)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    engine.scribble()


@pytest.mark.parametrize("windows", [(None,), (None, lane.WINDOW)], ids=["one group", "two groups"])
def test_stored_reset_loaded(make_engine: MakeEngine, windows: tuple[int | None, ...]) -> None:
    if len(windows) > 1 and lane.refuses_several_groups():
        pytest.skip("this release takes one KV-cache group only beside a connector")
    engine = make_engine(windows=windows)
    free = engine.num_free_blocks()
    serve_and_forget(engine)
    assert len(side(engine).half.slots) >= 6
    assert engine.num_free_blocks() == free

    again = engine.add("again", TOKENS)
    engine.run()
    assert again.is_finished()
    loads = len(windows) == 1 or side(engine)._release.null_window_blocks  # SCHED-5
    assert engine.hits == {"first": 0, "again": HIT_TOKENS if loads else 0}
    assert engine.num_free_blocks() == free
    assert not side(engine).has_pending_work()
    assert not side(engine)._tracked


def test_late_reports(make_engine: MakeEngine) -> None:
    # MSG-1, WORK-1
    engine = make_engine(lane.connector_config(f"{FAULTY}:SlowConnector", cpu_blocks=64))
    free = engine.num_free_blocks()
    serve_and_forget(engine)
    for index in range(3):
        engine.add(f"again {index}", TOKENS)
        engine.add(f"other {index}", OTHER_TOKENS)
    engine.run()
    assert engine.hits["again 0"] == HIT_TOKENS
    assert engine.num_free_blocks() == free
    assert not side(engine).has_pending_work()


def test_a_corrupt_block_is_seen(make_engine: MakeEngine) -> None:
    engine = make_engine()
    serve_and_forget(engine)
    engine.worker._worker_side._half.host[0].zero_()
    engine.add("again", TOKENS)
    with pytest.raises(AssertionError, match="wrong bytes"):
        engine.run()


def test_abort_during_a_load(make_engine: MakeEngine) -> None:
    # LOAD-1
    engine = make_engine()
    if not side(engine).asynchronous:
        pytest.skip("on this release a load ends within its step")
    free = engine.num_free_blocks()
    serve_and_forget(engine)
    engine.hold_loads = True
    engine.add("again", TOKENS)
    engine.step()
    engine.abort("again")
    assert engine.num_free_blocks() < free, "the load still writes"
    engine.step()
    engine.hold_loads = False
    engine.step()
    engine.add("other", OTHER_TOKENS)
    engine.run()
    assert engine.num_free_blocks() == free
    assert not side(engine).has_pending_work()


def test_a_failed_load_is_computed_instead(make_engine: MakeEngine) -> None:
    # LOAD-2, WORK-2
    if not lane.can_fail_loads():
        pytest.skip("0.11.0 has no word for a load that failed")
    engine = make_engine(lane.connector_config(f"{FAULTY}:FailingConnector", cpu_blocks=64))
    free = engine.num_free_blocks()
    serve_and_forget(engine)
    again = engine.add("again", TOKENS)
    engine.run()
    assert again.is_finished()
    if side(engine).asynchronous:  # else the step that loads has begun to compute
        assert engine.hits["again"] == 0
    assert engine.num_free_blocks() == free


def test_a_failed_load_is_not_tried_again_by_a_sibling(make_engine: MakeEngine) -> None:
    # SCHED-2
    if not lane.can_fail_loads():
        pytest.skip("0.11.0 has no word for a load that failed")
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


@pytest.mark.parametrize("connector", ["", "SlowConnector"], ids=["at once", "late"])
def test_preempted_requests_come_back(make_engine: MakeEngine, connector: str) -> None:
    target = f"{FAULTY}:{connector}" if connector else lane.EXAMPLE_CONNECTOR
    engine = make_engine(lane.connector_config(target, cpu_blocks=64), num_blocks=16)
    free = engine.num_free_blocks()
    half = side(engine).half
    preempted: list[str] = []
    tell = half.on_request_preempted

    def heard(request: Any, block_ids: Any) -> None:
        preempted.append(request.request_id)
        tell(request, block_ids)

    half.on_request_preempted = heard
    for index in range(3):
        engine.add(f"r{index}", range(index * 100, index * 100 + 80), max_tokens=40)
    engine.run(limit=400)
    assert all(request.is_finished() for request in engine.requests.values())
    assert preempted
    assert engine.num_free_blocks() == free
    assert not side(engine).has_pending_work()


@pytest.mark.parametrize("windows", [(None,), (None, lane.WINDOW)], ids=["one group", "two groups"])
def test_a_step_shows_the_real_block_tables(
    make_engine: MakeEngine, windows: tuple[int | None, ...]
) -> None:
    # SCHED-1
    if len(windows) > 1 and lane.refuses_several_groups():
        pytest.skip("this release takes one KV-cache group only beside a connector")
    engine = make_engine(windows=windows)
    half = side(engine).half
    plan_step = half.plan_step
    seen = 0

    def look(step: StepInfo) -> StepPlan:
        nonlocal seen
        for shown in step.scheduled:
            request_id = shown.request.request_id
            real = engine.scheduler.kv_cache_manager.get_block_ids(request_id)
            for mine, theirs in zip(shown.block_ids, real, strict=True):
                assert len(mine) == len(theirs)
                wrong = [block for block, is_ in zip(mine, theirs, strict=True) if block != is_]
                assert not any(wrong), "a block that the request does not have any more"
            assert all(block_ids[-1] for block_ids in shown.block_ids)
            assert shown.num_scheduled_tokens > 0
            seen += 1
        plan: StepPlan = plan_step(step)
        return plan

    half.plan_step = look
    engine.add("long", range(40), max_tokens=120)
    engine.add("short", TOKENS, max_tokens=40)
    engine.run(limit=200)
    assert seen >= 150


def test_what_another_request_computes_in_this_step_is_not_there_yet(
    make_engine: MakeEngine,
) -> None:
    # SCHED-3
    engine = make_engine()
    half = side(engine).half
    plan_step = half.plan_step
    computed: list[dict[str, int]] = []

    def look(step: StepInfo) -> StepPlan:
        computed.append({s.request.request_id: s.num_computed_tokens for s in step.scheduled})
        plan: StepPlan = plan_step(step)
        return plan

    half.plan_step = look
    engine.add("one", TOKENS)
    engine.add("other", OTHER_TOKENS)
    engine.add("same", TOKENS)
    engine.step()
    assert engine.hits == {"one": 0, "other": 0, "same": HIT_TOKENS}, "vLLM lets it hit"
    engine.add("later", TOKENS)
    engine.step()
    assert computed[0] == {"one": 0, "other": 0, "same": 0}
    assert computed[1] == dict.fromkeys(("one", "other", "same"), len(TOKENS)) | {
        "later": HIT_TOKENS
    }


def test_a_job_id_in_flight_cannot_be_planned_again(make_engine: MakeEngine) -> None:
    config = lane.connector_config(f"{FAULTY}:SlowConnector", cpu_blocks=64)
    config["kv_connector_extra_config"]["contain_faults"] = False
    engine = make_engine(config)
    half = side(engine).half
    half.job_ids = itertools.repeat(7)
    engine.add("one", TOKENS)
    engine.add("other", OTHER_TOKENS)
    with pytest.raises(ConnectorError, match="CONN-5: job id 7 is in flight"):
        engine.run()


def test_events_carry_the_block_size(make_engine: MakeEngine) -> None:
    engine = make_engine()
    keys = [make_offload_key(bytes([number]) * 32, 0) for number in range(2)]
    side(engine).half.take_events = lambda: [
        OffloadingEvent(keys, MEDIUM_CPU, removed=False),
        OffloadingEvent(keys[:1], MEDIUM_CPU, removed=True),
    ]
    stored, removed = engine.scheduler.connector.take_events()
    assert (type(stored).__name__, stored.block_size) == ("BlockStored", lane.BLOCK_SIZE)
    assert type(removed).__name__ == "BlockRemoved"
    assert removed.block_hashes == stored.block_hashes[:1]
    assert stored.medium == removed.medium == MEDIUM_CPU


def test_children_of_multi_connector_are_bound(make_engine: MakeEngine) -> None:
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


def test_binding_again_is_harmless_and_another_pool_closes_the_view(
    make_engine: MakeEngine, tmp_path: Path
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


def test_what_is_held_at_shutdown_is_logged(
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


def test_a_lease_expires_with_the_steps(make_engine: MakeEngine) -> None:
    engine = make_engine()
    free = engine.num_free_blocks()
    view = side(engine).half.view
    seconds = 0.0
    view.now = lambda: seconds
    view.lease([5], job="peer", ttl=3.0)
    engine.add("first", TOKENS)
    engine.step()
    assert view.held_blocks()[5] == 1
    seconds = 4.0
    engine.run()
    assert view.stats.expired == 1
    assert engine.num_free_blocks() == free


def test_a_missing_view_names_the_flag(make_engine: MakeEngine) -> None:
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
        ({"connector": "no.such.module:Connector"}, "does not import"),
        ({"connector": f"{lane.EXAMPLE}:HostCacheConnector", "options": {"cpu": 1}}, "cpu_blocks"),
    ],
    ids=["unknown key", "no such share", "no such target", "unknown option"],
)
def test_a_typo_is_an_error_at_start(
    make_engine: MakeEngine, wrong: dict[str, Any], message: str
) -> None:
    config = {**lane.connector_config(), "kv_connector_extra_config": wrong}
    with pytest.raises(ConfigError, match=message):
        make_engine(config)


def test_a_promise_without_a_load_is_an_error(make_engine: MakeEngine) -> None:
    # SCHED-4
    config = lane.connector_config(cpu_blocks=64)
    config["kv_connector_extra_config"]["contain_faults"] = False
    engine = make_engine(config)
    serve_and_forget(engine)
    side(engine).half.on_blocks_allocated = lambda *_: None
    engine.add("again", TOKENS)
    with pytest.raises(ConnectorError, match="planned no load"):
        engine.run()
