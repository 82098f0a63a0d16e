"""The facts that a connector gets of a request on vLLM: its content, and its full blocks.

The trial run (``test_trial_run.py``) and the simulation compare its computed tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import engine as lane  # type: ignore[import-not-found]
from kvview import (
    CacheGeometry,
    OffloadingEvent,
    RequestContent,
    TransferResult,
    UnsupportedContractError,
    make_offload_key,
)
from kvview_vllm.events import BlockDescriptions
from kvview_vllm.releases.build.samples import BLOCK_SIZE, make_request
from kvview_vllm.releases.compat.calls import request_content

RECORDING = f"{Path(__file__).with_name('recording_connectors.py')}:RecordingConnector"
TOKENS = range(10, 10 + 6 * lane.BLOCK_SIZE + 4)

MakeEngine = Callable[..., Any]


@pytest.fixture
def make_engine(tmp_path: Path) -> MakeEngine:
    def make(target: str = RECORDING, **options: Any) -> Any:
        return lane.Engine(tmp_path / "model", lane.connector_config(target), **options)

    return make


def half(engine: Any) -> Any:
    return engine.scheduler.connector._scheduler_side.half


def requests_in(engine: Any, call: str) -> list[Any]:
    return [request for name, request in half(engine).calls if name == call]


# --- the content that KV is computed from ---


def test_the_content_is_one_living_object(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request = engine.add("r", TOKENS, max_tokens=20)
    engine.run()
    contents = {id(info.content): info.content for _, info in half(engine).calls}
    (content,) = contents.values()
    assert content.token_ids is request.all_token_ids
    assert len(content.token_ids) == len(TOKENS) + 20
    assert (content.lora_name, content.lora_id, content.cache_salt) == (None, None, None)
    assert content.transfer_params is None
    assert list(content.extra_keys) == [None] * len(request.block_hashes)


def test_the_content_has_everything_that_hashes_cover() -> None:
    request = lane.make_request("r", list(TOKENS), 4)
    request.cache_salt = "tenant"
    request.kv_transfer_params = {"max_load_tokens": 4}
    lora: Any = importlib.import_module("vllm.lora.request")
    request.lora_request = lora.LoRARequest("poet", 3, "/adapters/poet")
    content = request_content(request, lane.BLOCK_SIZE)
    assert (content.lora_name, content.lora_id, content.cache_salt) == ("poet", 3, "tenant")
    assert content.transfer_params == {"max_load_tokens": 4}
    utils: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
    expected = []
    next_image = 0
    for start in range(0, 6 * lane.BLOCK_SIZE, lane.BLOCK_SIZE):
        keys, next_image = utils.generate_block_hash_extra_keys(
            request, start, start + lane.BLOCK_SIZE, next_image
        )
        expected.append(keys)
    assert list(content.extra_keys) == expected == content.extra_keys[:]
    assert "tenant" in str(expected[0])
    assert expected[0] != expected[1]
    with pytest.raises(IndexError):
        content.extra_keys[6]


# --- steps in flight ---


@pytest.mark.parametrize("depth", [2, 3])
def test_full_blocks_have_their_keys_while_steps_are_in_flight(  # CONN-7
    make_engine: MakeEngine, depth: int
) -> None:
    engine = make_engine(depth=depth)
    assert "Async" in type(engine.scheduler).__name__
    connector = half(engine)
    plan_step = connector.plan_step
    in_flight: list[int] = []

    def plan(step: Any) -> Any:
        in_flight.append(len(engine.in_flight))
        return plan_step(step)

    connector.plan_step = plan
    requests = [engine.add(f"r{n}", range(n * 100, n * 100 + 30 + n), 70) for n in range(3)]
    engine.run(limit=400)
    assert all(request.is_finished() for request in requests)
    assert max(in_flight) == depth - 1, "a batch was in flight when a step was planned"
    assert connector.num_beyond > 100
    assert connector.num_unhashed > 0, "a block without a hash was counted: block_hashes[n] raises"
    hashes = {request.request_id: request.block_hashes for request in requests}
    assert connector.full
    for request_id, block in connector.full:
        assert block.key == make_offload_key(hashes[request_id][block.number], 0)
    for info in requests_in(engine, "finished"):
        assert info.num_computed_tokens == info.num_tokens - 1
    stored = {(name, block.number) for name, block in connector.full}
    assert len(stored) == sum((r.num_tokens - 1) // lane.BLOCK_SIZE for r in requests)


# --- plans, contracts, reports ---


def test_a_plan_without_jobs_reaches_the_worker(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add("r", TOKENS)
    engine.step()
    (plan,) = engine.worker._worker_side._half.plans
    assert plan.dropped == ["a key"]


def test_a_connector_for_a_later_contract_is_refused(make_engine: MakeEngine) -> None:
    target = RECORDING.replace("RecordingConnector", "LaterConnector")
    with pytest.raises(UnsupportedContractError, match=r"LaterConnector was .* contract 1\.7"):
        make_engine(target)


def test_a_report_of_an_unknown_job_is_dropped(  # MSG-2
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    worker = engine.worker._worker_side
    worker._half.results = [TransferResult(99, success=True)]
    request = engine.add("r", TOKENS)
    engine.run()
    assert request.is_finished()
    assert f"CONN-3: connector {RECORDING}: RecordingWorker reported job 99" in caplog.text
    assert not worker.reports(), "no scheduler could acknowledge it, so it would be sent forever"


@pytest.mark.parametrize("medium", ["CPU", "STORAGE", "s3://bucket/é"])
def test_an_event_may_name_any_medium(make_engine: MakeEngine, medium: str) -> None:
    engine = make_engine()
    key = make_offload_key(b"h" * 32, 0)
    half(engine).take_events = lambda: [
        OffloadingEvent([key], medium, removed) for removed in (False, True)
    ]
    msgspec: Any = importlib.import_module("msgspec")
    kv_events: Any = importlib.import_module("vllm.distributed.kv_events")
    batch = kv_events.KVEventBatch(ts=0.0, events=list(engine.scheduler.connector.take_events()))
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=kv_events.KVEventBatch)
    assert [event.medium for event in decoded.events] == [medium] * 2


@pytest.mark.parametrize("ends", [False, True])
def test_the_content_of_a_block_is_kept_as_long_as_one_of_its_requests(ends: bool) -> None:
    """A shorter request with the same blocks finishes, and then others finish."""
    geometry = CacheGeometry.single(BLOCK_SIZE)
    descriptions = BlockDescriptions(geometry, num_blocks=2)

    def follow(name: str, first: int) -> tuple[Any, RequestContent]:
        tokens = range(first, first + BLOCK_SIZE)
        request = make_request(name, tokens, 1, block_hasher=lambda request: [bytes([first]) * 32])
        content = request_content(request, BLOCK_SIZE)
        descriptions.follow(request, content)
        descriptions.places()
        return request, content

    longest = follow("longest", 0)
    descriptions.finish(*follow("shorter", 0))
    key = make_offload_key(longest[0].block_hashes[0], 0)
    assert key in descriptions.places()
    if ends:
        descriptions.finish(*longest)
        descriptions.finish(*follow("another", 10))
    else:
        for number in range(1, 4):
            descriptions.finish(*follow(f"another {number}", 10 * number))
    assert key in descriptions.places()
    for number in range(4, 7):
        descriptions.finish(*follow(f"another {number}", 10 * number))
    assert (key in descriptions.places()) == (not ends)
    assert len(descriptions.places()) == 2 + (not ends)
