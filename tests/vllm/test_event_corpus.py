"""Events of this release: the golden corpus, and the events of kvview's connector."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import make_event_corpus as golden  # type: ignore[import-not-found]
import msgspec
import pytest

import engine as lane  # type: ignore[import-not-found]
from kvview import MEDIUM_CPU, OffloadingEvent, make_offload_key
from kvview.events.formats import WIRE_FORMATS, find_format
from kvview.events.wire import Batch, codec, decode, encode
from kvview_vllm.releases.compat.versions import engine_version

importlib.import_module("vllm.distributed.kv_events")

RECORDING = f"{Path(__file__).with_name('recording_connectors.py')}:RecordingConnector"
TOKENS = range(10, 10 + 6 * lane.BLOCK_SIZE + 4)
NEWER = {"session_id", "lookahead_token_ids"}  # of requests and engines, not of blocks


def release() -> str:
    return engine_version().partition("+")[0]


def test_the_corpus_is_decoded_and_encoded_again() -> None:
    wire_format = find_format(f"vllm-{release()}")
    for row in golden.rows():
        for named in (wire_format, None):
            batch = decode(row["payload"], named)
            assert encode(batch) == row["payload"], row["case"]
            assert (batch.ts, batch.data_parallel_rank) == (
                row["meaning"]["ts"],
                row["meaning"]["rank"],
            )
            for event, meant in zip(batch.events, row["meaning"]["events"], strict=True):
                for name, value in meant.items():
                    assert name == "type" or getattr(event, name) == _listed(value), row["case"]


def _listed(value: object) -> object:
    """Return a value as msgpack decodes it, without tuples."""
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value


def test_vllm_decodes_the_events_that_kvview_encodes() -> None:
    kv_events: Any = importlib.import_module("vllm.distributed.kv_events")
    wire_format = find_format(f"vllm-{release()}")
    writer = codec(wire_format)
    events = [
        writer.make("BlockStored", block_hashes=[1], token_ids=[5], block_size=1, medium="CPU"),
        writer.make("BlockRemoved", block_hashes=[b"h"], medium="GPU"),
        writer.make("AllBlocksCleared"),
    ]
    payload = encode(Batch(1.5, events, 3, wire_format))
    batch = msgspec.msgpack.decode(payload, type=kv_events.KVEventBatch)
    assert [type(event).__name__ for event in batch.events] == [
        *("BlockStored", "BlockRemoved", "AllBlocksCleared")
    ]
    assert (batch.events[0].token_ids, batch.events[0].medium) == ([5], "CPU")
    assert msgspec.msgpack.encode(batch) == payload


def test_a_format_has_the_fields_of_the_release() -> None:
    kv_events: Any = importlib.import_module("vllm.distributed.kv_events")
    wire_format = find_format(f"vllm-{release()}")
    assert wire_format in WIRE_FORMATS
    for kind, fields in (
        (kv_events.BlockStored, wire_format.stored),
        (kv_events.BlockRemoved, wire_format.removed),
    ):
        assert kind.__struct_fields__ == tuple(field.name for field in fields)
        num_required = len(fields) - len(kind.__struct_defaults__)
        assert [field.is_omitted for field in fields] == [
            number >= num_required for number in range(len(fields))
        ]


# --- the events of kvview's connector ---


def make_engine(folder: Path, windows: tuple[int | None, ...] = (None,), **extra: Any) -> Any:
    if release() == "0.11.0":
        pytest.skip("its scheduler needs a publisher for events")
    config = lane.connector_config(RECORDING)
    config["kv_connector_extra_config"] |= extra
    engine = lane.Engine(folder / "model", config, windows=windows, publishes_events=True)
    engine.published = []
    engine.scheduler.kv_event_publisher.publish = engine.published.append
    return engine


def advertise(engine: Any, stored: list[Any], *, removed: bool = False) -> list[Any]:
    """Return the events that kvview's connector publishes for the blocks of the GPU's events."""
    utils: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
    hashes = {
        utils.maybe_convert_block_hash(block_hash): bytes(block_hash)
        for request in engine.requests.values()
        for block_hash in request.block_hashes
    }
    keys = [
        make_offload_key(hashes[block_hash], getattr(event, "group_idx", None) or 0)
        for event in stored
        for block_hash in event.block_hashes
    ]
    half = engine.scheduler.connector._scheduler_side.half
    half.take_events = lambda: [OffloadingEvent(keys, MEDIUM_CPU, removed)]
    return list(engine.scheduler.connector.take_events())


def by_block(events: list[Any]) -> dict[Any, dict[str, Any]]:
    """Return the fields of each block of the events, by hash and group."""
    found = {}
    for event in events:
        fields = {name: getattr(event, name) for name in event.__struct_fields__}
        hashes, size = fields.pop("block_hashes"), fields["block_size"]
        tokens, extra = fields.pop("token_ids"), fields.pop("extra_keys", None)
        parent = fields.pop("parent_block_hash")
        for number, block_hash in enumerate(hashes):
            found[block_hash, fields.get("group_idx")] = fields | {
                "parent_block_hash": hashes[number - 1] if number else parent,
                "token_ids": tokens[number * size : (number + 1) * size],
                "extra_keys": None if extra is None else extra[number],
            }
    return found


def gpu_stores(engine: Any) -> list[Any]:
    events = [event for batch in engine.published for event in batch.events]
    return [event for event in events if type(event).__name__ == "BlockStored"]


@pytest.mark.parametrize("windows", [(None,), (None, lane.WINDOW)])
def test_an_event_has_the_fields_of_the_gpus_event_for_a_block(
    tmp_path: Path, windows: tuple[int | None, ...]
) -> None:
    if len(windows) > 1 and lane.refuses_several_groups():
        pytest.skip("with a connector this release takes one KV-cache group only")
    engine = make_engine(tmp_path, windows)
    request = engine.add("r", TOKENS, max_tokens=20)
    other = engine.add("s", [*TOKENS[:40], *range(500, 540)])
    request.cache_salt = other.cache_salt = "tenant"
    for _ in range(2):
        engine.step()
    living = by_block(advertise(engine, gpu_stores(engine)))
    engine.run()
    stored = gpu_stores(engine)
    finished = by_block(advertise(engine, stored))
    wanted = by_block(stored)
    assert wanted
    assert finished.keys() == wanted.keys() >= living.keys()
    for found in (living, finished):
        for block, fields in found.items():
            assert fields.pop("medium") == "CPU"
            for name, value in fields.items():
                if name in NEWER or (name.startswith("kv_cache_spec") and not wanted[block][name]):
                    continue
                assert value == wanted[block][name], name
    assert {fields["token_ids"][0] for fields in finished.values()} >= {10, 500 + 40 % 16}


def test_consecutive_blocks_are_one_event(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.add("r", TOKENS)
    engine.run()
    (event,) = advertise(engine, gpu_stores(engine))
    assert len(event.block_hashes) == 6
    assert event.token_ids == list(TOKENS[: 6 * lane.BLOCK_SIZE])
    assert event.parent_block_hash is None
    (removal,) = advertise(engine, gpu_stores(engine), removed=True)
    assert type(removal).__name__ == "BlockRemoved"
    assert removal.block_hashes == event.block_hashes


def test_events_may_have_the_location_alone(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, events="location_only")
    engine.add("r", TOKENS)
    engine.run()
    (event,) = advertise(engine, gpu_stores(engine))
    assert (event.token_ids, event.parent_block_hash) == ([], None)
    assert (event.block_size, event.medium) == (lane.BLOCK_SIZE, "CPU")


def test_forgotten_blocks_are_advertised_by_location_alone(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    for number in range(30):
        engine.add(f"r{number}", range(1000 * number, 1000 * number + 50))
        engine.run()
    stored = gpu_stores(engine)
    events = advertise(engine, stored)
    described = by_block([event for event in events if event.token_ids])
    wanted = by_block(stored)
    # Up to the size of the pool; older blocks belong to requests that are forgotten.
    assert lane.NUM_BLOCKS - 3 <= len(described) <= lane.NUM_BLOCKS
    assert all(
        fields["token_ids"] == wanted[block]["token_ids"] for block, fields in described.items()
    )
    (places,) = [event for event in events if not event.token_ids]
    assert len(places.block_hashes) == len(wanted) - len(described)
    side = engine.scheduler.connector._scheduler_side.descriptions
    assert len(side.places()) == len(described)
