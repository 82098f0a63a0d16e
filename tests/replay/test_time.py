"""Replays with recorded arrival times: hits and waits depend on time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from random import Random
from typing import Any

import pytest
from typing_extensions import override

from kvview import (
    ConfigError,
    Connector,
    ConnectorError,
    RequestInfo,
    SchedulerConnector,
    StepPlan,
    WorkerConnector,
)
from kvview_reference.replay.arrivals import by_arrival
from kvview_reference.replay.run import ReplayConfig, ReplayReport, replay
from kvview_reference.replay.time_model import TimeModel
from kvview_reference.replay.trace_schemas import TraceRequest
from kvview_reference.replay.traces import open_trace
from kvview_reference.replay.workload import generate_trace
from kvview_reference.store_connector import StoreConnector
from kvview_reference.store_connector.scheduler import StoreScheduler
from tests.replay.replay_oracle import Oracle
from tests.traces import CC, MOONCAKE, trace_file

MOST_APART = 0.5  # points


def play(
    rows: Iterable[TraceRequest],
    block_size: int,
    gpu_blocks: int,
    host_blocks: int,
    model: TimeModel,
) -> ReplayReport:
    options = {"cpu_blocks": host_blocks}
    config = ReplayConfig(gpu_blocks, 8, None, options=options, time=model)
    report = replay(rows, block_size, StoreConnector, config)
    assert report.is_clean
    return report


def sessions(number: int, turns: int, block_size: int = 64) -> list[TraceRequest]:
    """Sessions that grow, each in its own scope, one after another as in a file."""
    random = Random(3)
    rows = []
    for session in range(number):
        at, blocks = random.uniform(0, 200), 20
        for turn in range(turns):
            tokens = blocks * block_size + random.randrange(block_size)
            output = random.randrange(1, 400)
            before = f"{session}/{turn - 1}" if turn else None
            name, ids = f"{session}/{turn}", range(blocks)
            rows.append(TraceRequest(name, at, tokens, output, ids, str(session), 1, before))
            at += random.uniform(1, 120)
            blocks = (tokens + output) // block_size + random.randrange(1, 12)
    return rows


def compare(rows: Sequence[TraceRequest], block_size: int, gpu: int, host: int, **m: Any) -> None:
    model = TimeModel(**m)
    on_gpu, on_host = Oracle(rows, block_size, gpu - 1, host, model).run()
    report = play(iter(rows), block_size, gpu, host, model)
    found = 100 * report.gpu_hit_rate, 100 * report.cpu_hit_rate
    expected = 100 * on_gpu, 100 * on_host
    assert abs(sum(found) - sum(expected)) < MOST_APART, (found, expected)
    assert abs(found[0] - expected[0]) < 2 * MOST_APART, (found, expected)


@pytest.mark.parametrize(
    "times",
    [
        {"speed": 0.2},
        {},
        {"prefill_tokens_per_s": 50_000.0},
        {"speed": 0.3, "store_gb_per_s": 2.0, "load_gb_per_s": 0.5},
    ],
    ids=["idle", "overloaded", "fast", "slow link"],
)
def test_the_oracle_agrees_about_the_generated_workload(times: dict[str, float]) -> None:
    compare(list(generate_trace(num_requests=300)), 512, 1500, 3000, **times)


@pytest.mark.parametrize("speed", [0.3, 1.0, 3.0])
def test_the_oracle_agrees_about_sessions(speed: float) -> None:
    rows = list(by_arrival(sessions(20, 12)))
    compare(rows, 64, 1200, 2500, speed=speed)


def test_the_oracle_agrees_about_a_real_trace() -> None:
    rows = list(open_trace(trace_file(MOONCAKE)))[:800]
    compare(rows, 512, 2049, 5000)


@pytest.mark.slow
def test_the_oracle_agrees_about_real_sessions() -> None:
    rows = [row for row in open_trace(trace_file(CC)) if row.line in (1, 2, 6, 8, 11, 14)]
    # With 4,096 blocks some are preempted, which the oracle does not model.
    compare(list(by_arrival(rows)), 64, 6000, 8000)


def test_a_replay_is_deterministic() -> None:
    def once() -> dict[str, object]:
        rows = generate_trace(num_requests=120)
        found = asdict(play(rows, 512, 400, 500, TimeModel(speed=0.5)))
        del found["seconds"], found["blocks_per_s"]
        return found

    assert once() == once()


# --- arrival times ---


def row(
    name: str, at: float, ids: Sequence[int], output: int = 1, continues: str | None = None
) -> TraceRequest:
    return TraceRequest(name, at, 10 * len(ids), output, tuple(ids), "", 1, continues)


SECOND = TimeModel(10.0, 0.1, 1.0, 1.0, token_bytes=100_000_000, step_tokens=10)
"""A block of ten tokens is computed in a second, and moved in one."""


def test_hits_depend_on_the_time_between_requests() -> None:
    first, others = range(4), [row(str(n), 20 + n, range(10 * n, 10 * n + 4)) for n in range(1, 5)]

    def again(at: float, host_blocks: int) -> tuple[int, int]:
        rows = [row("a", 0, first), *(one for one in others if one.arrival_s < at)]
        report = play([*rows, row("b", at, first)], 10, 13, host_blocks, SECOND)
        assert report.blocks == 4 * len(rows) + 4
        return report.gpu_hit_blocks, report.cpu_hit_blocks

    assert again(20, 12) == (3, 0)  # the last block of a prompt is always computed
    assert again(100, 100) == (0, 3)  # the others have evicted it from the GPU
    assert again(100, 12) == (0, 0)  # and from a host of the same size


def test_slow_loads_delay_requests() -> None:
    rows = [row(str(n), 20 * n, range(10 * n, 10 * n + 4)) for n in range(5)]
    rows.append(row("b", 400, range(4)))
    fast, slow = (
        play(rows, 10, 13, 100, replace(SECOND, load_gb_per_s=rate)) for rate in (1.0, 0.1)
    )
    assert fast.cpu_hit_blocks == slow.cpu_hit_blocks == 3
    assert slow.max_wait_s == pytest.approx(30.0)  # 3 blocks of 10 s each
    assert fast.max_wait_s == pytest.approx(3.0)
    assert (slow.simulated_seconds or 0) - (fast.simulated_seconds or 0) == pytest.approx(27)


def test_speed_changes_arrivals_only() -> None:
    rows = [row(str(n), 100 * n, range(10 * n, 10 * n + 4)) for n in range(5)]
    report = play(rows, 10, 60, 100, replace(SECOND, speed=4.0))
    assert report.trace_seconds == 100.0
    assert report.simulated_seconds == pytest.approx(106.6, abs=0.1)  # compute, a token, stores
    hurried = play(rows, 10, 60, 100, replace(SECOND, speed=1e9))
    assert hurried.simulated_seconds == pytest.approx(20, abs=3)  # 20 blocks, a second each
    assert hurried.max_wait_s == pytest.approx(16, abs=1)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The starts and ends of requests."""
    lines: list[str] = []
    for sign, name in (("+", "on_blocks_allocated"), ("-", "on_request_finished")):
        hook = getattr(StoreScheduler, name)

        def logged(
            half: Any, request: RequestInfo, *args: Any, sign: str = sign, hook: Any = hook
        ) -> None:
            lines.append(sign + request.request_id.split("#")[0])
            hook(half, request, *args)

        monkeypatch.setattr(StoreScheduler, name, logged)
    return lines


@pytest.mark.parametrize("closed_loop", [None, 16], ids=["time", "closed loop"])
def test_a_turn_never_starts_before_the_previous_turn_has_ended(
    closed_loop: int | None, log: list[str]
) -> None:
    rows = list(by_arrival(sessions(5, 20)))
    model = TimeModel(speed=20.0)
    config = ReplayConfig(3000, 8, closed_loop, options={"cpu_blocks": 100}, time=model)
    replay(rows, 64, StoreConnector, config)
    assert len(log) == 2 * len(rows)
    started = [name for name in log if name[0] == "+"]
    assert started != [f"+{one.request_id}" for one in rows], (
        "no turn had to wait, so the test proves nothing"
    )
    for one in rows:
        if one.continues is not None:
            ended = log.index(f"-{one.continues}")
            assert ended < log.index(f"+{one.request_id}")


def test_a_late_turn_waits_behind_the_requests_that_arrived_meanwhile(log: list[str]) -> None:
    rows = [row("a", 0, range(4), 20), row("b", 1, (0, 1, 2, 3, 4, 5, 6), 1, "a")]
    rows += [row(str(n), 2 + n, range(10 * n, 10 * n + 4)) for n in range(1, 9)]
    play(rows, 10, 100, 100, SECOND)
    started = [name[1:] for name in log if name[0] == "+"]
    assert started.index("b") == 5  # at 6 s, when 4 had arrived
    assert [name for name in started if name != "b"] == ["a", *map(str, range(1, 9))]


@pytest.mark.parametrize("closed_loop", [None, 2])
def test_a_request_that_does_not_fit_is_counted_and_skipped(closed_loop: int | None) -> None:
    rows = [row("a", 0, range(4)), row("b", 1, range(50)), row("c", 2, range(4), 1, "b")]
    config = ReplayConfig(20, 8, closed_loop)
    report = replay(rows, 10, StoreConnector, config)
    assert (report.requests, report.requests_too_large, report.blocks) == (2, 1, 8)
    with pytest.raises(ConfigError, match=r"line 1 of the trace: .* use more GPU blocks"):
        replay([rows[1]], 10, StoreConnector, config)


def test_rows_out_of_order_arrive_late_and_none_is_lost() -> None:
    rows = [row("a", 50, range(4)), row("b", 0, range(4)), row("c", 60, range(4))]
    report = play(rows, 10, 20, 100, SECOND)
    assert (report.requests, report.trace_seconds) == (3, 10.0)
    assert play([], 10, 20, 100, SECOND).requests == 0


@pytest.mark.parametrize(
    "options", [{"speed": 1e-16}, {"decode_step_s": 1e-300}, {"prefill_tokens_per_s": 1e-300}]
)
def test_a_time_that_no_step_changes_is_refused(options: dict[str, Any]) -> None:
    rows = [row(name, at, range(4)) for name, at in (("a", 0), ("b", 50), ("c", 50))]
    with pytest.raises(ConfigError, match=r"too late for steps of .*: correct the trace's time"):
        play(rows, 10, 20, 100, replace(TimeModel(), **options))


class Silent(Connector):
    """Never reports a job."""

    contract_version = "1.0"

    def make_scheduler(self) -> SchedulerConnector:
        return StoreConnector(replace(self.config, options={"cpu_blocks": 100})).make_scheduler()

    def make_worker(self) -> WorkerConnector:
        return _SilentWorker()


class _SilentWorker(WorkerConnector):
    @override
    def start_plan(self, plan: StepPlan) -> None:
        pass


def test_a_connector_that_never_reports_is_an_error() -> None:
    rows = [row(str(n), 20 * n, range(10 * n, 10 * n + 4)) for n in range(5)]
    config = ReplayConfig(30, 8, None, time=SECOND)
    with pytest.raises(ConnectorError, match=r"CONN-3: jobs .* were never reported"):
        replay(rows, 10, Silent, config)


def test_an_engine_that_is_far_behind() -> None:
    rows = (row(str(n), 0.0, range(10 * n, 10 * n + 4)) for n in range(300))
    report = play(rows, 10, 50, 100, SECOND)
    assert report.requests == 300
    assert report.mean_wait_s == pytest.approx(600, rel=0.02)
