"""Fuzzing of the decoder of KV events, guided by coverage (atheris, which is libFuzzer).

    pip install atheris
    python tests/events/fuzz_wire.py -runs=1000000 -rss_limit_mb=512 [FOLDER of seeds]

1. Whatever the bytes are, the answer is a batch or ``WireFormatError`` (rule 3 of
   :mod:`kvview.events.wire`), strictly and leniently.
2. A batch that is read strictly is written back as the same bytes; one that is read leniently
   can be folded, judged for every consumer, and printed.

It begins from a batch of each event in each format. One input in two is bytes made wrong; the
other is values made wrong, so that it is msgpack still.
"""

from __future__ import annotations

import contextlib
import random
import sys
from typing import Any

import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]
import msgspec

with atheris.instrument_imports(include=["kvview.events", "kvview.testing.events"]):
    from kvview import WireFormatError
    from kvview.events.formats import WIRE_FORMATS
    from kvview.events.wire import Batch, codec, decode, encode
    from kvview.testing.events.command import _line
    from kvview.testing.events.consumers import CONSUMERS
    from kvview.testing.events.stream_fold import StreamFold

FIELDS = {
    "block_hashes": [1, b"h" * 32],
    "parent_block_hash": 2,
    "token_ids": [*range(32)],
    "block_size": 16,
    "medium": "CPU",
    "lora_name": "adapter",
    "extra_keys": [["salt"], None],
    "group_idx": 1,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 64,
    "locality": "LOCAL",
    "session_id": "session",
    "lookahead_token_ids": [[1], []],
    "metadata": {"cache_salt": "salt"},
}


def seeds() -> list[bytes]:
    """A batch of each event in each format."""
    found = []
    for wire_format in WIRE_FORMATS:
        make = codec(wire_format).make
        for tag in ("BlockStored", "BlockRemoved", "AllBlocksCleared"):
            found.append(encode(Batch(1.0, [make(tag, **FIELDS)], 0, wire_format)))
    return found


def look(data: bytes) -> None:
    """Do all that is done with a message that came."""
    with contextlib.suppress(WireFormatError):
        assert encode(decode(data)) == data
    batch, found = StreamFold().apply(0, data)
    for finding in found:
        str(finding)
    if batch is None:
        return
    assert batch.problems or encode(batch) == data
    for event in batch.events:
        _line(event)
    for consumer in CONSUMERS:
        assert len(consumer.judge(batch)) == len(batch.events)


VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 2**63, 2**64 - 1, 1.5, "", "GPU", "BlockStored", b"", b"h" * 32),
    *([], {}, [[]], [None], [1, "2", b"3"], {"type": "BlockStored"}, [[1, 2]], float("nan")),
]


def change(value: Any, rng: random.Random) -> Any:
    """The value with one part replaced, left out, or written twice."""
    if rng.random() < 0.3 or not isinstance(value, list | dict) or not value:
        return rng.choice(VALUES)
    keys = [*value] if isinstance(value, dict) else [*range(len(value))]
    key = rng.choice(keys)
    deed = rng.random()
    if deed < 0.15:
        del value[key]
    elif deed < 0.3 and isinstance(value, list):
        value.insert(key, value[key])
    else:
        value[key] = change(value[key], rng)
    return value


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Of a seed or of what is there already: bytes at random are hardly ever a batch."""
    rng = random.Random(seed)
    if not data.strip(b"\n") or rng.random() < 0.1:
        data = rng.choice(SEEDS)
    if rng.random() < 0.5:
        with contextlib.suppress(ValueError, OverflowError, RecursionError):
            return msgspec.msgpack.encode(change(msgspec.msgpack.decode(data), rng))[:max_size]
    mutated: bytes = atheris.Mutate(data, max_size)
    return mutated


SEEDS = seeds()

if __name__ == "__main__":
    atheris.Setup(sys.argv, look, custom_mutator=mutate)
    atheris.Fuzz()
