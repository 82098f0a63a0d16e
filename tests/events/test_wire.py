"""The wire formats: decoded, encoded to the same bytes, and arbitrary bytes."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings, strategies as st

from kvview import ConfigError, WireFormatError
from kvview.events.channel import read_frames
from kvview.events.formats import WIRE_FORMATS, Field, Kind, WireFormat, find_format
from kvview.events.wire import (
    Batch,
    ClearedEvent,
    EventDecoder,
    RemovedEvent,
    StoredEvent,
    codec,
    decode,
    encode,
)
from kvview.testing.events.stream_fold import StreamFold

pack = msgspec.msgpack.encode
HASHES = st.integers(0, 2**64 - 1) | st.binary(max_size=33)
TEXTS = st.text(max_size=5)
_VALUES: dict[Kind, st.SearchStrategy[Any]] = {
    Kind.HASH: HASHES,
    Kind.HASHES: st.lists(HASHES, max_size=4),
    Kind.TOKENS: st.lists(st.integers(0, 2**32), max_size=40),
    Kind.INTEGER: st.integers(-9, 2**33),
    Kind.TEXT: TEXTS,
    Kind.EXTRA_KEYS: st.lists(st.none() | st.lists(TEXTS | st.integers(0, 9) | st.binary())),
    Kind.TOKEN_LISTS: st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3),
}


def values_of(fields: tuple[Field, ...]) -> st.SearchStrategy[dict[str, Any]]:
    values = {field.name: _VALUES[field.kind] for field in fields}
    for field in fields:
        if field.is_nullable:
            values[field.name] |= st.none()
    return st.fixed_dictionaries(values)


@st.composite
def batches(draw: st.DrawFn, wire_format: WireFormat) -> Batch:
    writer = codec(wire_format)
    kinds = {
        "BlockStored": values_of(wire_format.stored),
        "BlockRemoved": values_of(wire_format.removed),
        "AllBlocksCleared": st.just({}),
    }
    tags = draw(st.lists(st.sampled_from([*kinds]), max_size=4))
    events = [writer.make(tag, **draw(kinds[tag])) for tag in tags]
    rank = draw(st.none() | st.integers(0, 9))
    return Batch(draw(st.floats(allow_nan=False)), events, rank, wire_format)


@pytest.mark.parametrize("wire_format", WIRE_FORMATS, ids=lambda known: known.name)
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_an_encoded_batch_is_decoded_and_encoded_again(
    wire_format: WireFormat, data: st.DataObject
) -> None:
    batch = data.draw(batches(wire_format))
    payload = encode(batch)
    assert decode(payload, wire_format) == batch
    assert encode(EventDecoder().decode(payload)) == payload


def _is_sound(payload: bytes) -> None:
    StreamFold().apply(0, payload)
    try:
        batch = decode(payload)
    except WireFormatError:
        with pytest.raises(WireFormatError, match=r"^not a batch of [ -~]+$"):
            decode(payload)
        return
    assert encode(batch) == payload
    for event in batch.events:
        assert isinstance(event, StoredEvent | RemovedEvent | ClearedEvent)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | TEXTS
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS | st.integers(0, 9), inner),
    max_leaves=8,
)
EVENTS = st.lists(
    st.builds(lambda tag, rest: [tag, *rest], st.just("BlockStored"), st.lists(ANYTHING))
    | st.builds(
        lambda tag, rest: {"type": tag, **rest},
        st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"]),
        st.dictionaries(
            st.sampled_from(["block_hashes", "token_ids", "medium", "new"]), ANYTHING, max_size=4
        ),
    )
    | ANYTHING
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    payload = encode(draw(st.sampled_from(WIRE_FORMATS).flatmap(batches)))
    place = draw(st.integers(0, len(payload) - 1))
    if draw(st.booleans()):
        return payload[:place]
    return payload[:place] + bytes([draw(st.integers(0, 255))]) + payload[place + 1 :]


VALUES = st.tuples(ANYTHING, EVENTS) | st.tuples(st.floats(), EVENTS, ANYTHING)


WITHOUT_BLOCK_SIZE = pack([0.0, [{"type": "BlockStored", "block_hashes": [], "token_ids": [0]}]])


@settings(deadline=None, max_examples=100)
@example(WITHOUT_BLOCK_SIZE)
@given(st.binary(max_size=200) | VALUES.map(pack) | damaged())
def test_any_bytes_are_a_batch_or_our_error(payload: bytes) -> None:
    _is_sound(payload)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xdd\xff\xff\xff\xff",  # 4 G elements, said in five bytes
        b"\xdf\xff\xff\xff\xff",
        b"\x92\xcb" + b"\0" * 8 + b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,  # deeper than any stack
        b"\x92\xcb" + b"\0" * 8 + b"\x91" * 100_000,
        b"\x92\xcb" + b"\0" * 8 + b"\x91\x93\xabBlockStored" + b"\x91" * 100_000 + b"\x01",
        pack([1.5, [{"type": "BlockStored"}, ["BlockRemoved", None], ["BlockStored"]], 0]),
        b'{"type": "BlockStored"}',
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_hostile_bytes(payload: bytes) -> None:
    _is_sound(payload)


def test_a_format_is_not_read_for_another() -> None:
    for wire_format in WIRE_FORMATS:
        writer = codec(wire_format)
        event = writer.make("BlockStored", block_hashes=[1], token_ids=[1], block_size=1)
        payload = encode(Batch(1.0, [event], 0, wire_format))
        for other in WIRE_FORMATS:
            if other.is_map != wire_format.is_map:
                with pytest.raises(WireFormatError, match=f"not a batch of {other.name}: "):
                    decode(payload, other)
        assert decode(payload).wire_format.is_map == wire_format.is_map


def test_maps_of_0_33_have_a_wider_head() -> None:
    # A sixteenth field: msgspec writes the head of the map with two bytes for its length.
    for name, head in (("vllm-0.30", b"\x88"), ("vllm-0.33", b"\xde\x00\x08")):
        writer = codec(find_format(name))
        event = writer.make("BlockStored", block_hashes=[1], token_ids=[1], block_size=1)
        assert encode(Batch(1.0, [event], 0, writer.wire_format))[11:].startswith(head)


def test_formats_by_name_and_release() -> None:
    assert find_format("vllm-0.11.2").name == "vllm-0.11"
    assert find_format("vllm-0.33.0+cpu").name == "vllm-0.33"
    for unknown in ("vllm-0.10.2", "vllm", "trtllm-1.0", "vllm-x"):
        with pytest.raises(ConfigError, match=r"wire format '.*' is unknown; expected vllm-0.11, "):
            find_format(unknown)


def test_a_field_that_the_format_lacks_is_none() -> None:
    writer = codec(find_format("vllm-0.11"))
    event = writer.make("BlockStored", block_hashes=[1], token_ids=[], block_size=0, group_idx=3)
    assert isinstance(event, StoredEvent)
    assert event.group_idx is None
    with pytest.raises(WireFormatError, match="'Other' is not an event"):
        writer.make("Other")


# --- frames ---


@settings(deadline=None)
@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=4))
def test_any_frames_are_a_message_or_our_error(data: bytes, places: list[int]) -> None:
    cuts = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    frames = [data[start:end] for start, end in pairwise(cuts)]
    with suppress(WireFormatError):
        message = read_frames(frames)
        assert message is None or message.payload == frames[-1]
