"""The CPU manager and its policies beyond the contract, which the model of the kit checks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from kvview import (
    ConfigError,
    KeyNotLoadableError,
    LookupResult,
    OffloadKey,
    ReqContext,
    TransferNotInFlightError,
    make_offload_key,
)
from kvview_reference.offloading import CPUOffloadingManager
from kvview_reference.offloading.policies import (
    ARCPolicy,
    CachePolicy,
    InFlight,
    LRUPolicy,
    register_policy,
)

HIT = LookupResult.HIT
CTX = ReqContext("request")
POLICIES = ["lru", "arc"]
A, B, C, D, E, F, *_ = KEYS = [make_offload_key(bytes([i]) * 4, i % 2) for i in range(12)]
NOTHING = InFlight(frozenset(), frozenset())


def stored(manager: CPUOffloadingManager, *keys: OffloadKey) -> list[OffloadKey]:
    """Store keys to the end; returns the evicted ones."""
    output = manager.prepare_store(keys, CTX)
    assert output is not None
    manager.complete_store(output.keys_to_store, CTX)
    return list(output.evicted_keys)


def hits(manager: CPUOffloadingManager) -> set[OffloadKey]:
    return {key for key in KEYS if manager.lookup(key, CTX) is HIT}


# The public API


def test_errors_name_the_key_and_its_state() -> None:
    manager = CPUOffloadingManager(4)
    stored(manager, A)
    manager.prepare_store([B], CTX)
    for key, state in ((B, "not ready"), (C, "not held")):
        with pytest.raises(KeyNotLoadableError, match=f"^OFF-2: key {key.hex()} is {state}"):
            manager.prepare_load([A, key], CTX)
    with pytest.raises(TransferNotInFlightError, match=f"^OFF-9: no store of key {A.hex()} is"):
        manager.complete_store([B, A], CTX)
    with pytest.raises(TransferNotInFlightError, match=f"^OFF-9: no load of key {A.hex()} is"):
        manager.complete_load([A], CTX)


# Configuration


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2", None])
@pytest.mark.parametrize("name", ["num_blocks", "store_threshold", "max_tracked_keys"])
def test_impossible_sizes(name: str, value: Any) -> None:
    options: dict[str, Any] = {"num_blocks": 1, name: value}
    with pytest.raises(ConfigError, match=f"{name} must be a positive int, got {value!r}"):
        CPUOffloadingManager(**options)


def test_third_party_policy() -> None:
    class NeverTouched(LRUPolicy):
        def touch(self, keys: Sequence[OffloadKey], in_flight: InFlight) -> None:
            """Leave the order as it is."""

    register_policy("never-touched", NeverTouched)
    for name in ("never-touched", *POLICIES):
        with pytest.raises(ConfigError, match=f"{name}.* registered already"):
            register_policy(name, NeverTouched)
    register_policy("never-touched", NeverTouched, replace=True)
    manager = CPUOffloadingManager(2, "never-touched")
    stored(manager, A)
    stored(manager, B)
    manager.touch([A], CTX)
    assert stored(manager, C) == [A]


def test_tracker_is_bounded_and_forgets_the_least_recently_offered() -> None:
    manager = CPUOffloadingManager(4, store_threshold=2, max_tracked_keys=2)
    for keys, expected in (([A], []), ([B], []), ([C], []), ([A], []), ([C], [C]), ([B], [])):
        output = manager.prepare_store(keys, CTX)
        assert output is not None
        assert output.keys_to_store == expected


def test_tracker_smaller_than_one_offer_keeps_the_head_of_the_prefix() -> None:
    manager = CPUOffloadingManager(4, store_threshold=2, max_tracked_keys=2)
    manager.prepare_store([A, B, C, D], CTX)
    output = manager.prepare_store([A, B, C, D], CTX)
    assert output is not None
    assert output.keys_to_store == [A, B]


# Choices that the contract leaves to a manager


def test_of_one_store_the_last_key_is_evicted_first() -> None:
    manager = CPUOffloadingManager(3)
    stored(manager, A, B, C)
    assert [stored(manager, D), stored(manager, E)] == [[C], [B]]


def test_keys_in_flight_are_walked_over_once() -> None:
    class Watched(set[OffloadKey]):
        seen = 0

        def isdisjoint(self, other: Iterable[Any]) -> bool:
            self.seen += len(list(other))
            return super().isdisjoint(other)

    keys = [make_offload_key(i.to_bytes(4, "big"), 0) for i in range(3000)]
    loading, storing = Watched(keys[:1000]), Watched()
    for policy_type in (LRUPolicy, ARCPolicy):
        policy: CachePolicy = policy_type(2000)
        loading.seen = 0
        policy.admit(keys[1000:2000], 0, InFlight(loading, storing))
        policy.admit(keys[:1000], 0, InFlight(loading, storing))
        policy.touch(keys[1000:2000], InFlight(loading, storing))
        for key in keys[2000:]:
            assert len(policy.admit([key], 1, InFlight(loading, storing))) == 1
        assert loading.seen <= 3000
