"""The manager of the CPU tier on a real trace, compared with vLLM's: CPU time, and hits.

    python benchmarks/offloading.py [--vllm-sources DIR] [--rounds N]

Each request looks its blocks up until the first miss, loads the hits, stores the rest, and counts
as one use of all its blocks; the transfers complete before the next request. Both managers get the
same calls in the same order, except that a use is reported to kvview's with ``touch`` and to vLLM's
with its request hooks, as vLLM's own connector does; the positions of keys that this connector
notes are prepared outside the clock. The two take turns, 200 requests each, and each of them is
first in every second turn. The speedup is vLLM's time over kvview's.

A million blocks are more than the trace has, so both are filled with generated conversations,
outside the clock, and a round is the conversations that follow. Then kvview's is reset.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from typing import Any

from harness import (  # type: ignore[import-not-found, unused-ignore]
    DATA,
    PEER,
    Figures,
    beside_vllm,
)

from kvview import LookupResult, OffloadKey, ReqContext, make_offload_key
from kvview_reference.offloading import CPUOffloadingManager
from kvview_reference.traces.reader import read_trace

TRACE = DATA / "mooncake_conversation_trace.jsonl"
CAPACITIES = (1_000, 10_000, 50_000)
LARGE = 1_000_000
LARGE_BLOCKS_A_TURN, LARGE_BLOCKS_A_ROUND = 200, 100_000
TURN = 200  # requests
TARGETS = {"lru": 8.0, "arc": 4.0}

Requests = Sequence[Sequence[OffloadKey]]


@dataclass(frozen=True)
class Side:
    """One of the two managers, and the calls of its connector.

    Args:
        make: Builds a manager from a capacity in blocks and a policy.
        context: Builds the context of a request from its number and keys.
        hit: Result of ``lookup`` for a key that may be loaded.
        begin: Reports a new request to the manager.
        use: Reports the use of a request's keys to the manager.
    """

    make: Callable[[int, str], Any]
    context: Callable[[int, Sequence[OffloadKey]], Any]
    hit: Any
    begin: Callable[[Any, Any], object]
    use: Callable[[Any, Sequence[OffloadKey], Any], object]


def both_sides() -> list[Side]:
    base = import_module("vllm.v1.kv_offload.base")

    def context(number: int, keys: Sequence[OffloadKey]) -> Any:
        request = base.ReqContext(str(number))
        for end_token, key in enumerate(keys, 1):
            request.set_offload_key_position(key, end_token)
        return request

    ours = Side(
        make=CPUOffloadingManager,
        context=lambda number, keys: ReqContext(str(number)),
        hit=LookupResult.HIT,
        begin=lambda manager, context: None,
        use=lambda manager, keys, context: manager.touch(keys, context),
    )
    theirs = Side(
        make=import_module("vllm.v1.kv_offload.cpu.manager").CPUOffloadingManager,
        context=context,
        hit=base.LookupResult.HIT,
        begin=lambda manager, context: manager.on_new_request(context),
        use=lambda manager, keys, context: manager.on_request_finished(context),
    )
    return [ours, theirs]


def serve(side: Side, manager: Any, requests: Requests) -> tuple[int, float]:
    """Serve some requests; returns the blocks found, and CPU seconds."""
    contexts = [side.context(number, keys) for number, keys in enumerate(requests)]
    hit, begin, use, found = side.hit, side.begin, side.use, 0
    start = time.process_time()
    for keys, context in zip(requests, contexts, strict=True):
        begin(manager, context)
        num_hits = 0
        for key in keys:
            if manager.lookup(key, context) is not hit:
                break
            num_hits += 1
        hits, rest = keys[:num_hits], keys[num_hits:]
        if hits:
            manager.prepare_load(hits, context)
        output = manager.prepare_store(rest, context) if rest else None
        use(manager, keys, context)
        if hits:
            manager.complete_load(hits, context)
        if output and output.keys_to_store:
            manager.complete_store(output.keys_to_store, context)
        found += num_hits
    return found, time.process_time() - start


def play_round(
    sides: Sequence[Side], managers: Sequence[Any], requests: Requests
) -> tuple[list[float], list[float]]:
    """Serve the same requests on each side, a few at a time; returns hit rates, and seconds."""
    found, seconds = [0] * len(sides), [0.0] * len(sides)
    for at in range(0, len(requests), TURN):
        pairs = list(enumerate(zip(sides, managers, strict=True)))
        if at // TURN % 2:  # the second side of a turn finds the keys in the processor's cache
            pairs.reverse()
        for number, (side, manager) in pairs:
            more, took = serve(side, manager, requests[at : at + TURN])
            found[number] += more
            seconds[number] += took
    num_blocks = sum(map(len, requests))
    return [hits / num_blocks for hits in found], [took / num_blocks for took in seconds]


def read_requests() -> Requests:
    if not TRACE.exists():
        print(f"no {TRACE.name}: generated conversations instead\n")
        return list(islice(conversations(14), 12_000))
    trace = read_trace(TRACE)
    return [[*map(_key, request.hash_ids)] for request in trace.requests if request.hash_ids]


def conversations(blocks_a_turn: int, seed: int = 0) -> Iterator[list[OffloadKey]]:
    """Generate turns that repeat the turns before them and share a first block, without end."""
    rng = random.Random(seed)
    sessions: list[list[OffloadKey]] = []
    num_keys = 1
    while True:
        if sessions and rng.random() < 0.35:
            session = sessions[-1 - min(int(rng.expovariate(0.01)), len(sessions) - 1)]
        else:
            sessions.append(session := [_key(0)])
        grown = num_keys + 1 + int(rng.expovariate(1 / blocks_a_turn))
        session += map(_key, range(num_keys, grown))
        num_keys = grown
        yield list(session)


def take_blocks(source: Iterator[list[OffloadKey]], num_blocks: int) -> Requests:
    """Take requests that have this many blocks together."""
    requests: list[list[OffloadKey]] = []
    while num_blocks > 0:
        requests.append(next(source))
        num_blocks -= len(requests[-1])
    return requests


def _key(number: int) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"), 0)


def measure(rounds: int) -> None:
    sides, requests = both_sides(), read_requests()
    figures = Figures("us a block", 1e6, PEER, "hits", f"hits of {PEER}")

    def add(name: str, policy: str, played: Sequence[tuple[list[float], list[float]]]) -> None:
        rates = [sum(of) / len(played) for of in zip(*(rates for rates, _ in played), strict=True)]
        times = list(zip(*(seconds for _, seconds in played), strict=True))
        figures.ratio(name, times, TARGETS[policy], *(f"{rate:.2%}" for rate in rates))

    for capacity in CAPACITIES:
        for policy in TARGETS:
            played = [
                play_round(sides, [side.make(capacity, policy) for side in sides], requests)
                for _ in range(rounds)
            ]
            add(f"{policy} {capacity:,}", policy, played)
    for policy in TARGETS:
        source = conversations(LARGE_BLOCKS_A_TURN)
        managers = [side.make(LARGE, policy) for side in sides]
        while managers[0].num_free_blocks():
            play_round(sides, managers, take_blocks(source, LARGE_BLOCKS_A_ROUND))
        parts = [take_blocks(source, LARGE_BLOCKS_A_ROUND) for _ in range(rounds)]
        played = [play_round(sides, managers, part) for part in parts]
        add(f"{policy} {LARGE:,}", policy, played)
        start = time.process_time()
        managers[0].reset()
        figures.limit(f"{policy} reset, ms", (time.process_time() - start) * 1e3, 10.0)
    figures.show()


main = beside_vllm(measure, 3)

if __name__ == "__main__":
    main()
