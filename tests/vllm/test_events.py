"""Events of this release: their formats, vLLM's publisher, and the events of kvview's connector.

The simulation compares the content of these with that of vLLM's own events of the same blocks.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from kvview import OffloadingEvent, make_offload_key
from kvview.events.channel import Listener
from kvview.events.formats import find_format
from kvview.events.wire import decode, encode
from kvview_vllm.releases.compat.calls import can_name_groups
from kvview_vllm.releases.compat.versions import engine_version
from kvview_vllm.simulation.scheduler.cpu_scheduler import connector_config
from tests.vllm.server import BLOCK_SIZE, EXAMPLE, HIT_TOKENS, Server

kv_events: Any = import_module("vllm.distributed.kv_events")
FORMAT = find_format(f"vllm-{engine_version().partition('+')[0]}")
KINDS = (kv_events.BlockStored, kv_events.BlockRemoved, kv_events.AllBlocksCleared)
hashes = st.integers(0, 2**64 - 1) | st.binary(min_size=32, max_size=32)
numbers = st.none() | st.integers(0, 2**20)
texts = st.none() | st.sampled_from(["GPU", "CPU", "", "s3://bucket/é"])
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "block_hashes": st.lists(hashes, max_size=3),
    "parent_block_hash": st.none() | hashes,
    "token_ids": st.lists(st.integers(0, 2**20), max_size=9),
    "block_size": st.integers(0, 1024),
    "extra_keys": st.none() | st.lists(st.none() | st.tuples(texts | numbers | st.binary())),
    "lookahead_token_ids": st.none() | st.lists(st.lists(st.integers(0, 9))),
    **dict.fromkeys(("lora_id", "group_idx", "kv_cache_spec_sliding_window"), numbers),
    **dict.fromkeys(("medium", "lora_name", "kv_cache_spec_kind", "locality"), texts),
    **dict.fromkeys(("ownership", "session_id"), texts),
}


@st.composite
def batches(draw: st.DrawFn) -> Any:
    events = [
        kind(**{name: draw(FIELDS[name]) for name in kind.__struct_fields__})
        for kind in draw(st.lists(st.sampled_from(KINDS), max_size=3))
    ]
    return kv_events.KVEventBatch(draw(st.floats(0, 2e9)), events, draw(numbers))


def as_sent(event: Any) -> dict[str, Any]:
    """Return the fields of an event, as msgpack decodes them."""
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    decoded: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(fields))
    return decoded


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batches())
def test_a_batch_of_vllm_is_decoded_and_encoded_again(batch: Any) -> None:
    payload = msgspec.msgpack.encode(batch)
    for named in (FORMAT, None):
        decoded = decode(payload, named)
        assert encode(decoded) == payload
        assert (decoded.ts, decoded.data_parallel_rank) == (batch.ts, batch.data_parallel_rank)
        for event, meant in zip(decoded.events, batch.events, strict=True):
            assert type(event).__name__ == type(meant).__name__
            assert {**as_sent(event), **as_sent(meant)} == as_sent(event)


def test_a_listener_receives_the_batches_of_vllms_publisher(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path / 'events'}"
    publisher = kv_events.ZmqEventPublisher(0, endpoint=endpoint)
    with Listener(endpoint) as listener:
        found: list[float] = []
        for number in range(50):
            publisher.publish(kv_events.KVEventBatch(float(number), [kv_events.AllBlocksCleared()]))
            if (message := listener.receive(0.2)) is not None:
                found.append(decode(message.payload).ts)
            if len(found) > 5:
                break
    publisher.shutdown()
    assert found == [found[0] + number for number in range(6)]


@pytest.mark.skipif(not can_name_groups(), reason="this release names no groups")
@pytest.mark.parametrize("events", ["self_describing", "location_only"])
def test_consecutive_blocks_are_one_event(events: str) -> None:
    config = connector_config(EXAMPLE, cpu_blocks=64)
    config["kv_connector_extra_config"]["events"] = events
    server = Server(config)
    request = server.ask("r")
    server.run()
    keys = [make_offload_key(block_hash, 0) for block_hash in request.block_hashes[:6]]
    server.half.take_events = lambda: [
        OffloadingEvent(keys, "s3://bucket/é", removed) for removed in (False, True)
    ]
    stored, removed = server.connector.take_events()
    is_described = events == "self_describing"
    assert stored.token_ids == list(request.all_token_ids[: HIT_TOKENS * is_described])
    assert stored.parent_block_hash is None
    assert stored.block_size == BLOCK_SIZE
    assert (type(stored), type(removed)) == KINDS[:2]
    assert stored.medium == removed.medium == "s3://bucket/é"
    assert len(stored.block_hashes) == 6
    assert stored.block_hashes == removed.block_hashes
