"""The CPU manager beside vLLM 0.33.0's own: the same requests, the same answers.

Both promise the same of lookups, of what is stored, and, for LRU, of what is
evicted. By design they differ in the following, which the requests here avoid:

- vLLM orders a request's keys by their positions when the request finishes; here
  the connector says ``touch``. So a request touches what vLLM saw it use, at the
  moment at which vLLM is told that it finished.
- vLLM asserts where the contract raises (load of a missing key, twice completed).
- vLLM reuses the pages of jobs in flight at a reset, and leaves it to its
  scheduler to ignore them; here they are quarantined (OFF-8). Resets are idle.
- vLLM's event of a failed store is housekeeping of its own (``metadata_only``).
- Under pressure the ARC policies differ: vLLM's lets a ghost enter T1 and bounds
  each ghost list by the capacity; here both are as published.
"""

from __future__ import annotations

import importlib.metadata
import random
import warnings
from typing import Any

import pytest

from kvview import LookupResult, OffloadKey, ReqContext, fold_events, make_offload_key
from kvview_reference.offloading import CPUOffloadingManager

NAMES = [make_offload_key(i.to_bytes(4, "big"), 0) for i in range(24)]


@pytest.fixture(scope="module")
def vllm() -> Any:
    """vLLM's module of the CPU manager."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module("vllm.v1.kv_offload.cpu.manager")
    except ImportError as error:
        pytest.skip(f"needs vLLM 0.33.0 and its dependencies, see .ci/vllm-lane: {error}")
    version = importlib.metadata.version("vllm")
    if not version.startswith("0.33."):
        pytest.skip(f"compares with vLLM 0.33, found {version}")
    return module


class _Pair:
    """Both managers, given one stream of requests."""

    def __init__(self, vllm: Any, capacity: int, policy: str) -> None:
        self.vllm = vllm
        self.ours = CPUOffloadingManager(capacity, policy, enable_events=True)
        self.theirs = vllm.CPUOffloadingManager(capacity, policy, enable_events=True)
        self.jobs: list[tuple[str, list[OffloadKey], Any]] = []
        self.advertised: set[OffloadKey] = set()
        self.num_evicted = 0
        self.events: list[Any] = []

    def request(self, number: int, keys: list[OffloadKey]) -> None:
        """A request of a prefix: load its hits, offer the rest, finish."""
        ours, theirs = ReqContext(str(number)), self.vllm.ReqContext(str(number))
        for position, key in enumerate(keys):
            theirs.set_offload_key_position(key, position)
        self.theirs.on_new_request(theirs)
        num_hits = 0
        while num_hits < len(keys) and self.ours.lookup(keys[num_hits]) is LookupResult.HIT:
            num_hits += 1
        hits, rest = keys[:num_hits], keys[num_hits:]
        used = {key for key in rest if self.ours.lookup(key) is not LookupResult.HIT_PENDING}
        if hits:
            self.ours.prepare_load(hits, ours)
            self.theirs.prepare_load(hits, theirs)
            self.jobs.append(("load", hits, theirs))
        output, expected = (
            self.ours.prepare_store(rest, ours),
            self.theirs.prepare_store(rest, theirs),
        )
        assert (output is None) == (expected is None)
        if output and expected:
            assert list(output.keys_to_store) == expected.keys_to_store
            assert list(output.evicted_keys) == expected.evicted_keys
            self.num_evicted += len(expected.evicted_keys)
            if output.keys_to_store:
                self.jobs.append(("store", list(output.keys_to_store), theirs))
        self.ours.touch([key for key in keys if key in hits or key in used], ours)
        self.theirs.on_request_finished(theirs)

    def complete(self, index: int, success: bool) -> None:
        direction, keys, theirs = self.jobs.pop(index)
        if direction == "load":
            self.ours.complete_load(keys)
            self.theirs.complete_load(keys, theirs)
        else:
            self.ours.complete_store(keys, success=success)
            self.theirs.complete_store(keys, theirs, success)

    def reset(self) -> None:
        while self.jobs:
            self.complete(0, True)
        self.agree()
        self.ours.reset()
        self.theirs.reset_cache()
        self.advertised.clear()  # vLLM tells consumers of a reset in another way

    def agree(self) -> None:
        """Both answer the same for every key, and their events say the same."""
        context = self.vllm.ReqContext("")
        for key in NAMES:
            answer = self.theirs.lookup(key, context)
            assert self.ours.lookup(key).name == answer.name
        for event in self.theirs.take_events():
            if event.metadata_only:
                continue
            assert self.advertised.issuperset(event.keys) is event.removed
            self.advertised ^= set(event.keys)
        self.events += self.ours.take_events()
        assert fold_events(self.events).get("CPU", set()) == self.advertised


def _prefix(rng: random.Random) -> list[OffloadKey]:
    """Part of one of a few chains that share their heads; mostly a prefix."""
    chain = rng.randrange(4)
    keys = NAMES[:3] + NAMES[3 + 5 * chain : 8 + 5 * chain]
    start = rng.choice((0, 0, 0, rng.randrange(8)))
    return keys[start : start + rng.randint(1, 8)]


def _run(pair: _Pair, rng: random.Random, num_steps: int) -> None:
    for number in range(num_steps):
        choice = rng.random()
        if choice < 0.5:
            pair.request(number, _prefix(rng))
        elif choice < 0.99:
            if pair.jobs:
                pair.complete(rng.randrange(len(pair.jobs)), rng.random() < 0.8)
        else:
            pair.reset()
        pair.agree()


@pytest.mark.parametrize("capacity", [1, 3, 6, 10, 17])
@pytest.mark.parametrize("seed", range(4))
def test_lru_as_vllm(vllm: Any, capacity: int, seed: int) -> None:
    pair = _Pair(vllm, capacity, "lru")
    _run(pair, random.Random(seed), 400)
    assert pair.num_evicted > 0


@pytest.mark.parametrize("seed", range(4))
def test_arc_as_vllm_while_there_is_room(vllm: Any, seed: int) -> None:
    pair = _Pair(vllm, len(NAMES), "arc")
    _run(pair, random.Random(seed), 400)
    assert pair.num_evicted == 0
