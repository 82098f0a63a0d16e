"""Asynchronous scheduling: counts are of launched steps, whose bytes and tokens come later."""

from __future__ import annotations

import pytest

from kvview import (
    BlockIds,
    CacheGeometry,
    Connector,
    ConnectorConfig,
    FinishReason,
    RequestInfo,
    SchedulerConnector,
    StepInfo,
    StepPlan,
)
from kvview.testing.connector.run.compute_stream import StepStream
from kvview_reference.engine import Engine, chain_hashes
from kvview_reference.engine.request import Request, Status

SIZE = 4
DEPTHS = [2, 3]


# --- the engine ---


class Seen(Connector):
    """Notes the number of computed tokens of every call."""

    def make_scheduler(self) -> SchedulerConnector:
        return Noting()


class Noting(SchedulerConnector):
    def __init__(self) -> None:
        self.steps: list[tuple[int, int, int, int]] = []
        self.ends: list[tuple[int, int, FinishReason]] = []
        self.preempted: list[tuple[int, int]] = []

    def plan_step(self, step: StepInfo) -> StepPlan:
        for running in step.scheduled:
            info, start = running.request, running.num_computed_tokens
            self.steps.append(
                (info.num_tokens, start, running.num_scheduled_tokens, len(running.block_ids[0]))
            )
        return StepPlan()

    def on_request_finished(
        self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
    ) -> None:
        self.ends.append((request.num_tokens, request.num_computed_tokens, reason))

    def on_request_preempted(self, request: RequestInfo, block_ids: BlockIds) -> None:
        self.preempted.append((request.num_tokens, request.num_computed_tokens))


def build(depth: int, stream: StepStream | None = None, num_gpu_blocks: int = 30) -> Engine:
    geometry = CacheGeometry.single(SIZE)
    return Engine(
        geometry,
        Seen(ConnectorConfig(geometry)),
        num_gpu_blocks=num_gpu_blocks,
        page_bytes=16,
        max_tokens_per_step=8,
        decode_tokens=1,
        steps_in_flight=depth,
        stream=stream,
    )


def seen(engine: Engine) -> Noting:
    assert isinstance(engine.scheduler_connector, Noting)
    return engine.scheduler_connector


def prompt(name: str, num_tokens: int, num_output: int, stops_after: int | None = None) -> Request:
    hashes = chain_hashes([f"{name}/{i}" for i in range(num_tokens // SIZE)])
    return Request(name, num_tokens, num_output, SIZE, hashes, stops_after=stops_after)


def drain(engine: Engine) -> None:
    for _ in range(400):
        if not engine.has_work():
            return
        engine.step()
    raise AssertionError("it never ends")


def test_outputs_come_as_late_as_steps_may_be_in_flight() -> None:
    for depth in (1, *DEPTHS):
        engine = build(depth)
        request = prompt("a", 7, 9)
        engine.add_request(request)
        generated = []
        for _ in range(6):
            engine.step()
            generated.append(request.num_generated_tokens)
        assert generated == [max(0, step + 2 - depth) for step in range(6)]


def test_a_step_goes_past_the_tokens_and_the_hashes_there_are() -> None:
    engine = build(3)
    engine.add_request(prompt("a", 7, 9))
    for _ in range(4):
        engine.step()
    # Tokens known, computed before, scheduled, blocks.
    assert seen(engine).steps == [(7, 0, 7, 2), (7, 7, 1, 2), (7, 8, 1, 3), (8, 9, 1, 3)]


@pytest.mark.parametrize("stops_after", [None, 4])
@pytest.mark.parametrize("depth", [1, *DEPTHS])
def test_nothing_is_launched_past_an_end_that_is_foreseen_and_the_rest_is_discarded(
    depth: int, stops_after: int | None
) -> None:
    engine = build(depth)
    request = prompt("a", 7, 6, stops_after)
    engine.add_request(request)
    drain(engine)
    num_generated = stops_after or 6
    num_discarded = depth - 1 if stops_after else 0
    assert request.status is Status.FINISHED
    assert request.num_generated_tokens == num_generated
    num_scheduled = sum(num_tokens for _, _, num_tokens, _ in seen(engine).steps)
    assert num_scheduled == 7 + num_generated - 1 + num_discarded
    assert seen(engine).ends == [(7 + num_generated, 6 + num_generated, FinishReason.FINISHED)]
    assert engine.stats.finished == 1


def test_shutdown_writes_the_steps_in_flight_first() -> None:
    stream = StepStream()
    engine = build(3, stream)
    engine.add_request(prompt("a", 8, 9))
    engine.step()
    engine.step()
    mark = stream.record_event()
    assert not mark.query()
    assert engine.shutdown() == {}
    assert mark.query()


@pytest.mark.parametrize("depth", [1, *DEPTHS])
def test_rejected_drafts_are_neither_cached_nor_generated(depth: int) -> None:
    """The tokens and hashes of a request are those without speculative decoding."""
    counts: list[int] = []

    class Half(SchedulerConnector):
        def plan_step(self, step: StepInfo) -> StepPlan:
            counts.extend(one.num_computed_tokens for one in step.scheduled)
            return StepPlan()

    connector = Connector(ConnectorConfig(CacheGeometry.single(SIZE)))
    connector.make_scheduler = Half  # type: ignore[method-assign]
    requests = []
    for drafts in ((), ((3, 0), (0, 0), (3, 3), (2, 1))):
        counts.clear()
        engine = Engine(
            CacheGeometry.single(SIZE),
            connector,
            num_gpu_blocks=30,
            decode_tokens=1,
            drafts=drafts,
            lookahead_tokens=3 if drafts else 0,
            steps_in_flight=depth,
        )
        request = Request("a", 9, 20, SIZE, chain_hashes(range(2)), _serial=1)
        engine.add_request(request)
        while engine.has_work():
            engine.step()
        requests.append(request)
        assert engine.stats.mismatches == 0
        assert engine.kv_cache.find_longest_cache_hit(request.block_hashes, 98)[1] == 28
    assert requests[0].block_hashes == requests[1].block_hashes
    # A count falls only when a step is planned before the drafts of another one are rejected.
    assert depth > 1 or counts == sorted(counts)


def test_future_hashes_are_foreseen() -> None:
    request = Request("a", 6, 30, SIZE, chain_hashes(range(1)))
    ahead = list(request.hashes_of(22))
    assert len(request.block_hashes) == 1
    request.generate(16)
    assert request.block_hashes == ahead
    assert list(request.hashes_of(9)) == ahead
