"""The budget of a tier (TIER-8)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvview.errors import KVViewError
from kvview.testing.harness import Capability
from kvview.testing.profiles import current_profile
from kvview.testing.tier.driver import TierDriver, tier_check
from kvview.testing.tier.io_watch import files_of_at_most, slow_renames
from kvview.testing.tier.store_harness import SMALLEST_ENTRY
from kvview.tier import Threaded

A, B = b"key a", b"key b"
_SIX = [f"key {number}".encode() for number in range(6)]


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


@tier_check("TIER-2", Capability.BUDGET)
def check_tier_2_page_that_cannot_fit_fails_alone(store: TierDriver) -> None:
    """The other keys of its put are stored, before it and behind it."""
    store.go_on_with(store.call(store.harness, "with_budget", 100_000))
    for large in range(6):
        keys = [f"{large} {number}".encode() for number in range(6)]
        sizes = {key: 200_000 if n == large else 4096 for n, key in enumerate(keys)}
        job = store.put_sizes(sizes)
        expected = [size == 4096 for size in sizes.values()]
        store.equal(store.finish()[job], expected, f"only page {large}, which cannot fit, fails")


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


@tier_check("TIER-8", Capability.BUDGET, Capability.USAGE)
def check_tier_8_usage_is_what_is_on_the_medium(store: TierDriver) -> None:
    """Whatever becomes of pages: a count that runs away leaves no room, or too much."""
    budget, size = 8_000_000, 100_000
    store.go_on_with(store.call(store.harness, "with_budget", budget))

    def agree(what: str) -> None:
        is_so, used, occupied = False, 0, 0
        end = time.monotonic() + store.patience
        while not is_so and time.monotonic() < end:  # what is removed on a thread may take a while
            used, occupied = store.store.usage().used_bytes, store.harness.occupied_bytes()
            is_so = abs(used - occupied) < size // 2
            time.sleep(0 if is_so else 0.002)
        store.true(is_so, f"usage is what is on the medium: {what}", used, f"about {occupied}")

    def play(what: str, *steps: Callable[[], object]) -> None:
        for step in steps:
            step()
            store.finish()
        agree(what)

    for number in range(3):
        with slow_renames(0.001):
            for _ in range(4):
                store.put(f"same {number}".encode(), num_bytes=size)
            store.finish()
        agree("put by four at once")
        play("put, and put again", *[lambda: store.put(*_SIX, num_bytes=size)] * 3)
        play("loaded", lambda: store.get(*_SIX, num_bytes=size))
        play("asked for in another size", lambda: store.get(*_SIX[:2], num_bytes=size + 1))
        play("put again", lambda: store.put(*_SIX, num_bytes=size))
        if store.can(Capability.DELETE):
            play("deleted", lambda: store.call(store.store, "delete", _SIX[:3]))
            play("put again", lambda: store.put(*_SIX, num_bytes=size))
        if store.can(Capability.GONE):
            with files_of_at_most(2 << 20):
                play("cut short", lambda: store.put(b"large", num_bytes=3 << 20))
            play("larger than the budget", lambda: store.put(b"larger", num_bytes=budget + 1))
    store.check_held(*_SIX)
    more = [f"more {number}".encode() for number in range(40)]
    store.put(*more, num_bytes=size)
    store.finish()
    store.check_held(*_SIX, *more)  # there is room for all of them


@tier_check("TIER-8", Capability.BUDGET, Capability.TOUCH)
def check_tier_8_what_is_used_stays(store: TierDriver) -> None:
    """What is loaded or touched again and again outlives what nobody wants."""
    store.go_on_with(store.call(store.harness, "with_budget", 400_000))
    store.put(*_SIX, num_bytes=20_000)
    store.finish()
    for number in range(40):
        store.call(store.store, "touch", _SIX[:3])
        job = store.get(*_SIX[3:], num_bytes=20_000)
        store.equal(store.finish()[job], [True] * 3, f"what is used stays, put number {number}")
        store.put(f"cold {number}".encode(), num_bytes=20_000)
        store.finish()
    store.check_held(*_SIX)
    store.stored.clear()


@tier_check("TIER-8", Capability.BUDGET)
def check_tier_8_evicted_keys_are_named(store: TierDriver) -> None:
    """If it has ``on_evicted``, or a guard ``take_evicted``: what went is named, and no more."""
    store.go_on_with(store.call(store.harness, "with_budget", 300_000))
    told: list[bytes] = []
    if hasattr(store.store, "on_evicted"):
        store.store.on_evicted(told.extend)
    elif not hasattr(store.store, "take_evicted"):
        return
    time.sleep(0.01)  # a guard's thread tells the store
    keys = [f"key {number}".encode() for number in range(60)]
    for number in range(0, 60, 6):
        store.put(*keys[number : number + 6], num_bytes=10_000)
        store.finish()
    job = store.get(*keys, num_bytes=10_000)
    flags = store.finish()[job]
    if hasattr(store.store, "take_evicted"):
        told += store.store.take_evicted()
    gone = [key for key, flag in zip(keys, flags, strict=True) if not flag]
    store.true(len(gone) > 0, "six times what fits is not kept", "all of it", "some of it")
    store.equal(sorted(told), sorted(gone), "keys that are evicted are named, once each")


@tier_check("TIER-8", Capability.BUDGET, Capability.GONE, Capability.REOPEN)
def check_tier_8_budget_is_kept_with_damaged_notes(store: TierDriver) -> None:
    """What a store writes for itself is damaged: it opens and keeps its laws, or says why not."""
    budget = 300_000
    store.go_on_with(store.call(store.harness, "with_budget", budget))
    old = [f"old {number}".encode() for number in range(40)]
    store.put(*old, num_bytes=9000)
    store.finish()
    folder = store.harness.folder
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for note in [path for path in files if 0 < path.stat().st_size < SMALLEST_ENTRY]:
        right = note.read_bytes()
        for spoilt in (b"", bytes(len(right)), right[:-1] + bytes([right[-1] ^ 1])):
            store.call(store.store, "close")
            store.line(f"# {note.name} is damaged")
            note.write_bytes(spoilt)
            try:
                harness = store.harness.reopen()
            except KVViewError:
                note.write_bytes(right)
                harness = store.call(store.harness, "reopen")
            store.go_on_with(harness)
            store.get(*old, num_bytes=9000)
            store.finish()
            new = [f"{note.name} {spoilt!r} {letter}".encode()[-90:] for letter in "abcdef"]
            store.put(*new, num_bytes=9000)
            store.finish()
            _fits(store, budget)
            store.check_held(*new[-2:])
            store.forget_failures()
            store.unsure |= {*old}


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
