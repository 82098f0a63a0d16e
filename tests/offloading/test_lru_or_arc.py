"""LRU or ARC, the one that hits more: LRU until ARC is ahead, and not much worse than either."""

from __future__ import annotations

from itertools import chain, takewhile
from random import Random
from zlib import crc32

import pytest

from kvview import LookupResult, OffloadKey, make_offload_key
from kvview_reference.offloading import CPUOffloadingManager
from kvview_reference.offloading.lru_or_arc import LRUOrARCPolicy
from kvview_reference.offloading.policies import InFlight, LRUPolicy
from kvview_reference.replay.workload import generate_trace

KEYS = [make_offload_key(number.to_bytes(32, "big"), 0) for number in range(4000)]
NOTHING = InFlight(frozenset(), frozenset())


@pytest.mark.parametrize("seed", range(20))
def test_without_a_sample_it_is_lru(seed: int) -> None:
    draw = Random(seed)
    keys = [key for key in KEYS if crc32(key) % 8][:40]
    policies = LRUPolicy(16), LRUOrARCPolicy(16)
    held: list[OffloadKey] = []
    loading: set[OffloadKey] = set()
    for _ in range(300):
        in_flight = InFlight(frozenset(loading), frozenset())
        if held and draw.random() < 0.4:
            chosen = draw.sample(held, min(3, len(held)))
            for policy in policies:
                policy.touch(chosen, in_flight)
            continue
        if draw.random() < 0.3:
            for policy in policies:
                policy.release(loading)
            loading = set(draw.sample(held, len(held) // 4))
            continue
        new = draw.sample([key for key in keys if key not in held], 3)
        num_victims = max(0, len(held) + len(new) - 16)
        victims, same = (policy.admit(new, num_victims, in_flight) for policy in policies)
        assert sorted(victims) == sorted(same)
        held = [key for key in held if key not in victims] + new


def hits_of(policy: LRUPolicy | LRUOrARCPolicy, uses: list[OffloadKey], room: int) -> int:
    held: set[OffloadKey] = set()
    num_hits = 0
    for key in uses:
        if key in held:
            num_hits += 1
            policy.touch([key], NOTHING)
        else:
            held -= set(policy.admit([key], int(len(held) == room), NOTHING))
            held.add(key)
    return num_hits


def test_a_scan_does_not_evict_keys_that_are_used_again() -> None:
    draw = Random(0)
    hot, cold = KEYS[:300], iter(KEYS[300:])
    uses = list(chain.from_iterable((*draw.sample(hot, 3), next(cold)) for _ in range(3700)))
    assert hits_of(LRUOrARCPolicy(320), uses, 320) > 1.05 * hits_of(LRUPolicy(320), uses, 320)


def prefix_hits(policy: str, room: int) -> float:
    """The share of the prompt blocks of a workload that a manager has when a request starts."""
    manager = CPUOffloadingManager(room, policy)
    num_hits = num_blocks = 0
    for request in generate_trace(num_requests=3000, seed=1, block_size=512):
        full = request.hash_ids[: request.num_prompt_tokens // 512]
        keys = [make_offload_key(n.to_bytes(32, "big"), 0) for n in full]
        held = list(takewhile(lambda key: manager.lookup(key, None) is LookupResult.HIT, keys))
        num_hits, num_blocks = num_hits + len(held), num_blocks + len(request.hash_ids)
        if (output := manager.prepare_store(keys[len(held) :])) is not None:
            manager.touch(keys)
            manager.complete_store(output.keys_to_store)
    return num_hits / num_blocks


@pytest.mark.parametrize("room", [500, 2000])
def test_it_does_not_lose_to_either(room: int) -> None:
    better = max(prefix_hits("lru", room), prefix_hits("arc", room))
    assert prefix_hits("lru-or-arc", room) > better - 0.002
