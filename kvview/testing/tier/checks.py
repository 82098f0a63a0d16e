"""The laws of the tier contract, one small scenario each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from kvview.errors import ConfigError, KVViewError
from kvview.testing.checks import check
from kvview.testing.harness import Capability, Factory
from kvview.testing.profiles import current_profile
from kvview.testing.tier.driver import PAGE_BYTES, TierDriver, bytes_of, tier_check
from kvview.testing.tier.io_watch import (
    files_of_at_most,
    open_files,
    slow_renames,
    watching_io,
)
from kvview.tier import GuardedTier, Namespace

A, B, C, D = b"key a", b"key b", b"key c", b"key d"
_MANY = [f"key {number}".encode() for number in range(40)]


# --- TIER-1: exact bytes, or a failed key ---


@tier_check("TIER-1")
def check_tier_1_pages_come_back_exactly(store: TierDriver) -> None:
    """Pages of many sizes; a page whose bytes all look alike is one as well."""
    for num_bytes in (1, 2, 511, 4096, 4097, 65_536, 1_000_003):
        keys = [f"{num_bytes} {letter}".encode() for letter in "xyz"]
        store.put(*keys, num_bytes=num_bytes)
        store.finish()
        store.check_held(*keys)
    store.check_untouched()


@tier_check("TIER-1")
def check_tier_1_many_keys_of_a_job_keep_their_places(store: TierDriver) -> None:
    """One job with forty keys; then one that asks for them in another order."""
    store.put(*_MANY)
    store.finish()
    store.check_held(*_MANY[::-1])
    store.check_held(*_MANY[1::3])


@tier_check("TIER-1")
def check_tier_1_keys_are_bytes(store: TierDriver) -> None:
    """Keys that are much alike, as text, as paths or as prefixes, are different keys."""
    keys = [b"a", b"A", b"aa", b"a/a", b"..", b"/", b"\0", b"a\0", b"\n", b" ", b"%61", b"\xff"]
    keys += [b"k" * 99, b"k" * 100, b"61", b"*", b"a b", "ä".encode(), b"-", b"a.tmp"]
    store.put(*keys)
    store.finish()
    store.check_held(*keys)


@tier_check("TIER-1")
def check_tier_1_page_of_another_size_fails(store: TierDriver) -> None:
    """What was put in one size is not loaded in another."""
    for key, num_bytes in ((A, PAGE_BYTES // 2), (B, PAGE_BYTES + 1), (C, 1)):
        store.put(key)
        store.finish()
        job = store.get(key, num_bytes=num_bytes)
        store.equal(store.finish()[job], [False], f"{num_bytes} of {PAGE_BYTES} bytes are no page")


@tier_check("TIER-1")
def check_tier_1_put_again_keeps_the_bytes(store: TierDriver) -> None:
    """A key that is put twice, in two jobs at once too, is still whole."""
    for _ in range(5):
        for _ in range(4):
            store.put(A, B, num_bytes=100_000)
        store.finish()
        store.check_held(A, B)


@tier_check("TIER-1", Capability.DAMAGE, Capability.VERIFIES)
def check_tier_1_damaged_bytes_fail(store: TierDriver) -> None:
    """What is flipped, cut, longer or swapped on the medium is a failed key, never bytes."""
    for how in ("flip", "cut", "grow", "swap"):
        keys = [f"{how} {number}".encode() for number in range(12)]
        store.put(*keys, num_bytes=3000)
        store.finish()
        num_damaged = store.damage(how)
        store.true(num_damaged > 0, "there is something to damage", num_damaged, "some entries")
        store.get(*keys, num_bytes=3000)
        store.finish()


@tier_check("TIER-1", Capability.DAMAGE, Capability.VERIFIES)
def check_tier_1_damage_anywhere_in_a_large_page_fails(store: TierDriver) -> None:
    """One bit, in another place of each page: all of a page is verified, not a part."""
    store.put(*_MANY, num_bytes=400_000)
    store.finish()
    num_damaged = store.damage("flip")
    store.true(num_damaged > 0, "there is something to damage", num_damaged, "some entries")
    store.get(*_MANY, num_bytes=400_000)
    store.finish()


# --- TIER-2: one report a job, one flag a key ---


@tier_check("TIER-2")
def check_tier_2_each_job_is_reported_once(store: TierDriver) -> None:
    """Many jobs in flight at once, some of keys that are not there."""
    for number, key in enumerate(_MANY[:20]):
        store.put(key)
        if number % 3 == 0:
            store.get(b"never", key + b"?")
    store.wait()
    for _ in range(20):
        store.poll()
        time.sleep(0.001)


@tier_check("TIER-2")
def check_tier_2_flags_are_in_the_order_of_the_keys(store: TierDriver) -> None:
    """What is not there fails, and its neighbours do not."""
    store.put(A, C)
    store.finish()
    job = store.get(B, A, D, C)
    store.equal(store.finish()[job], [False, True, False, True], "each key has its own flag")


@tier_check("TIER-2")
def check_tier_2_job_without_keys_is_reported(store: TierDriver) -> None:
    """A job that moves nothing ends as well."""
    jobs = [store.put(), store.get()]
    store.equal(sorted(store.wait()), jobs, "a job without keys is reported")


@tier_check("TIER-2")
def check_tier_2_numbers_of_jobs_may_come_again(store: TierDriver) -> None:
    """Any int is a number, and the same one for another job after the report."""
    for job in (0, -7, 1 << 40, 0):
        store.put(A, B, job=job)
        store.finish()
        store.get(B, job=job)
        store.equal(store.finish(), {job: [True]}, "a number that comes again is another job")


# --- TIER-3: no page is touched after its report ---


@tier_check("TIER-3")
def check_tier_3_reported_pages_are_left_alone(store: TierDriver) -> None:
    """The engine uses pages again as soon as their job was reported."""
    for size in (PAGE_BYTES, 2 * PAGE_BYTES, 100_000):
        keys = [f"{size} {number}".encode() for number in range(30)]
        store.put(*keys, num_bytes=size)
        store.finish()
        store.get(*keys, num_bytes=size)
        store.wait()
        store.overwrite_reported()
        store.put(A, B, C)
        store.get(*keys[:5], num_bytes=size)
        store.wait()
        time.sleep(0.03)
        store.check_untouched()


@tier_check("TIER-3")
def check_tier_3_put_is_read_before_its_report(store: TierDriver) -> None:
    """What the engine writes into a page after the report is not what was stored."""
    pages = [memoryview(bytearray(bytes_of(key, 100_000))) for key in _MANY]
    store.line("store.put(1, keys, pages); after its report pages are overwritten")
    store.store.put(1, _MANY, pages)
    end = time.monotonic() + store.patience
    reports: list[Any] = []
    while not reports:
        reports = list(store.store.poll())
        store.true(time.monotonic() < end, "job 1 is reported", "nothing", "a report", "TIER-2")
        time.sleep(0.0005)
    for page in pages:
        page[:] = b"\x22" * len(page)
    time.sleep(0.02)
    store.stored |= dict.fromkeys(_MANY, 100_000)
    store.check_held(*_MANY)


# --- TIER-4: a failed get is a miss until it is stored again ---


@tier_check("TIER-4")
def check_tier_4_failed_get_is_a_miss_until_it_is_stored_again(store: TierDriver) -> None:
    """Else an engine asks and loads for ever: yes, failed, yes, failed."""
    store.put(A, B)
    store.finish()
    store.lookup(A, B)
    store.get(A, num_bytes=PAGE_BYTES + 7)  # fails, whatever the medium is
    store.finish()
    for _ in range(5):
        store.equal(store.lookup(A, B), [False, True], "a failed get is a miss")
        time.sleep(0.002)
    store.put(A)
    store.finish()
    store.check_held(A, B)


@tier_check("TIER-4")
def check_tier_4_get_of_nothing_can_be_stored(store: TierDriver) -> None:
    """A get of a key that was never stored fails, and then the key is stored."""
    store.get(A, B)
    store.finish()
    store.lookup(A, B)
    store.put(A)
    store.finish()
    store.check_held(A)
    store.equal(store.lookup(B), [False], "what was never stored stays a miss")


@tier_check("TIER-4", Capability.DAMAGE, Capability.VERIFIES)
def check_tier_4_damaged_key_is_stored_again(store: TierDriver) -> None:
    """A put in the place of damaged bytes replaces them."""
    for how in ("flip", "cut", "grow"):
        keys = [f"{how} {number}".encode() for number in range(6)]
        store.put(*keys)
        store.finish()
        store.damage(how)
        job = store.get(*keys)
        flags = store.finish()[job]
        store.equal(any(flags), False, "what was damaged fails", "TIER-1")
        store.equal(store.lookup(*keys), [False] * 6, "what failed is a miss")
        store.put(*keys)
        store.finish()
        store.check_held(*keys)


# --- TIER-5: no call waits ---


@tier_check("TIER-5", Capability.PAUSE)
def check_tier_5_calls_return_while_io_waits(store: TierDriver) -> None:
    """A medium that does not answer holds up nobody's scheduler, lookups included."""
    store.put(A)
    store.finish()
    store.call(store.harness, "pause")
    try:
        _returns(store, "put", lambda: store.put(B, C))
        _returns(store, "get", lambda: store.get(A, D))
        _returns(store, "lookup", lambda: store.store.lookup([A, B, C, D, b"new"]))
        _returns(store, "poll", lambda: store.poll())
        _returns(store, "drain", lambda: store.store.drain(0.01))
    finally:
        store.call(store.harness, "resume")
    store.wait()
    store.check_held(A, B, C)


@tier_check("TIER-5", Capability.GONE)
def check_tier_5_callers_thread_touches_no_file(store: TierDriver) -> None:
    """Not even a look whether a file exists: a disk that is busy answers that late as well."""
    with watching_io(str(store.harness.folder)) as seen:
        store.put(*_MANY[:8])
        store.wait()
        store.lookup(*_MANY[:12])
        store.get(*_MANY[:8], b"never")
        store.wait()
    shown = ", ".join(seen[:3])
    store.true(not seen, "a call does no I/O on the caller's thread", shown, "on another thread")


@tier_check("TIER-5")
def check_tier_5_lookup_knows_when_it_is_asked_again(store: TierDriver) -> None:
    """An answer that is not there yet comes, for what is stored and for what is not."""
    store.put(*_MANY[:10])
    store.finish()
    flags = store.lookup(*_MANY[:20])
    store.equal(flags, [True] * 10 + [False] * 10, "lookup says what is stored", "TIER-7")
    many = [f"never {number}".encode() for number in range(150)]
    store.equal(store.lookup(*many, _MANY[0]), [False] * 150 + [True], "of many keys too", "TIER-7")
    store.equal(store.lookup(), [], "of no keys it says nothing")
    time.sleep(1.2)  # what was answered once is old by now
    flags = store.lookup(*_MANY[:20], *many[:2])
    store.equal(flags, [True] * 10 + [False] * 12, "what was asked long ago is asked again")


@tier_check("TIER-5")
def check_tier_5_store_wakes_up_who_waits(store: TierDriver) -> None:
    """If it has ``on_wake_up``: when a job has ended, and when a lookup was answered."""
    if not hasattr(store.store, "on_wake_up"):
        return
    woken = threading.Event()
    store.call(store.store, "on_wake_up", woken.set)
    asks: list[tuple[str, Callable[[], object]]] = [
        ("put", lambda: store.put(A, B)),
        ("get", lambda: store.get(A)),
        ("lookup", lambda: store.store.lookup([b"never asked"])),
    ]
    for what, ask in asks:
        woken.clear()
        ask()
        is_told = woken.wait(store.patience)
        store.true(is_told, f"a {what} that was answered wakes up", "nothing", "a call")
        store.finish()


def _returns(store: TierDriver, what: str, call: Callable[[], Any]) -> None:
    """Make a call on a thread, which must come back."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(store.patience / 2)
    store.true(not thread.is_alive(), f"{what} does not wait for I/O", "it waits", "it returns")
    for error in raised:
        raise error


# --- TIER-6: no call raises for I/O ---


@tier_check("TIER-6")
def check_tier_6_wrong_jobs_are_refused(store: TierDriver) -> None:
    """Misuse raises, and starts nothing."""

    def page() -> memoryview:
        return memoryview(bytearray(PAGE_BYTES))

    square = memoryview(bytearray(4096)).cast("B", (64, 64))
    wide = memoryview(bytearray(4096)).cast("I")
    for method in ("put", "get"):
        store.refuse(method, 900, [A, B], [page()])
        store.refuse(method, 900, [A], [page(), page()])
        store.refuse(method, 900, [b""], [page()])
        store.refuse(method, 900, [b"k" * 101], [page()])
        store.refuse(method, 900, [A, A], [page(), page()])
        store.refuse(method, 900, [A], [square])
        store.refuse(method, 900, [A], [wide])
        store.refuse(method, 900, [A], [page()[::2]])
        store.refuse(method, 900, [A], [page()[:0]])
    store.refuse("get", 900, [A], [memoryview(bytes(PAGE_BYTES))])
    store.equal(store.finish(), {}, "a refused job is not reported")
    store.equal(store.lookup(A, B), [False, False], "a refused job stores nothing", "TIER-7")
    store.put(A, job=900)
    store.finish()
    store.check_held(A)


@tier_check("TIER-6", Capability.PAUSE)
def check_tier_6_number_in_flight_is_refused(store: TierDriver) -> None:
    """A second job of the same number would be reported as the first."""
    store.call(store.harness, "pause")
    job = store.put(A)
    for method in ("put", "get"):
        store.refuse(method, job, [B], [memoryview(bytearray(PAGE_BYTES))])
    store.call(store.harness, "resume")
    store.finish()
    store.check_held(A)


@tier_check("TIER-6", Capability.GONE)
def check_tier_6_medium_that_is_gone_raises_nothing(store: TierDriver) -> None:
    """A full disk and a folder that is gone are failed keys and misses."""
    store.put(A, B)
    store.finish()
    store.call(store.harness, "lose_medium")
    for keys in ((A, B), (C, D), (A, C)):
        store.put(*keys)
        store.get(*keys[::-1])
        store.lookup(*keys)
        store.wait()
        store.lookup(*keys)
        store.get(*keys)
        store.wait()


@tier_check("TIER-6", Capability.GONE)
def check_tier_6_full_disk_is_a_failed_key(store: TierDriver) -> None:
    """A page that can be written in part only fails, or is whole; its neighbours are stored."""
    large = 3 << 20
    store.put(C, num_bytes=large)  # what a store makes once for pages of a size is there
    store.finish()
    with files_of_at_most(2 << 20):
        job = store.put(A, num_bytes=large)
        small = store.put(B)
        flags = store.finish()
    store.equal(flags[small], [True], "what there is room for is stored")
    if not any(flags[job]):
        store.equal(store.lookup(A), [False], "what was written in part is a miss", "TIER-7")
        store.put(A, num_bytes=large)
        store.equal([*store.finish().values()], [[True]], "when there is room again it is stored")
    store.check_held(A, B)


# --- TIER-7: what a lookup says ---


@tier_check("TIER-7")
def check_tier_7_lookup_says_what_was_stored(store: TierDriver) -> None:
    """Yes for what was put, no for all that looks like it."""
    store.equal(store.lookup(A, B), [False, False], "nothing is stored at first")
    store.put(A, *_MANY)
    store.finish()
    store.check_held(A, *_MANY)
    alike = [A[:-1], A + b"a", A[:-1] + b"A", A.hex().encode(), A[::-1] + b"\0"]
    store.equal(store.lookup(*alike), [False] * len(alike), "keys that are alike are not stored")


@tier_check("TIER-7", Capability.DELETE)
def check_tier_7_deleted_keys_are_gone(store: TierDriver) -> None:
    """A deleted key is a miss, its neighbour is not; it can be stored again."""
    store.put(A, B)
    store.finish()
    store.lookup(A, B)
    store.call(store.store, "delete", [A, C])
    store.stored.pop(A)
    store.equal(store.lookup(A, B), [False, True], "what was deleted is a miss")
    job = store.get(A)
    store.equal(store.finish()[job], [False], "what was deleted is not loaded")
    for _ in range(10):
        store.put(A)
        store.finish()
        store.check_held(A, B)
        store.call(store.store, "delete", [A])
        store.put(A)  # at once
        store.finish()
        store.check_held(A, B)


@tier_check("TIER-7", Capability.DELETE, Capability.BUDGET)
def check_tier_7_deleted_bytes_leave_the_medium(store: TierDriver) -> None:
    """They go, if not at once: a store that only hides them is full some day."""
    store.put(*_MANY[:4], num_bytes=50_000)
    store.finish()
    before = store.harness.occupied_bytes()
    store.call(store.store, "delete", _MANY[:3])
    end = time.monotonic() + store.patience
    while store.harness.occupied_bytes() > before - 150_000 and time.monotonic() < end:
        time.sleep(0.001)
    left = store.harness.occupied_bytes()
    what = "what was deleted is on the medium no more"
    store.true(left <= before - 150_000, what, f"{left} bytes", f"150000 less than {before}")
    store.check_held(_MANY[3])


# --- TIER-9: opened again ---


@tier_check("TIER-9", Capability.REOPEN)
def check_tier_9_reopened_store_has_what_was_stored(store: TierDriver) -> None:
    """Another process finds it, byte for byte, and nothing else."""
    store.put(*_MANY)
    store.finish()
    for _ in range(2):
        store.go_on_with(store.call(store.harness, "reopen"))
        store.check_held(*_MANY)
        store.equal(store.lookup(A, B), [False, False], "what was never stored is a miss")


@tier_check("TIER-9", Capability.REOPEN, Capability.NAMESPACES)
def check_tier_9_who_opens_beside_disturbs_nobody(store: TierDriver) -> None:
    """Another process opens and closes the place while this one writes there."""
    store.line("# meanwhile others open and close the same place; renames are slow")
    job, flags = store.put(*_MANY[:16], num_bytes=100_000), list[bool]()
    with slow_renames(0.005):
        while not flags:
            try:
                beside = store.harness.with_namespace(store.harness.namespace)
            except KVViewError:  # a store that is alone, and says so
                store.finish()
                return
            beside.store.close()
            with store.unrecorded():
                flags = store.poll().get(job, [])
    store.equal(flags, [True] * 16, "what is written while another opens the place is stored")
    store.check_held(*_MANY[:16])


@tier_check("TIER-9", Capability.KILL)
def check_tier_9_killed_process_leaves_whole_entries(store: TierDriver) -> None:
    """After kill -9 in the middle of writing there is what was reported, whole, and no more."""
    seed = current_profile().seed or 0
    for run in store.call(store.harness, "killed_runs", 3, seed):
        store.equal(run["error"], "", "a store opens after its process was killed")
        store.equal(run["wrong"], [], "no entry has other bytes than were put", "TIER-1")
        store.equal(run["missing"], [], "what was reported stored is there")
        store.equal(run["half"], [], "what a lookup finds can be loaded: entries are whole")
        what = "what is not there can be stored again"
        store.equal(run["not_healed"], [], what, "TIER-4")
        kept = run["kept"]
    store.go_on_with(store.call(store.harness, "reopen"))
    for size in {*kept.values()}:
        keys = [bytes.fromhex(key) for key, num_bytes in kept.items() if num_bytes == size]
        job = store.get(*keys, num_bytes=size)
        store.stored |= dict.fromkeys(keys, size)
        what = "another process finds what one that was killed has stored"
        store.equal(store.finish()[job], [True] * len(keys), what)


# --- TIER-10: namespaces ---


@tier_check("TIER-10")
def check_tier_10_unknown_weights_are_no_namespace(store: TierDriver) -> None:
    """Who does not say whose KV it is gets no namespace, and so no tier."""
    store.line("from kvview.tier import Namespace")
    for model, weights in (("", "1"), ("kit", "")):
        code = f"Namespace({model!r}, weights={weights!r})"
        store.refuses(ConfigError, code, partial(Namespace, model, weights=weights))


@tier_check("TIER-10", Capability.NAMESPACES)
def check_tier_10_namespaces_share_nothing(store: TierDriver) -> None:
    """Each thing that KV depends on makes other bytes of the same key."""
    keys = [A, B, b"\xff", b"\xfb\xef\xbe", b"..", b"/"]
    store.put(*keys)
    store.finish()
    first = store.harness
    for change in (
        {"weights": "2"},
        {"model": "other"},
        {"kv_dtype": "fp8"},
        {"layout": "NHD"},
        {"block_size": 32},
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2},
        {"rank": 1},
        {"hash_algorithm": "xxh3"},
        {"hash_seed": "1"},
    ):
        other = replace(first.namespace, **change)
        try:
            beside = first.with_namespace(other)
        except KVViewError as error:  # refused, with both named
            (named,) = change.values()
            is_named = str(named) in str(error)
            store.true(is_named, "both namespaces are named", str(error), f"{named!r} in it")
            continue
        name = next(iter(change))
        held, failed = dict(store.stored), set(store.failed)
        store.line(f"store of {change} beside it")
        store.go_on_with(beside)
        store.stored.clear()
        store.equal(store.lookup(*keys), [False] * len(keys), f"another {name} shares no key")
        job = store.get(A)
        store.equal(store.finish()[job], [False], f"another {name} shares no bytes")
        beside.store.close()
        store.go_on_with(first)
        store.stored, store.failed = held, failed
    store.check_held(*keys)


# --- TIER-11: drain and close ---


@tier_check("TIER-11")
def check_tier_11_close_ends_everything(store: TierDriver) -> None:
    """Jobs in flight are reported, later ones fail, and a second close is harmless."""
    jobs = [store.put(*_MANY), store.get(*_MANY), store.put(A)]
    store.call(store.store, "close")
    reports = store.poll()
    store.equal(sorted(reports), sorted(jobs), "close ends what is in flight")
    store.overwrite_reported()
    time.sleep(0.02)
    store.check_untouched()
    late = [store.put(A), store.get(A)]
    reports = store.wait()
    store.equal([reports[job] for job in late], [[False], [False]], "a job after close fails")
    store.equal(store.lookup(A), [False], "after close everything is a miss")
    store.call(store.store, "close")


@tier_check("TIER-11", Capability.GONE, Capability.PAUSE)
def check_tier_11_close_lets_go_of_everything(store: TierDriver) -> None:
    """No thread goes on and no file stays open, not even while it is used."""
    folder, threads = str(store.harness.folder), {*threading.enumerate()}
    store.go_on_with(store.call(store.harness, "reopen"))
    store.put(*_MANY)
    store.finish()
    store.check_held(*_MANY)
    before = open_files(folder)
    for _ in range(5):
        store.check_held(*_MANY)
    files = open_files(folder)
    store.equal(len(files), len(before), "loading leaves no file open")
    store.call(store.store, "close")
    what = "close leaves no file open"
    store.equal(open_files(folder), [], what)
    left = sorted(thread.name for thread in {*threading.enumerate()} - threads)
    store.equal(left, [], "close leaves no thread of the store's")


@tier_check("TIER-11", Capability.PAUSE)
def check_tier_11_drain_says_what_has_not_ended(store: TierDriver) -> None:
    """False at its timeout, and True only when every job has ended."""
    store.equal(store.call(store.store, "drain", 0.0), True, "with no jobs it is drained")
    store.call(store.harness, "pause")
    store.put(A, B)
    store.equal(store.call(store.store, "drain", 0.01), False, "jobs in flight are not drained")
    store.call(store.harness, "resume")
    store.finish()
    store.check_held(A, B)


@tier_check("TIER-11")
def check_tier_11_next_poll_reports_all_that_was_drained(store: TierDriver) -> None:
    """However many jobs that is."""
    store.put(*_MANY[:10])
    store.finish()
    for number in range(300):
        store.get(_MANY[number % 10], f"never {number}".encode())
    store.finish()
    for number in range(100):
        store.put(f"{number}".encode(), num_bytes=100)
    store.finish()


# --- TIER-12: behind the guard ---


@tier_check("TIER-12", Capability.DAMAGE)
def check_tier_12_damaged_bytes_behind_the_guard(store: TierDriver) -> None:
    """With a guard in front, as in every bridge, no damage comes through as bytes."""
    guards: list[GuardedTier] = []
    for checksum in ("xxh3", "crc32"):
        guard = GuardedTier(store.harness.store, store.harness.namespace, checksum=checksum)
        guards.append(guard)
        store._names[id(guard)] = f"GuardedTier(store, h.namespace, checksum={checksum!r})"
        store.subject = guard
        for how in ("flip", "cut", "grow", "swap"):
            keys = [f"{checksum} {how} {number}".encode() for number in range(12)]
            store.put(*keys, num_bytes=3000)
            store.finish()
            store.damage(how)
            job = store.get(*keys, num_bytes=3000)
            bad = [key for key, flag in zip(keys, store.finish()[job], strict=True) if not flag]
            store.equal(store.lookup(*bad), [False] * len(bad), "what failed is a miss", "TIER-4")
            store.put(*keys, num_bytes=3000)
            store.finish()
            again = [key for key in bad if key in store.stored]  # a medium may be past storing
            if again:
                store.check_held(*again)
    for guard in guards:
        guard.close()


@check("TIER-*", contract="tier")
def check_tier_any_random_calls(factory: Factory) -> None:
    """No sequence of puts, gets, lookups, damage and new starts breaks a law."""
    from kvview.testing.tier.machine import run_tier_machine  # hypothesis is slow to import

    run_tier_machine(factory)
