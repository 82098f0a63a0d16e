"""What others do meanwhile: processes, other namespaces, and an engine that waits to be woken."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from kvview.errors import KVViewError
from kvview.testing.harness import Capability
from kvview.testing.profiles import current_profile
from kvview.testing.tier.driver import PAGE_BYTES, TierDriver, bytes_of, tier_check

A, B = b"key a", b"key b"
_LARGE = 1_000_000


@tier_check("TIER-5")
def check_tier_5_who_polls_when_woken_up_misses_nothing(store: TierDriver) -> None:
    """If it has ``on_wake_up``: it is called when there is something to poll, not before."""
    if not hasattr(store.store, "on_wake_up"):
        return
    woken = threading.Event()
    store.call(store.store, "on_wake_up", woken.set)

    def wait_for(what: str, comes: Callable[[], bool]) -> None:
        while not comes():
            is_told = woken.wait(store.patience)
            woken.clear()  # before the next look
            if not is_told:
                got = "it has come, unsaid" if comes() else "nothing has come"
                store.fail(f"who waits for {what} is woken up", got, "a call when it has come")

    def reported() -> bool:
        store.poll()
        return not store.num_in_flight

    def answered(keys: list[bytes]) -> bool:
        return None not in store.store.lookup(keys)

    store.line("# polled only when woken up:")
    for number in range(50):
        key = f"key {number}".encode()
        for start in (store.put, store.get):
            with store.unrecorded():
                start(key, num_bytes=_LARGE)
                wait_for("a report", reported)
        never = [f"never {number}".encode()]
        wait_for("an answer", partial(answered, never))


@tier_check("TIER-7", Capability.DELETE)
def check_tier_7_delete_of_what_is_being_put(store: TierDriver) -> None:
    """Whichever wins, a lookup says so: what it finds can be loaded, then and later."""
    for number in range(20):
        keys = [f"{number} {letter}".encode() for letter in "abcdefghijkl"]
        store.put(*keys, num_bytes=100_000)
        for key in keys[number % 3 :]:  # some of them are stored by now
            store.call(store.store, "delete", [key])
        store.finish()
        for _ in range(2):
            found = [key for key, flag in zip(keys, store.lookup(*keys), strict=True) if flag]
            job = store.get(*found, num_bytes=100_000)
            store.equal(store.finish()[job], [True] * len(found), "what is found can be loaded")


@tier_check("TIER-9", Capability.KILL)
def check_tier_9_processes_that_write_at_once_lose_nothing(store: TierDriver) -> None:
    """What each of them was told is stored is there for one that comes later."""
    if not hasattr(store.harness, "written_at_once"):  # a harness of its own
        return
    found = store.call(store.harness, "written_at_once", 2, current_profile().seed or 0)
    if found["refused"]:  # a store that is alone, and says so
        return
    store.equal(found["error"], "", "processes write into one place at once")
    store.equal(found["wrong"], [], "no entry has other bytes than were put", "TIER-1")
    if "max_bytes" not in current_profile().options:  # else they may be evicted
        store.equal(found["missing"], [], "what was reported stored is there")


@tier_check("TIER-10", Capability.DAMAGE, Capability.NAMESPACES, Capability.VERIFIES)
def check_tier_10_entry_of_another_namespace_is_not_believed(store: TierDriver) -> None:
    """Its file in the place of one's own, as by a restore, is a failed key like all damage."""
    place = store.harness
    if not hasattr(place, "entries"):  # a harness of its own
        return
    try:
        beside = place.with_namespace(replace(place.namespace, weights="2"))
    except KVViewError:  # one namespace a place
        return
    keys = [f"key {number}".encode() for number in range(6)]
    for number, key in enumerate(keys):
        before = place.entries()
        store.put(key)
        store.finish()
        mine, before = place.entries() - before, place.entries()
        beside.store.put(number, [key], [memoryview(bytes_of(key[::-1], PAGE_BYTES))])
        beside.store.drain(store.patience)
        beside.store.poll()
        theirs = place.entries() - before
        if len(mine) == len(theirs) == 1:  # else nobody here knows which is which
            mine.pop().write_bytes(theirs.pop().read_bytes())
            store.line(f"# the file of {key!r} is that of other weights now")
            store.unsure.add(key)
    beside.store.close()
    store.get(*keys)
    store.finish()
