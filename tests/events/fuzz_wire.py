"""Fuzzing of what reads KV events, guided by coverage (atheris, which is libFuzzer).

    pip install atheris
    PYTHONPATH=. python tests/events/fuzz_wire.py -runs=1000000 -rss_limit_mb=512 [FOLDER of seeds]
    PYTHONPATH=. python tests/events/fuzz_wire.py --blind 1000000  # faster, without atheris

1. Whatever the bytes are, the answer is a batch or ``WireFormatError`` (rule 3 of
   :mod:`kvview.events.wire`), strictly and leniently.
2. A batch that is read strictly is written back as the same bytes; one that is read leniently
   can be folded, judged for every consumer, and printed.
3. Bytes that are a recording, plain or in gzip, are messages or ``WireFormatError``.
4. Bytes cut into frames, of a message or of a replay in either layout, are a message, the end
   of a replay or ``WireFormatError``.

It begins from a batch of each event in each format, and from recordings of them. One input in
two is bytes made wrong; the other is values made wrong, so that it is msgpack still.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import random
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

atheris: Any = None
instrumented: Any = contextlib.nullcontext()
if __name__ == "__main__" and "--blind" not in sys.argv:
    atheris = importlib.import_module("atheris")

    instrumented = atheris.instrument_imports(include=["kvview.events", "kvview.testing.events"])
with instrumented:
    from kvview import WireFormatError
    from kvview.events.channel import read_frames
    from kvview.events.formats import WIRE_FORMATS
    from kvview.events.recording import Message, Recording, read_recording
    from kvview.events.wire import Batch, EventDecoder, codec, encode
    from kvview.testing.events.command import _line
    from kvview.testing.events.consumers import CONSUMERS
    from kvview.testing.events.stream_fold import StreamFold

FOLDER = tempfile.TemporaryDirectory(prefix="kvview-fuzz-")  # in memory where TMPDIR is
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
    for name in ("seed.jsonl", "seed.jsonl.gz"):
        path = Path(FOLDER.name, name)
        with Recording(str(path)) as recording:
            for number, payload in enumerate(found[:3]):
                recording.write(Message(number, payload, "kv", 1.5))
        found.append(path.read_bytes())
    return found


def look(data: bytes) -> None:
    """Do all that is done with bytes that came."""
    if data[:2] == b"\x1f\x8b" or data[:1] == b"{":
        look_at_recording(data)
    else:
        look_at_frames(data)
        look_at_batch(data)


def look_at_recording(data: bytes) -> None:
    """Read it as a file (3.), and fold the messages."""
    path = Path(FOLDER.name, "data.jsonl.gz" if data[:1] != b"{" else "data.jsonl")
    path.write_bytes(data)
    fold = StreamFold(LENIENT)
    with contextlib.suppress(WireFormatError):
        for message in itertools.islice(read_recording(str(path)), 100):
            fold.apply(message.sequence, message.payload)


def look_at_frames(data: bytes) -> None:
    """Cut it where its own first bytes say (4.)."""
    places = sorted(byte % (len(data) + 1) for byte in data[:4])
    for cuts in ((), places[:1], places[:2], places[:4], (0, 8)):
        frames = [data[a:b] for a, b in itertools.pairwise((0, *cuts, len(data)))]
        with contextlib.suppress(WireFormatError):
            message = read_frames(frames)
            assert message is None or message.payload == frames[-1]


def look_at_batch(data: bytes) -> None:
    """Decode, write back, fold, judge and print (1., 2.)."""
    with contextlib.suppress(WireFormatError):
        assert encode(STRICT.decode(data)) == data
    fold = StreamFold(LENIENT)
    batch, found = fold.apply(0, data)
    for finding in found:
        str(finding)
    if batch is None:
        return
    assert batch.problems or encode(batch) == data
    for event in batch.events:
        _line(event, fold.sizes)
    for held in fold.held.values():
        fold.sizes.num_tokens(held)
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
STRICT, LENIENT = EventDecoder(), EventDecoder(strict=False)


def damage(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, left out, repeated or put in."""
    wrong = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(wrong) + 1)
        to = min(len(wrong), at + rng.choice((0, 1, 1, 2, 8, 40)))
        wrong[at:to] = rng.choice((b"", rng.randbytes(to - at), wrong[at:to] * 2, b"\xff\xdd"))
    return bytes(wrong)


def blind(runs: int, seed: int = 0) -> int:
    """Look at so many inputs; the most memory that it took, in MiB."""
    rng = random.Random(seed)
    for number in range(runs):
        if number and not number % 100_000:
            print(f"{number} inputs", flush=True)
        data = rng.choice(SEEDS)
        if data[:1] not in b"{\x1f" and rng.random() < 0.5:
            with contextlib.suppress(ValueError, OverflowError, RecursionError):
                data = msgspec.msgpack.encode(change(msgspec.msgpack.decode(data), rng))
        else:
            data = damage(data, rng)
        try:
            look(data)
        except BaseException:
            print(f"broken by {data!r}", file=sys.stderr)
            raise
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


if __name__ == "__main__" and "--blind" in sys.argv:
    number = int(sys.argv[sys.argv.index("--blind") + 1])
    print(f"{number} inputs, each a batch, a message or our error; {blind(number)} MiB at most")
elif __name__ == "__main__":
    atheris.Setup(sys.argv, look, custom_mutator=mutate)
    atheris.Fuzz()
