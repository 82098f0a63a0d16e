"""A kvview manager and worker under vLLM's OffloadingConnector and real Scheduler."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import engine as lane  # type: ignore[import-not-found]
from kvview import ConfigError, OffloadingEvent, make_offload_key
from kvview_vllm.releases.calls import make_known
from kvview_vllm.releases.shapes import find_class
from tests.offloading.keyed_tier import DISK

KEYED = "tests.offloading.keyed_tier"
STRICT = f"{Path(__file__).with_name('strict_manager.py')}:StrictManager"
TOKENS = range(10, 10 + 6 * lane.BLOCK_SIZE + 4)
HIT_TOKENS = 6 * lane.BLOCK_SIZE

MakeEngine = Callable[..., lane.Engine]


@pytest.fixture
def make_engine(tmp_path: Path) -> MakeEngine:
    def make(
        windows: tuple[int | None, ...] = (None,), extra: dict[str, Any] | None = None, **ours: Any
    ) -> lane.Engine:
        config = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "KVViewOffloadingSpec",
                "spec_module_path": "kvview_vllm.offloading_spec",
                "kvview": {"num_blocks": 64, "manager": STRICT, **ours},
                **(extra or {}),
            },
        }
        return lane.Engine(tmp_path / "model", config, windows=windows)

    return make


def tier(engine: lane.Engine) -> Any:
    """Return the kvview manager."""
    return engine.scheduler.connector.connector_scheduler.manager.manager


def serve(engine: lane.Engine, name: str, tokens: range = TOKENS) -> Any:
    request = engine.add(name, tokens)
    engine.run()
    settle(engine)
    return request


def settle(engine: lane.Engine) -> None:
    """Step until all stores are reported; they start a step late, perhaps in a thread."""
    for _ in range(2000):
        if not tier(engine).num_protected_blocks():
            return
        engine.step()
        time.sleep(0.001)
    raise AssertionError("a job is never completed")


def forget(engine: lane.Engine) -> None:
    """Leave the KV in the tier alone."""
    assert engine.scheduler.reset_prefix_cache()
    engine.scribble()


_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
_HMA = getattr(importlib.import_module(f"{_V1}.base"), "SupportsHMA", ())
_OFFLOADING: Any = importlib.import_module(f"{_V1}.offloading_connector").OffloadingConnector
WINDOWS = [
    (None,),
    pytest.param(
        (None, lane.WINDOW),
        marks=pytest.mark.skipif(
            not issubclass(_OFFLOADING, _HMA), reason="OffloadingConnector takes one group"
        ),
    ),
]


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_stored_kv_is_loaded_after_a_reset(
    make_engine: MakeEngine, windows: tuple[int | None, ...]
) -> None:
    engine = make_engine(windows=windows)
    free = engine.num_free_blocks()
    serve(engine, "first")
    forget(engine)
    again = serve(engine, "again")
    assert again.is_finished()
    assert engine.hits == {"first": 0, "again": HIT_TOKENS}
    assert engine.num_free_blocks() == free


def test_a_hit_may_end_inside_a_chunk(make_engine: MakeEngine) -> None:
    engine = make_engine(extra={"block_size": 2 * lane.BLOCK_SIZE})
    serve(engine, "first")
    forget(engine)
    serve(engine, "short", TOKENS[: 3 * lane.BLOCK_SIZE + 4])
    serve(engine, "again")
    assert engine.hits["short"] == 2 * lane.BLOCK_SIZE
    assert engine.hits["again"] >= 4 * lane.BLOCK_SIZE


def test_requests_end_under_eviction_pressure(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=16)
    for number in range(12):
        start = 100 * (number % 4)
        engine.add(f"r{number}", range(start, start + 5 * lane.BLOCK_SIZE + 4))
        if number % 2:
            engine.run()
            settle(engine)
            forget(engine)
    assert all(request.is_finished() for request in engine.requests.values())
    assert tier(engine).evicted
    assert any(engine.hits.values())


def test_the_keys_of_a_hit_are_touched_in_order(make_engine: MakeEngine) -> None:
    # VOFF-4
    engine = make_engine()
    serve(engine, "first")
    forget(engine)
    tier(engine).touched.clear()
    again = serve(engine, "again")
    names_groups = find_class("OffloadKey") is not None  # up to 0.19 a key is a hash
    keys = [make_offload_key(h, 0) if names_groups else h for h in again.block_hashes[:6]]
    assert tier(engine).touched
    assert any(touched[:6] == keys for touched in tier(engine).touched)


def test_no_call_names_a_key_twice(make_engine: MakeEngine) -> None:
    # VOFF-3
    engine = make_engine()
    shown = engine.scheduler.connector.connector_scheduler.manager
    kind = find_class("ReqContext")  # 0.20
    context = kind and make_known(kind, req_id="r", kv_transfer_params=None)
    shown.touch([b"k", b"l", b"k"], context)  # StrictManager raises when it sees both
    output = shown.prepare_store([b"k", b"l", b"k"], context)
    assert len(output.store_spec.spec.block_ids) == 2
    assert tier(engine).touched == [[b"k", b"l"]]


def test_a_reset_leaves_no_job_in_flight(make_engine: MakeEngine) -> None:
    # VOFF-5
    if not hasattr(find_class("OffloadingManager"), "reset_cache"):
        pytest.skip("on this release a reset does not reach the manager")
    engine = make_engine()
    # One token, because 0.25 fails if a request with jobs in flight survives a reset.
    first = engine.add("first", TOKENS, max_tokens=1)
    while not first.is_finished():
        engine.step()
    assert tier(engine).num_protected_blocks()
    engine.scheduler.connector.reset_cache()
    assert not tier(engine).num_protected_blocks()
    engine.run()
    settle(engine)
    forget(engine)
    serve(engine, "second")
    forget(engine)
    serve(engine, "third")
    assert engine.hits["third"] == HIT_TOKENS


class Publisher:
    """Collects the events that the engine publishes."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def publish(self, batch: Any) -> None:
        self.events += batch.events


def keyed(**ours: Any) -> dict[str, Any]:
    """Return the options of a tier that is addressed by key, in a medium of its own."""
    manager, worker = f"{KEYED}:KeyedManager", f"{KEYED}:KeyedWorker"
    return {
        "manager": manager,
        "worker": worker,
        "media": {DISK: "STORAGE"},
        "manager_options": {"enable_events": True},
        **ours,
    }


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_a_tier_may_be_addressed_by_key(
    make_engine: MakeEngine, windows: tuple[int | None, ...]
) -> None:
    engine = make_engine(windows=windows, extra={"block_size": 2 * lane.BLOCK_SIZE}, **keyed())
    engine.scheduler.kv_event_publisher = publisher = Publisher()
    serve(engine, "first")
    forget(engine)
    serve(engine, "again")
    assert engine.hits == {"first": 0, "again": HIT_TOKENS}
    engine.step()
    media = {event.medium for event in publisher.events if hasattr(event, "medium")} - {"GPU"}
    assert media == {"STORAGE"}


def test_a_medium_unknown_to_vllm_is_refused_at_start(make_engine: MakeEngine) -> None:
    # VOFF-6
    if find_class("Medium") is None:  # up to 0.26
        make_engine(**keyed(media={}))
        return
    with pytest.raises(ConfigError) as caught:
        make_engine(**keyed(media={}))
    message = str(caught.value)
    assert "has no medium 'DISK', only CPU, STORAGE" in message
    assert '"media": {"DISK": "STORAGE"}' in message
    assert "\n" not in message
    with pytest.raises(ConfigError, match="has no medium 'FLASH'"):
        make_engine(**keyed(media={DISK: "FLASH"}))


def test_take_events_returns_only_new_events(make_engine: MakeEngine) -> None:
    engine = make_engine(manager_options={"enable_events": True})
    shown = engine.scheduler.connector.connector_scheduler.manager
    a, b = make_offload_key(b"a", 0), make_offload_key(b"b", 0)
    taken = []
    for key in (a, b):
        shown.manager.prepare_store([key])
        shown.manager.complete_store([key])
        taken.append(shown.take_events())
    shown.manager.reset()
    named = [
        [[*(getattr(event, "keys", None) or event.block_hashes)] for event in events]
        for events in taken
    ]
    assert named == [[[a]], [[b]]]


def test_an_undeclared_medium_does_not_end_the_engine(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(manager_options={"enable_events": True})
    shown = engine.scheduler.connector.connector_scheduler.manager
    events: list[OffloadingEvent] = []
    a, b = make_offload_key(b"a", 0), make_offload_key(b"b", 0)
    shown.manager.take_events = lambda: events
    published: list[Any] = []
    for event in (
        OffloadingEvent([a, b], "CPU", False),
        OffloadingEvent([a], "TAPE", False),
        OffloadingEvent([a, b], "CPU", True),
        OffloadingEvent([a], "TAPE", True),
    ):
        events[:] = [event]
        published += shown.take_events()
    named = [
        (getattr(event, "keys", None) or event.block_hashes, event.medium, event.removed)
        for event in published
    ]
    medium_class = find_class("Medium")
    if medium_class is None:
        assert [medium for _, medium, _ in named] == ["CPU", "TAPE", "CPU", "TAPE"]
        return
    cpu = medium_class("CPU")  # the medium of a until both tiers have lost it
    assert named == [([a, b], cpu, False), ([b], cpu, True), ([a], cpu, True)]
    assert [record.message.count("'TAPE'") for record in caplog.records] == [1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_block": 4}, "num_block: .*Known options: num_blocks, manager"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"manager": "no.such.module:Manager"}, "cannot be imported"),
        ({"manager_options": {"cache_policy": "fifo"}}, "arc"),
        (
            {"manager_options": {"cache_polcy": "arc"}},
            r"manager_options \['cache_polcy'\] do not fit .*unexpected keyword",
        ),
        ({"manager_options": {"num_blocks": 1}}, "manager_options .*multiple values"),
        (
            {"worker_options": {"num_thread": 1}},
            r"worker_options \['num_thread'\] do not fit .*unexpected",
        ),
    ],
    ids=[
        *("unknown key", "no blocks", "unknown target", "unknown policy"),
        *("unknown option", "option given twice", "unknown option of the worker"),
    ],
)
def test_a_wrong_setting_is_an_error_at_start(
    make_engine: MakeEngine, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(**wrong)
