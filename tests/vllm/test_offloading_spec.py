"""A kvview manager and worker under vLLM's OffloadingConnector and real Scheduler."""

from __future__ import annotations

import importlib
import time
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
from kvview import ConfigError, CPULoadStoreSpec, OffloadingEvent, make_offload_key
from kvview_vllm.releases.calls import make_known
from kvview_vllm.releases.release import find_class
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
    """The kvview manager."""
    return engine.scheduler.connector.connector_scheduler.manager.manager


def serve(engine: lane.Engine, name: str, tokens: range = TOKENS) -> Any:
    request = engine.add(name, tokens)
    engine.run()
    settle(engine)
    return request


def settle(engine: lane.Engine) -> None:
    """Stores go out a step late, and are reported a step later; a worker may have a thread."""
    for _ in range(2000):
        if not tier(engine).num_protected_blocks():
            return
        engine.step()
        time.sleep(0.001)
    raise AssertionError("a job is never completed")


def forget(engine: lane.Engine) -> None:
    """Only the tier still has the KV."""
    assert engine.scheduler.reset_prefix_cache()
    engine.scribble()


def takes_several_groups() -> bool:
    base: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
    connector: Any = importlib.import_module(
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"
    )
    return issubclass(connector.OffloadingConnector, getattr(base, "SupportsHMA", ()))


@pytest.mark.parametrize("windows", [(None,), (None, lane.WINDOW)], ids=["one group", "two groups"])
def test_stored_reset_loaded(make_engine: MakeEngine, windows: tuple[int | None, ...]) -> None:
    if len(windows) > 1 and not takes_several_groups():
        pytest.skip("OffloadingConnector of this release takes one KV-cache group")
    engine = make_engine(windows=windows)
    free = engine.num_free_blocks()
    serve(engine, "first")
    forget(engine)
    again = serve(engine, "again")
    assert again.is_finished()
    assert engine.hits == {"first": 0, "again": HIT_TOKENS}
    assert engine.num_free_blocks() == free


def test_chunks_of_two_blocks_from_the_middle(make_engine: MakeEngine) -> None:
    engine = make_engine(extra={"block_size": 2 * lane.BLOCK_SIZE})
    serve(engine, "first")
    forget(engine)
    serve(engine, "short", TOKENS[: 3 * lane.BLOCK_SIZE + 4])
    serve(engine, "again")
    assert engine.hits["short"] == 2 * lane.BLOCK_SIZE
    assert engine.hits["again"] >= 4 * lane.BLOCK_SIZE


def test_wrong_pages_are_seen(make_engine: MakeEngine) -> None:
    engine = make_engine()
    serve(engine, "first")
    forget(engine)
    prepare_load = tier(engine).prepare_load

    def reverse(keys: Any, ctx: Any) -> CPULoadStoreSpec:
        return CPULoadStoreSpec(prepare_load(keys, ctx).block_ids[::-1])

    tier(engine).prepare_load = reverse
    engine.add("again", TOKENS)
    with pytest.raises(AssertionError, match="wrong bytes"):
        engine.run()


def test_eviction_pressure(make_engine: MakeEngine) -> None:
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


def test_used_keys_are_touched_head_first(make_engine: MakeEngine) -> None:
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


def test_no_key_is_named_twice(make_engine: MakeEngine) -> None:
    # VOFF-3
    engine = make_engine()
    shown = engine.scheduler.connector.connector_scheduler.manager
    kind = find_class("ReqContext")  # 0.20
    context = kind and make_known(kind, req_id="r", kv_transfer_params=None)
    shown.touch([b"k", b"l", b"k"], context)  # StrictManager raises when it sees both
    output = shown.prepare_store([b"k", b"l", b"k"], context)
    assert len(output.store_spec.spec.block_ids) == 2
    assert tier(engine).touched == [[b"k", b"l"]]


def test_reset_leaves_nothing_in_flight(make_engine: MakeEngine) -> None:
    # VOFF-5
    if not hasattr(find_class("OffloadingManager"), "reset_cache"):
        pytest.skip("on this release a reset does not reach the manager")
    engine = make_engine()
    # Of one token: 0.25 breaks down when a request with jobs in flight lives through a reset.
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


def test_events_reach_the_publisher(make_engine: MakeEngine) -> None:
    engine = make_engine(manager_options={"enable_events": True})
    engine.scheduler.kv_event_publisher = publisher = Publisher()
    serve(engine, "first")
    engine.step()
    stored = [event for event in publisher.events if event.medium == "CPU"]
    assert {type(event).__name__ for event in stored} == {"BlockStored"}
    assert sum(len(event.block_hashes) for event in stored) >= 6


class Publisher:
    """Takes what the engine publishes."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def publish(self, batch: Any) -> None:
        self.events += batch.events


def keyed(**ours: Any) -> dict[str, Any]:
    """A tier that is addressed by key, in a medium of its own."""
    manager, worker = f"{KEYED}:KeyedManager", f"{KEYED}:KeyedWorker"
    return {
        "manager": manager,
        "worker": worker,
        "media": {DISK: "STORAGE"},
        "manager_options": {"enable_events": True},
        **ours,
    }


@pytest.mark.parametrize("windows", [(None,), (None, lane.WINDOW)], ids=["one group", "two groups"])
def test_a_tier_addressed_by_key(make_engine: MakeEngine, windows: tuple[int | None, ...]) -> None:
    if len(windows) > 1 and not takes_several_groups():
        pytest.skip("OffloadingConnector of this release takes one KV-cache group")
    engine = make_engine(windows=windows, extra={"block_size": 2 * lane.BLOCK_SIZE}, **keyed())
    engine.scheduler.kv_event_publisher = publisher = Publisher()
    serve(engine, "first")
    forget(engine)
    serve(engine, "again")
    assert engine.hits == {"first": 0, "again": HIT_TOKENS}
    engine.step()
    media = {event.medium for event in publisher.events if hasattr(event, "medium")} - {"GPU"}
    assert media == {"STORAGE"}


def test_a_medium_that_vllm_does_not_know_is_refused_at_start(make_engine: MakeEngine) -> None:
    # VOFF-6
    if find_class("Medium") is None:  # up to 0.26
        make_engine(**keyed(media={}))
        return
    with pytest.raises(ConfigError) as caught:
        make_engine(**keyed(media={}))
    said = str(caught.value)
    assert "knows no medium 'DISK', only CPU, STORAGE" in said
    assert '"media": {"DISK": "STORAGE"}' in said
    assert "\n" not in said
    with pytest.raises(ConfigError, match="knows no medium 'FLASH'"):
        make_engine(**keyed(media={DISK: "FLASH"}))


def test_events_are_taken_when_they_are_asked_for(make_engine: MakeEngine) -> None:
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


def test_a_medium_that_was_never_named_ends_no_engine(
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
    cpu = medium_class("CPU")  # where a is until both have lost it
    assert named == [([a, b], cpu, False), ([b], cpu, True), ([a], cpu, True)]
    assert [record.message.count("'TAPE'") for record in caplog.records] == [1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_block": 4}, "num_block: .*Known options: num_blocks, manager"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"manager": "no.such.module:Manager"}, "does not import"),
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
        *("unknown key", "no room", "no such target", "unknown policy"),
        *("unknown option", "option given twice", "unknown option of the worker"),
    ],
)
def test_a_typo_is_an_error_at_start(
    make_engine: MakeEngine, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(**wrong)
