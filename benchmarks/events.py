"""Reading and writing of KV events on one core: events per second of CPU time.

python benchmarks/events.py [--seconds 1]

Each batch has 32 events of one block of 16 tokens, four in ten of them removals. Reading is
strict: each batch is written again and compared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

from harness import Table  # type: ignore[import-not-found, unused-ignore]

from kvview.events.formats import WIRE_FORMATS, WireFormat
from kvview.events.wire import Batch, EventDecoder, codec, encode

_EVENTS = 32


def make_batch(wire_format: WireFormat) -> Batch:
    writer = codec(wire_format)
    stored = {
        "block_hashes": [2**63 + 11],
        "parent_block_hash": 2**62 + 5,
        "token_ids": list(range(150_000, 150_016)),
        "block_size": 16,
        "medium": "GPU",
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    events = [
        writer.make("BlockRemoved" if number % 5 > 2 else "BlockStored", **stored)
        for number in range(_EVENTS)
    ]
    return Batch(1.5, events, 0, wire_format)


def rate(call: Callable[[], object], seconds: float) -> float:
    """Measure events per second of CPU time: the best of twenty parts."""
    best = 0.0
    for _ in range(20):
        calls, start = 0, time.process_time()
        while (spent := time.process_time() - start) < seconds / 20:
            for _ in range(20):
                call()
            calls += 20
        best = max(best, calls * _EVENTS / spent)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0)
    seconds = parser.parse_args().seconds
    table = Table("events/s", "strict", "format detected", "lenient", "written")
    for wire_format in WIRE_FORMATS:
        batch = make_batch(wire_format)
        payload = encode(batch)
        decoders = (EventDecoder(wire_format), EventDecoder(), EventDecoder(strict=False))
        calls: list[Callable[[], object]] = [partial(encode, batch)]
        calls[:0] = [partial(decoder.decode, payload) for decoder in decoders]
        rates = [rate(call, seconds) for call in calls]
        table.add(wire_format.name, *(f"{value:,.0f}" for value in rates))
    table.show()


if __name__ == "__main__":
    main()
