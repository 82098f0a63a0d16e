"""The budget of a tier (TIER-8)."""

from __future__ import annotations

import threading
import time

from kvview.errors import KVViewError
from kvview.testing.harness import Capability
from kvview.testing.profiles import current_profile
from kvview.testing.tier.driver import TierDriver, tier_check
from kvview.tier import Threaded

A, B = b"key a", b"key b"


@tier_check("TIER-8", Capability.BUDGET)
def check_tier_8_budget_is_never_exceeded(store: TierDriver) -> None:
    """Four times what fits is put, in jobs of many sizes; the medium is looked at all the time."""
    budget = 500_000
    store.go_on_with(store.call(store.harness, "with_budget", budget))
    most, stop = [0], threading.Event()

    def look() -> None:
        while not stop.is_set():
            most[0] = max(most[0], store.harness.occupied_bytes())
            time.sleep(0.0005)  # else nobody else gets to write

    looker = threading.Thread(target=look, daemon=True)
    looker.start()
    try:
        for number in range(50):
            keys = [f"{number} {letter}".encode() for letter in "stuv"]
            store.put(*keys, num_bytes=(900, 4096, 10_000, 30_000)[number % 4])
            if number % 5 == 4:
                store.finish()
        store.finish()
    finally:
        stop.set()
        looker.join()
    what = "a store never occupies more than its budget"
    store.true(most[0] <= budget, what, most[0], f"at most {budget} bytes")
    if store.can(Capability.USAGE):
        usage = store.call(store.store, "usage")
        store.equal(usage.max_bytes, budget, "usage says the budget")
        store.true(0 < usage.used_bytes <= budget, "usage is in the budget", usage, "no more")
    store.put(A)
    store.finish()
    store.check_held(A)  # there is room made
    store.stored.clear()  # of the others any may be evicted


@tier_check("TIER-8", Capability.BUDGET)
def check_tier_8_page_that_cannot_fit_fails(store: TierDriver) -> None:
    """A page larger than the budget is a failed key, and evicts nothing for ever."""
    store.go_on_with(store.call(store.harness, "with_budget", 100_000))
    job = store.put(A, num_bytes=200_000)
    store.equal(store.finish()[job], [False], "a page larger than the budget fails")
    occupied = store.call(store.harness, "occupied_bytes")
    store.true(occupied <= 100_000, "nothing of it is left", occupied, "at most 100000 bytes")
    store.put(B)
    store.finish()
    store.check_held(B)


@tier_check("TIER-8", Capability.BUDGET, Capability.NAMESPACES)
def check_tier_8_stores_of_one_place_share_its_budget(store: TierDriver) -> None:
    """Two stores of one namespace fill one place, at once; one is closed and opened again."""
    budget = 300_000
    store.go_on_with(store.call(store.harness, "with_budget", budget))
    place, pages = store.harness, [memoryview(bytearray(9000)) for _ in range(6)]
    beside = store.call(place, "with_namespace", place.namespace)
    for number in range(16):
        theirs = [f"{number} theirs {n}".encode() for n in range(6)]
        beside.store.put(number, theirs, pages)
        if number % 4 == 3:  # while the other writes
            place = store.call(place, "reopen")
            store.go_on_with(place)
        mine = [f"{number} mine {n}".encode() for n in range(6)]
        store.put(*mine, num_bytes=9000)
        store.finish()
        beside.store.drain(store.patience)
        _fits(store, budget)
        [(_, flags)] = list(beside.store.poll())
        store.equal(list(flags), [True] * 6, "what the other writes is stored")
    store.check_held(*mine)
    store.go_on_with(beside)
    job = store.get(*mine, num_bytes=9000)
    store.equal(store.finish()[job], [True] * 6, "one finds what the other has stored", "TIER-7")
    store.stored.clear()


@tier_check("TIER-8", Capability.BUDGET, Capability.KILL)
def check_tier_8_budget_is_kept_by_who_is_killed(store: TierDriver) -> None:
    """What a killed process was writing counts until it is gone; then there is room again."""
    budget = 400_000
    tight = store.call(store.harness, "with_budget", budget)
    store.go_on_with(tight)
    for run in store.call(tight, "killed_runs", 2, current_profile().seed or 0):
        store.equal(run["error"], "", "a store opens after its process was killed", "TIER-9")
        _fits(store, budget)
    store.go_on_with(store.call(tight, "reopen"))
    if store.can(Capability.USAGE):
        used, occupied = store.store.usage().used_bytes, store.harness.occupied_bytes()
        what = "who opens it alone leaves nothing that was half-written"
        store.true(occupied <= used, what, f"{occupied} bytes", f"the {used} of usage", "TIER-9")
    for number in range(12):
        keys = [f"{number} {letter}".encode() for letter in "abcdef"]
        store.put(*keys, num_bytes=20_000)
        store.finish()
        _fits(store, budget)
    store.check_held(*keys[-2:])
    store.stored.clear()


@tier_check("TIER-8")
def check_tier_8_budget_that_cannot_be_kept_is_refused(store: TierDriver) -> None:
    """A store takes ``max_bytes`` and keeps it, or says that it does not take it.

    What a tier of another's does with an option that it does not know is no law of ours.
    """
    if store.can(Capability.BUDGET) or not isinstance(store.store, Threaded):
        return
    if not hasattr(store.harness, "with_budget"):
        return
    try:
        store.go_on_with(store.harness.with_budget(500_000))
    except (KVViewError, TypeError):
        return
    store.fail("max_bytes is kept or refused", "taken", "TypeError, or ConfigError with a reason")


def _fits(store: TierDriver, budget: int) -> None:
    """What is on the medium is in the budget, and no more than is said."""
    occupied = store.harness.occupied_bytes()
    what = "a store never occupies more than its budget"
    store.true(occupied <= budget, what, occupied, f"at most {budget} bytes")
    if store.can(Capability.USAGE):
        used = store.call(store.store, "usage").used_bytes
        what = "usage says no more than the budget"
        store.true(used <= budget, what, used, f"at most {budget}")
