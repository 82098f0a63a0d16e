"""The offloading laws, one by one, and the CPU manager against an oracle of dicts and sets."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence, Set
from typing import Any

import pytest

from kvview import (
    ConfigError,
    CPULoadStoreSpec,
    KeyNotLoadableError,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    ReqContext,
    TransferNotInFlightError,
    fold_events,
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

MISS, HIT, HIT_PENDING = LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING
CTX = ReqContext("request")
POLICIES = ["lru", "arc", "lru-or-arc"]
A, B, C, D, E, F, *_ = KEYS = [make_offload_key(bytes([i]) * 4, i % 2) for i in range(12)]


def stored(manager: CPUOffloadingManager, *keys: OffloadKey) -> list[OffloadKey]:
    """Store keys to the end; returns the evicted ones."""
    output = manager.prepare_store(keys, CTX)
    assert output is not None
    manager.complete_store(output.keys_to_store, CTX)
    return list(output.evicted_keys)


def hits(manager: CPUOffloadingManager) -> set[OffloadKey]:
    return {key for key in KEYS if manager.lookup(key, CTX) is HIT}


def pages(spec: Any) -> list[int]:
    assert isinstance(spec, CPULoadStoreSpec)
    return list(spec.block_ids)


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_fits_the_contract(policy: str) -> None:
    assert isinstance(CPUOffloadingManager(1, policy), OffloadingManager)
    assert isinstance(LRUPolicy(1), CachePolicy)
    assert isinstance(ARCPolicy(1), CachePolicy)


def test_leading_hits_are_what_lookup_says_of_each_key() -> None:
    manager = CPUOffloadingManager(8)
    stored(manager, A, B, C)
    manager.prepare_store([D, E], CTX)  # not complete: pending
    stored(manager, F)
    other = KEYS[6]
    for keys in ([], [A], [A, B, C], [A, B, D, C], [other, A], [A, other, D], [C, F, B, E], [D]):
        answers = [manager.lookup(key, CTX) is HIT for key in keys]
        assert manager.num_leading_hits(keys) == [*answers, False].index(False)


def test_events_are_the_third_argument_as_upstream() -> None:
    manager = CPUOffloadingManager(4, "lru", True)
    stored(manager, A)
    assert [event.keys for event in manager.take_events()] == [(A,)]


def test_off_9_a_store_of_what_is_held_already_is_not_completed_again(policy: str) -> None:
    manager = CPUOffloadingManager(4, policy)
    stored(manager, A)
    with pytest.raises(TransferNotInFlightError, match=r"^OFF-9: "):
        manager.complete_store([A], CTX)
    assert hits(manager) == {A}


def test_context_is_optional() -> None:
    manager = CPUOffloadingManager(2)
    assert manager.prepare_store([A]) is not None
    manager.complete_store([A], success=True)
    manager.touch([A])
    manager.prepare_load([A])
    manager.complete_load([A])
    assert manager.lookup(A) is HIT


# OFF-1


def test_off_1_under_load_or_store_is_never_evicted(policy: str) -> None:
    manager = CPUOffloadingManager(3, policy)
    stored(manager, A)
    manager.prepare_load([A], CTX)
    assert manager.prepare_store([B], CTX) is not None
    assert stored(manager, C) == []
    assert stored(manager, D) == [C]
    assert manager.prepare_store([E, F], CTX) is None
    manager.complete_load([A], CTX)
    output = manager.prepare_store([E, F], CTX)
    assert output is not None
    assert set(output.evicted_keys) == {A, D}
    assert manager.lookup(B, CTX) is HIT_PENDING


def test_off_1_every_load_of_a_key_protects_it(policy: str) -> None:
    manager = CPUOffloadingManager(1, policy)
    stored(manager, A)
    assert pages(manager.prepare_load([A, A], CTX)) == [0, 0]
    manager.prepare_load([A], CTX)
    for _ in range(3):
        assert manager.prepare_store([B], CTX) is None
        manager.complete_load([A], CTX)
    assert stored(manager, B) == [A]


# OFF-2


@pytest.mark.parametrize("bad", [B, C], ids=["not held", "not ready"])
def test_off_2_refused_load_protects_nothing(policy: str, bad: OffloadKey) -> None:
    manager = CPUOffloadingManager(2, policy)
    stored(manager, A)
    manager.prepare_store([C], CTX)
    with pytest.raises(KeyNotLoadableError, match=f"OFF-2: key {bad.hex()}"):
        manager.prepare_load([A, bad], CTX)
    assert stored(manager, D) == [A]


# OFF-3


def test_off_3_all_new_keys_or_none(policy: str) -> None:
    manager = CPUOffloadingManager(3, policy, enable_events=True)
    stored(manager, A, B)
    manager.prepare_load([A], CTX)
    manager.take_events()
    assert manager.prepare_store([C, D, E], CTX) is None
    assert manager.take_events() == []
    assert hits(manager) == {A, B}
    assert manager.num_free_blocks() == 1


def test_off_3_own_input_is_never_evicted(policy: str) -> None:
    manager = CPUOffloadingManager(2, policy)
    stored(manager, A, B)
    assert manager.prepare_store([A, B, C], CTX) is None
    assert stored(manager, B, C) == [A]
    assert hits(manager) == {B, C}


def test_off_3_own_input_may_be_evicted_by_the_next_call(policy: str) -> None:
    manager = CPUOffloadingManager(2, policy)
    stored(manager, B)
    stored(manager, A)
    assert stored(manager, B, C) == [A]
    assert stored(manager, D, E) == [B, C]


def test_off_3_more_than_the_capacity_is_none(policy: str) -> None:
    manager = CPUOffloadingManager(2, policy)
    assert manager.prepare_store([A, B, C], CTX) is None
    assert manager.num_free_blocks() == 2


def test_off_3_none_changes_no_order_and_no_count() -> None:
    manager = CPUOffloadingManager(2, store_threshold=2)
    for _ in range(2):
        offered = manager.prepare_store([A, B], CTX)
    assert offered is not None
    manager.complete_store(offered.keys_to_store, CTX)
    assert manager.prepare_store([C, D], CTX) is not None
    manager.prepare_load([B], CTX)
    assert manager.prepare_store([C, D, E], CTX) is None  # and so E is still at no offer
    manager.complete_load([B], CTX)
    assert stored(manager, E) == []
    assert stored(manager, E) == [B]


@pytest.mark.parametrize("policy_type", [LRUPolicy, ARCPolicy])
def test_off_3_none_does_not_reach_the_policy(policy_type: type[Any]) -> None:
    calls = []

    class Spy(policy_type):  # type: ignore[misc]
        def admit(self, *args: Any) -> Any:
            calls.append(args)
            return super().admit(*args)

    register_policy("spy", Spy, replace=True)
    manager = CPUOffloadingManager(1, "spy")
    manager.prepare_store([A], CTX)
    assert manager.prepare_store([B], CTX) is None
    assert len(calls) == 1


def test_off_3_duplicates_are_stored_once(policy: str) -> None:
    manager = CPUOffloadingManager(3, policy, enable_events=True)
    output = manager.prepare_store([A, B, A, B, A], CTX)
    assert output is not None
    assert output.keys_to_store == [A, B]
    assert len(set(pages(output.store_spec))) == 2
    manager.complete_store([A, B, A], CTX)
    assert [event.keys for event in manager.take_events()] == [(A, B)]
    assert manager.num_free_blocks() == 1


def test_off_3_nothing_new_is_no_refusal(policy: str) -> None:
    manager = CPUOffloadingManager(1, policy)
    stored(manager, A)
    manager.prepare_load([A], CTX)
    for keys in ([], [A]):
        output = manager.prepare_store(keys, CTX)
        assert output is not None
        assert not output.keys_to_store
        assert not output.evicted_keys
        assert pages(output.store_spec) == []


# OFF-4


def test_off_4_failed_store_leaves_no_trace(policy: str) -> None:
    manager = CPUOffloadingManager(2, policy, enable_events=True)
    assert manager.prepare_store([A, B], CTX) is not None
    manager.touch([A], CTX)
    manager.complete_store([B, A], CTX, success=False)
    assert hits(manager) == set()
    assert manager.lookup(A, CTX) is MISS
    assert manager.num_free_blocks() == 2
    assert manager.take_events() == []
    assert stored(manager, A, C) == []


def test_off_4_a_failed_store_may_have_evicted(policy: str) -> None:
    manager = CPUOffloadingManager(1, policy, enable_events=True)
    stored(manager, A)
    manager.prepare_store([B], CTX)
    manager.complete_store([B], CTX, success=False)
    assert fold_events(manager.take_events()) == {"CPU": set()}
    assert manager.num_free_blocks() == 1


# OFF-6


def test_off_6_pending_until_complete(policy: str) -> None:
    manager = CPUOffloadingManager(2, policy)
    assert manager.lookup(A, CTX) is MISS
    manager.prepare_store([A], CTX)
    assert manager.lookup(A, CTX) is HIT_PENDING
    manager.complete_store([A], CTX)
    assert manager.lookup(A, CTX) is HIT


def test_off_6_lookup_and_load_change_no_order() -> None:
    manager = CPUOffloadingManager(2)
    stored(manager, A)
    stored(manager, B)
    manager.lookup(A, CTX)
    manager.prepare_load([A], CTX)
    manager.complete_load([A], CTX)
    assert stored(manager, C) == [A]


# OFF-7 and other configuration


@pytest.mark.parametrize("name", ["fifo", "", None, 3, ["lru"]])
def test_off_7_unknown_policy_lists_the_known(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"unknown cache policy .*known: .*arc.*lru") as error:
        CPUOffloadingManager(1, name)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2", None])
@pytest.mark.parametrize("name", ["num_blocks", "store_threshold", "max_tracked_keys"])
def test_impossible_sizes(name: str, value: Any) -> None:
    options: dict[str, Any] = {"num_blocks": 1, name: value}
    with pytest.raises(ConfigError, match=f"{name} must be a positive int, got {value!r}"):
        CPUOffloadingManager(**options)


def test_third_party_policy() -> None:
    class FIFO:
        def __init__(self, capacity: int) -> None:
            self.keys: list[OffloadKey] = []

        def admit(
            self, keys: Sequence[OffloadKey], num_victims: int, in_flight: InFlight
        ) -> list[OffloadKey]:
            in_use = in_flight.loading | in_flight.storing
            victims = [key for key in self.keys if key not in in_use][:num_victims]
            self.keys = [key for key in self.keys if key not in victims] + list(keys)
            return victims

        def touch(self, keys: Sequence[OffloadKey], in_flight: InFlight) -> None:
            pass

        def release(self, keys: Iterable[OffloadKey]) -> None:
            pass

        def remove(self, keys: Iterable[OffloadKey]) -> None:
            self.keys = [key for key in self.keys if key not in set(keys)]

    register_policy("first-in-first-out", FIFO)
    with pytest.raises(ConfigError, match="registered already"):
        register_policy("first-in-first-out", FIFO)
    register_policy("first-in-first-out", FIFO, replace=True)
    manager = CPUOffloadingManager(2, "first-in-first-out")
    stored(manager, A, B)
    manager.touch([A], CTX)
    manager.prepare_load([A], CTX)
    assert stored(manager, C) == [B]
    manager.complete_load([A], CTX)
    manager.prepare_store([A, D], CTX)
    assert hits(manager) == {A}
    manager.reset()
    assert hits(manager) == set()


@pytest.mark.parametrize("name", POLICIES)
def test_known_policy_is_not_overwritten(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        register_policy(name, LRUPolicy)


# OFF-8


def test_off_8_forgets_every_key_once(policy: str) -> None:
    manager = CPUOffloadingManager(4, policy, enable_events=True)
    stored(manager, A, B)
    manager.prepare_load([B], CTX)
    manager.prepare_store([C], CTX)
    manager.take_events()
    manager.reset()
    assert [manager.lookup(key, CTX) for key in KEYS] == [MISS] * len(KEYS)
    assert manager.take_events() == [OffloadingEvent((A, B), "CPU", removed=True)]
    manager.reset()
    assert manager.take_events() == []


def test_off_8_pages_and_keys_in_flight_wait_for_their_completion(policy: str) -> None:
    manager = CPUOffloadingManager(3, policy, enable_events=True)
    stored(manager, A)
    (page_of_a,) = pages(manager.prepare_load([A, A], CTX))[:1]
    output = manager.prepare_store([B], CTX)
    assert output is not None
    manager.reset()
    assert manager.num_free_blocks() == 1
    assert manager.num_protected_blocks() == 2
    manager.take_events()

    output = manager.prepare_store([A, B, C], CTX)
    assert output is not None
    assert output.keys_to_store == [C]
    assert manager.prepare_store([D], CTX) is None
    manager.complete_load([A], CTX)
    assert manager.prepare_store([A, D], CTX) is None
    manager.complete_load([A], CTX)
    output = manager.prepare_store([A], CTX)
    assert output is not None
    assert pages(output.store_spec) == [page_of_a]
    manager.complete_store([B], CTX, success=True)
    assert manager.lookup(B, CTX) is MISS
    assert manager.take_events() == []
    assert stored(manager, B) == []


def test_off_8_completions_old_and_new_in_one_call(policy: str) -> None:
    manager = CPUOffloadingManager(4, policy)
    stored(manager, A)
    manager.prepare_load([A], CTX)
    manager.prepare_store([B], CTX)
    manager.reset()
    manager.reset()
    stored(manager, C)
    manager.prepare_load([C], CTX)
    manager.prepare_store([D], CTX)
    manager.complete_load([C, A], CTX)
    manager.complete_store([B, D], CTX)
    assert hits(manager) == {C, D}
    assert manager.num_free_blocks() == 2
    assert manager.num_protected_blocks() == 0


def test_shutdown_twice_keeps_the_events_true(policy: str) -> None:
    manager = CPUOffloadingManager(2, policy, enable_events=True)
    stored(manager, A)
    manager.shutdown()
    manager.shutdown()
    assert fold_events(manager.take_events()) == {"CPU": set()}
    assert manager.lookup(A, CTX) is MISS


# Completions that nobody is waiting for


def test_unknown_completions_are_refused_and_change_nothing(policy: str) -> None:
    manager = CPUOffloadingManager(4, policy)
    stored(manager, A)
    manager.prepare_load([A], CTX)
    manager.prepare_store([B], CTX)
    for keys in ([C], [A, C], [A, A], [B]):
        with pytest.raises(TransferNotInFlightError, match="no load of key"):
            manager.complete_load(keys, CTX)
    for keys in ([C], [B, C], [B, A]):
        for success in (True, False):
            with pytest.raises(TransferNotInFlightError, match="no store of key"):
                manager.complete_store(keys, CTX, success=success)
    manager.reset()
    for keys in ([C], [A, C], [A, A], [B]):
        with pytest.raises(TransferNotInFlightError, match="no load of key"):
            manager.complete_load(keys, CTX)
    for keys in ([C], [B, C], [B, A]):
        with pytest.raises(TransferNotInFlightError, match="no store of key"):
            manager.complete_store(keys, CTX)
    manager.complete_load([A], CTX)
    manager.complete_store([B], CTX)
    assert manager.num_free_blocks() == 4


# Store threshold


def test_stored_when_offered_for_the_nth_time() -> None:
    manager = CPUOffloadingManager(4, store_threshold=3)
    for keys, expected in (([A, B, A], []), ([A], []), ([A, B], [A]), ([C, B], [B])):
        output = manager.prepare_store(keys, CTX)
        assert output is not None
        assert output.keys_to_store == expected


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


# Recency


def test_first_key_is_the_most_recent() -> None:
    manager = CPUOffloadingManager(3)
    stored(manager, A, B, C)
    assert stored(manager, D) == [C]
    manager.touch([A, E, B, D], CTX)
    assert stored(manager, E, F) == [D, B]


def test_touch_in_flight_counts() -> None:
    manager = CPUOffloadingManager(3)
    stored(manager, A)
    stored(manager, B)
    manager.prepare_store([C], CTX)
    manager.prepare_load([A], CTX)
    assert stored(manager, D) == [B]  # walks over A, which is in flight
    manager.touch([A], CTX)
    manager.complete_store([C], CTX)
    manager.complete_load([A], CTX)
    assert stored(manager, E, F) == [C, D]


def test_untouched_in_flight_keeps_its_place() -> None:
    manager = CPUOffloadingManager(5)
    for key in (A, B, C, D, E):
        stored(manager, key)
    manager.prepare_load([A, B, C], CTX)
    assert stored(manager, F) == [D]
    manager.complete_load([B], CTX)
    manager.complete_load([A, C], CTX)
    assert stored(manager, KEYS[6], KEYS[7]) == [A, B]
    manager.prepare_load([C], CTX)
    assert stored(manager, KEYS[8]) == [E]
    manager.complete_load([C], CTX)
    assert stored(manager, KEYS[9]) == [C]


def test_touched_after_its_load_leaves_its_old_place() -> None:
    manager = CPUOffloadingManager(3)
    for key in (A, B, C):
        stored(manager, key)
    manager.prepare_load([A], CTX)
    assert stored(manager, D) == [B]
    manager.complete_load([A], CTX)
    manager.touch([A], CTX)
    assert stored(manager, E, F) == [C, D]
    assert hits(manager) == {A, E, F}


def test_untouched_store_keeps_its_place(policy: str) -> None:
    manager = CPUOffloadingManager(2, policy)
    manager.prepare_store([A], CTX)
    stored(manager, B)
    assert stored(manager, C) == [B]  # walks over A, which is in flight
    manager.complete_store([A], CTX)
    assert stored(manager, D, E) == [A, C]


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


# ARC


class PaperARC:
    """ARC as figure 4 of the paper has it, with plain lists, oldest first."""

    def __init__(self, capacity: int) -> None:
        self.c, self.p = capacity, 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def replace(self, x: int) -> None:
        if self.t1 and (len(self.t1) > self.p or (x in self.b2 and len(self.t1) == self.p)):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))

    def request(self, x: int) -> None:
        if x in self.t1 or x in self.t2:
            (self.t1 if x in self.t1 else self.t2).remove(x)
            self.t2.append(x)
        elif x in self.b1:
            self.p = min(self.c, self.p + max(1, len(self.b2) / len(self.b1)))
            self.replace(x)
            self.b1.remove(x)
            self.t2.append(x)
        elif x in self.b2:
            self.p = max(0, self.p - max(1, len(self.b1) / len(self.b2)))
            self.replace(x)
            self.b2.remove(x)
            self.t2.append(x)
        else:
            if len(self.t1) + len(self.b1) == self.c:
                if len(self.t1) < self.c:
                    self.b1.pop(0)
                    self.replace(x)
                else:
                    self.t1.pop(0)
            elif (total := sum(map(len, (self.t1, self.t2, self.b1, self.b2)))) >= self.c:
                if total == 2 * self.c:
                    self.b2.pop(0)
                self.replace(x)
            self.t1.append(x)


def test_arc_touch_while_being_stored_is_the_first_use() -> None:
    manager = CPUOffloadingManager(2, "arc")
    stored(manager, A)
    manager.touch([A], CTX)
    manager.prepare_store([B], CTX)
    manager.touch([B], CTX)
    manager.complete_store([B], CTX)
    assert stored(manager, C) == [B]


def test_arc_touch_of_a_key_walked_over_in_t1_moves_it_to_t2() -> None:
    manager = CPUOffloadingManager(3, "arc")
    for key in (A, B, C):
        stored(manager, key)
    manager.prepare_load([A], CTX)
    assert stored(manager, D) == [B]
    manager.touch([A], CTX)
    manager.complete_load([A], CTX)
    assert [stored(manager, key) for key in KEYS[4:7]] == [[C], [D], [E]]


@pytest.mark.parametrize("touched", [True, False])
def test_arc_key_walked_over_in_t2(touched: bool) -> None:
    manager = CPUOffloadingManager(3, "arc")
    for key in (A, B, C):
        stored(manager, key)
        manager.touch([key], CTX)
    manager.prepare_load([A], CTX)
    assert stored(manager, D) == [B]
    manager.touch([A, D] if touched else [D], CTX)
    manager.complete_load([A], CTX)
    assert stored(manager, E) == [C if touched else A]


@pytest.mark.parametrize("capacity", [1, 2, 5, 32])
@pytest.mark.parametrize("seed", range(4))
def test_arc_is_the_published_algorithm(capacity: int, seed: int) -> None:
    rng = random.Random(seed)
    paper, manager = PaperARC(capacity), CPUOffloadingManager(capacity, "arc")
    names = [make_offload_key(i.to_bytes(4, "big"), 0) for i in range(4 * capacity)]
    window = 0
    for step in range(1500):
        if step % 200 == 0:  # scans, hot sets and drift, so that p goes both ways
            window, width = rng.randrange(len(names)), rng.choice((1, 2, 4)) * capacity
        x = (window + min(rng.randrange(width), rng.randrange(width))) % len(names)
        paper.request(x)
        if manager.lookup(names[x]) is HIT:
            manager.touch([names[x]])
        else:
            stored(manager, names[x])
        held = {i for i, name in enumerate(names) if manager.lookup(name) is HIT}
        assert held == {*paper.t1, *paper.t2}
        assert len(held) <= capacity


def test_arc_makes_room_for_a_batch_as_for_its_keys_one_by_one() -> None:
    def victims(target: float, new: list[OffloadKey], *ghosts: OffloadKey) -> list[OffloadKey]:
        policy = ARCPolicy(4)
        policy.admit(KEYS[:4], 0, InFlight(set(), set()))  # the first is the most recent
        policy.touch(KEYS[:2], InFlight(set(), set()))
        policy._target = target
        policy._b2.update(dict.fromkeys(ghosts))
        return policy.admit(new, 2, InFlight(set(), set()))

    assert victims(0, [E, F]) == [D, C]  # T1, twice
    assert victims(2, [E, F]) == [D, B]  # as many as its target; with E it is more
    assert victims(4, [E, F]) == [B, A]  # T2, twice
    assert victims(3, [E, F], E) == [D, B]  # E was in B2: the target falls to 2, what T1 has


def test_arc_batches_keep_the_ghosts_bounded() -> None:
    rng = random.Random(0)
    capacity = 20
    policy = ARCPolicy(capacity)
    held: set[OffloadKey] = set()
    names = [make_offload_key(i.to_bytes(4, "big"), 0) for i in range(100)]
    nothing: Set[OffloadKey] = frozenset()
    in_flight = InFlight(nothing, nothing)
    targets = set()
    for _ in range(2000):
        start = rng.randrange(100) if rng.random() < 0.5 else rng.randrange(25)
        batch = names[start : start + rng.randrange(1, 12)]
        new = [key for key in batch if key not in held]
        policy.touch(batch, in_flight)
        victims = policy.admit(new, max(0, len(held) + len(new) - capacity), in_flight)
        assert held.issuperset(victims)
        held = held.difference(victims).union(new)
        t1, t2, b1, b2 = (len(x) for x in (policy._t1, policy._t2, policy._b1, policy._b2))
        assert t1 + t2 == len(held) <= capacity
        assert t1 + b1 <= capacity
        assert t1 + t2 + b1 + b2 <= 2 * capacity
        assert 0 <= policy._target <= capacity
        targets.add(policy._target)
    assert len(targets) > 20


# The whole manager, in random order
