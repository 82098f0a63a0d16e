"""Offloading managers on a real trace: CPU time per block, and hit rate, beside vLLM's.

    python benchmarks/offloading.py [--trace FILE] [--json FILE] [--vllm-sources DIR]

Each request looks its blocks up until the first miss, loads the hits, stores the
rest, and is counted as one use of all its blocks; the transfers complete before
the next request. Both managers get the same calls in the same order, except that
a use is told to ours with ``touch`` and to vLLM's with its request hooks, as
vLLM's own connector does; what that connector notes in a request's context (the
positions of keys) is prepared outside the clock. The two take turns in one
process, a few requests each, in CPU time, so that a busy machine tells little.
``*_speedup`` is vLLM's time over ours, the median of the rounds.

A million blocks are more than the trace has: there both are filled with generated
conversations, outside the clock, and a round is the conversations that follow. Then
ours is reset, which has a limit in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from kvview import LookupResult, OffloadKey, ReqContext, make_offload_key
from kvview_reference.offloading import CPUOffloadingManager
from kvview_reference.replay.traces import open_trace

TRACE = Path(__file__).parents[2] / "shared" / "data" / "mooncake_conversation_trace.jsonl"
CAPACITIES = (1_000, 10_000, 50_000)
LARGE = 1_000_000
LARGE_BLOCKS_A_TURN, LARGE_BLOCKS_A_ROUND = 200, 100_000
RESET_MS = 10.0
TURN = 200  # requests that a side gets at a time
POLICIES = {"lru": 8.0, "arc": 4.0}  # the speedup that is wanted
GENERATED_REQUESTS = 12_000
PEER = "vLLM 0.33.0"
HOW_TO_GET_THE_PEER = (
    f"no {PEER}: ours alone. Its dependencies are in tests/vllm/requirements.txt, and "
    "`python tests/vllm/sources.py 0.33.0` prints a folder for --vllm-sources"
)

Requests = Sequence[Sequence[OffloadKey]]


@dataclass(frozen=True)
class Side:
    """One of the two managers, and how its connector talks to it.

    Args:
        name: Heading of its columns.
        make: Builds a manager from a capacity in blocks and a policy.
        context: Builds what a request's calls carry, from its number and keys.
        hit: What ``lookup`` answers for a key that may be loaded.
        begin: Tells the manager of a new request, or None.
        use: Tells the manager that a request used its keys.
    """

    name: str
    make: Callable[[int, str], Any]
    context: Callable[[int, Sequence[OffloadKey]], Any]
    hit: Any
    begin: Callable[[Any, Any], object] | None
    use: Callable[[Any, Sequence[OffloadKey], Any], object]


def our_side() -> Side:
    return Side(
        name="kvview",
        make=CPUOffloadingManager,
        context=lambda number, keys: ReqContext(str(number)),
        hit=LookupResult.HIT,
        begin=None,
        use=lambda manager, keys, context: manager.touch(keys, context),
    )


def vllm_side(sources: Path | None) -> Side | None:
    """The peer, or None when it cannot be imported."""
    if sources:
        sys.path.insert(0, str(sources))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        base = import_module("vllm.v1.kv_offload.base")
        peer = import_module("vllm.v1.kv_offload.cpu.manager").CPUOffloadingManager
    except ImportError as error:
        print(f"{HOW_TO_GET_THE_PEER} ({error})")
        return None

    def context(number: int, keys: Sequence[OffloadKey]) -> Any:
        request = base.ReqContext(str(number))
        for end_token, key in enumerate(keys, 1):
            request.set_offload_key_position(key, end_token)
        return request

    return Side(
        name=PEER,
        make=peer,
        context=context,
        hit=base.LookupResult.HIT,
        begin=lambda manager, context: manager.on_new_request(context),
        use=lambda manager, keys, context: manager.on_request_finished(context),
    )


def replay(side: Side, manager: Any, requests: Requests) -> tuple[int, float]:
    """Show a manager some requests.

    Returns:
        Blocks found, and CPU seconds.
    """
    contexts = [side.context(number, keys) for number, keys in enumerate(requests)]
    contexts.reverse()
    hit, begin, use = side.hit, side.begin, side.use
    found = 0
    start = time.process_time()
    for keys in requests:
        context = contexts.pop()
        if begin:
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


@dataclass
class Round:
    """What one round gave, an entry a side.

    Args:
        num_blocks: Blocks of its requests.
        found: Blocks found.
        seconds: Of CPU time.
    """

    num_blocks: int
    found: list[int]
    seconds: list[float]


def take_turns(sides: Sequence[Side], managers: Sequence[Any], requests: Requests) -> Round:
    """Show each manager the same requests, a few at a time."""
    result = Round(sum(map(len, requests)), [0] * len(sides), [0.0] * len(sides))
    for at in range(0, len(requests), TURN):
        for number, (side, manager) in enumerate(zip(sides, managers, strict=True)):
            found, seconds = replay(side, manager, requests[at : at + TURN])
            result.found[number] += found
            result.seconds[number] += seconds
    return result


def read_trace(path: Path) -> Requests:
    keys: dict[tuple[str, int], OffloadKey] = {}
    return [
        [keys.setdefault(name, _key(len(keys))) for name in ((request.scope, i) for i in ids)]
        for request in open_trace(str(path))
        if (ids := request.hash_ids)
    ]


def generated_trace(blocks_a_turn: int, seed: int = 0) -> Iterator[list[OffloadKey]]:
    """Conversations that share a first block, without end; a turn repeats what came before it."""
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


def _key(number: int) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"), 0)


class Table:
    """Lines of figures, and the same by name.

    Args:
        sides: Ours, and vLLM's if it is there.
    """

    def __init__(self, sides: Sequence[Side]) -> None:
        self.figures: dict[str, float] = {}
        header = "".join(f"{side.name:>14} M blocks/s{'hits':>9}" for side in sides)
        print(f"{'policy':<8}{'blocks':>9}{header}{'speedup':>10}{'low-high':>12}  target")

    def add(self, policy: str, capacity: int, rounds: Sequence[Round]) -> None:
        """The line of one policy and size: medians of its rounds, hits of all."""
        name, wanted = f"{policy}_{capacity}", POLICIES[policy]
        num_blocks = sum(one.num_blocks for one in rounds)
        columns = ""
        for number, suffix in enumerate(["", "_vllm"][: len(rounds[0].seconds)]):
            per_s = statistics.median(one.num_blocks / one.seconds[number] for one in rounds)
            rate = sum(one.found[number] for one in rounds) / num_blocks
            self.figures[f"{name}_blocks_per_s{suffix}"] = per_s
            self.figures[f"{name}_hit_rate{suffix}"] = rate
            columns += f"{per_s / 1e6:>25.3f}{rate:>9.2%}"
        if len(rounds[0].seconds) > 1:
            single = [one.seconds[1] / one.seconds[0] for one in rounds]
            self.figures[f"{name}_speedup"] = speedup = statistics.median(single)
            spread = f"{min(single):.1f}-{max(single):.1f}"
            met = "met" if speedup >= wanted else "missed"
            columns += f"{speedup:>9.1f}x{spread:>12}  >= {wanted:g} {met}"
        print(f"{policy:<8}{capacity:>9,}{columns}", flush=True)


def requests_of(source: Iterator[list[OffloadKey]], num_blocks: int) -> Requests:
    """The next requests that have so many blocks together."""
    requests: list[list[OffloadKey]] = []
    while num_blocks > 0:
        requests.append(next(source))
        num_blocks -= len(requests[-1])
    return requests


def measure_large(sides: Sequence[Side], rounds: int, table: Table) -> list[str]:
    """The lines of a tier that the trace does not fill.

    Returns:
        What a reset of ours takes, a line a policy.
    """
    resets = []
    for policy in POLICIES:
        source = generated_trace(LARGE_BLOCKS_A_TURN)
        managers = [side.make(LARGE, policy) for side in sides]
        while managers[0].num_free_blocks():
            take_turns(sides, managers, requests_of(source, LARGE_BLOCKS_A_ROUND))
        parts = [requests_of(source, LARGE_BLOCKS_A_ROUND) for _ in range(rounds)]
        table.add(policy, LARGE, [take_turns(sides, managers, part) for part in parts])
        del managers[1:]
        start = time.process_time()
        managers[0].reset()
        table.figures[f"{policy}_{LARGE}_reset_ms"] = taken = (time.process_time() - start) * 1e3
        met = "met" if taken <= RESET_MS else "missed"
        resets.append(f"{policy:<8}{LARGE:>9,}  reset: {taken:.2f} ms  <= {RESET_MS:g} {met}")
    return resets


def measure(
    requests: Requests, sides: Sequence[Side], rounds: int, *, large: bool
) -> dict[str, float]:
    """Replay on every side and print the table.

    Returns:
        Named figures; hit rates and blocks per second too.
    """
    num_blocks = sum(map(len, requests))
    print(
        f"{len(requests):,} requests, {num_blocks:,} blocks; {LARGE:,} blocks: generated, "
        f"{LARGE_BLOCKS_A_ROUND:,} blocks a round; medians of {rounds} rounds, CPU time"
    )
    table = Table(sides)
    for capacity in CAPACITIES:
        for policy in POLICIES:
            table.add(
                policy,
                capacity,
                [
                    take_turns(sides, [side.make(capacity, policy) for side in sides], requests)
                    for _ in range(rounds)
                ],
            )
    if large:
        print("\n".join(measure_large(sides, rounds, table)))
    return table.figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, default=TRACE, help=f"default: {TRACE.name}")
    parser.add_argument("--json", type=Path, dest="json_file", help="flat object of figures")
    parser.add_argument("--vllm-sources", type=Path, help=f"folder that holds {PEER}'s package")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-large", action="store_true", help=f"not a tier of {LARGE:,} blocks")
    arguments = parser.parse_args()
    if arguments.trace.exists():
        requests = read_trace(arguments.trace)
    elif arguments.trace == TRACE:
        print(f"no {TRACE.name}: a generated workload of {GENERATED_REQUESTS:,} requests instead")
        requests = list(islice(generated_trace(14), GENERATED_REQUESTS))
    else:
        parser.error(f"no such trace: {arguments.trace}")
    peer = vllm_side(arguments.vllm_sources)
    sides = [our_side(), peer] if peer else [our_side()]
    figures = measure(requests, sides, arguments.rounds, large=not arguments.no_large)
    if arguments.json_file:
        arguments.json_file.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
