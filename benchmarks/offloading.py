"""Offloading managers on a real trace: CPU time per block, and hit rate, beside vLLM's.

    python benchmarks/offloading.py [--trace FILE] [--json FILE] [--vllm-sources DIR]

Each request looks its blocks up until the first miss, loads the hits, stores the
rest, and is counted as one use of all its blocks; the transfers complete before
the next request. Both managers get the same calls in the same order, except that
a use is told to ours with ``touch`` and to vLLM's with its request hooks, as
vLLM's own connector does; what that connector notes in a request's context (the
positions of keys) is prepared outside the clock. The two take turns in one
process, in CPU time, so that a busy machine tells little. ``*_speedup`` is vLLM's time
over ours, the median of the rounds.
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
from pathlib import Path
from typing import Any

from kvview import LookupResult, OffloadKey, ReqContext, make_offload_key
from kvview_reference.offloading import CPUOffloadingManager
from kvview_reference.replay.traces import open_trace

TRACE = Path(__file__).parents[2] / "shared" / "data" / "mooncake_conversation_trace.jsonl"
CAPACITIES = (10_000, 50_000)
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


def replay(side: Side, capacity: int, policy: str, requests: Requests) -> tuple[int, float]:
    """Run the trace through a fresh manager.

    Returns:
        Blocks found, and CPU seconds.
    """
    manager = side.make(capacity, policy)
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


def read_trace(path: Path) -> Requests:
    keys: dict[tuple[str, int], OffloadKey] = {}
    return [
        [keys.setdefault(name, _key(len(keys))) for name in ((request.scope, i) for i in ids)]
        for request in open_trace(str(path))
        if (ids := request.hash_ids)
    ]


def generated_trace(seed: int = 0) -> Iterator[list[OffloadKey]]:
    """Conversations that share a first block; a turn repeats what came before it."""
    rng = random.Random(seed)
    sessions: list[list[OffloadKey]] = []
    num_keys = 1
    for _ in range(GENERATED_REQUESTS):
        if sessions and rng.random() < 0.35:
            session = sessions[-1 - min(int(rng.expovariate(0.01)), len(sessions) - 1)]
        else:
            sessions.append(session := [_key(0)])
        grown = num_keys + 1 + int(rng.expovariate(1 / 14))
        session += map(_key, range(num_keys, grown))
        num_keys = grown
        yield list(session)


def _key(number: int) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"), 0)


def measure(requests: Requests, sides: Sequence[Side], rounds: int) -> dict[str, float]:
    """Replay on every side and print the table.

    Returns:
        Named figures; hit rates and blocks per second too.
    """
    num_blocks = sum(map(len, requests))
    figures: dict[str, float] = {}
    print(
        f"{len(requests):,} requests, {num_blocks:,} blocks; medians of {rounds} rounds, CPU time"
    )
    header = "".join(f"{side.name:>14} M blocks/s{'hits':>9}" for side in sides)
    print(f"{'policy':<8}{'blocks':>8}{header}{'speedup':>10}{'low-high':>11}  target")
    for capacity in CAPACITIES:
        for policy, wanted in POLICIES.items():
            runs: list[list[tuple[int, float]]] = [[] for _ in sides]
            for _ in range(rounds):
                for side, side_runs in zip(sides, runs, strict=True):
                    side_runs.append(replay(side, capacity, policy, requests))
            seconds = [statistics.median(run[1] for run in side_runs) for side_runs in runs]
            rates = [side_runs[0][0] / num_blocks for side_runs in runs]
            name = f"{policy}_{capacity}"
            figures[f"{name}_blocks_per_s"] = num_blocks / seconds[0]
            figures[f"{name}_hit_rate"] = rates[0]
            columns = "".join(
                f"{num_blocks / median / 1e6:>25.3f}{rate:>9.2%}"
                for median, rate in zip(seconds, rates, strict=True)
            )
            if len(sides) > 1:
                single = [peer[1] / our[1] for our, peer in zip(*runs, strict=True)]
                figures[f"{name}_speedup"] = speedup = statistics.median(single)
                figures[f"{name}_hit_rate_vllm"] = rates[1]
                spread = f"{min(single):.1f}-{max(single):.1f}"
                met = "met" if speedup >= wanted else "missed"
                columns += f"{speedup:>9.1f}x{spread:>11}  >= {wanted:g} {met}"
            print(f"{policy:<8}{capacity:>8,}{columns}", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, default=TRACE, help=f"default: {TRACE.name}")
    parser.add_argument("--json", type=Path, dest="json_file", help="flat object of figures")
    parser.add_argument("--vllm-sources", type=Path, help=f"folder that holds {PEER}'s package")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.trace.exists():
        requests = read_trace(arguments.trace)
    elif arguments.trace == TRACE:
        print(f"no {TRACE.name}: a generated workload of {GENERATED_REQUESTS:,} requests instead")
        requests = list(generated_trace())
    else:
        parser.error(f"no such trace: {arguments.trace}")
    peer = vllm_side(arguments.vllm_sources)
    figures = measure(requests, [our_side(), peer] if peer else [our_side()], arguments.rounds)
    if arguments.json_file:
        arguments.json_file.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
