"""Checks of the tier contract that the model cannot state: processes, full disks, and growth."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvview.errors import KVViewError
from kvview.testing.harness import Capability as C
from kvview.testing.profiles import current_profile
from kvview.testing.search import example
from kvview.testing.tier.io_watch import files_of_at_most, open_files
from kvview.testing.tier.model import bytes_of
from kvview.testing.tier.player import TierPlayer
from kvview.testing.tier.store_harness import SMALLEST_ENTRY
from kvview.tier import Threaded

_MANY = {b"key %d" % number: 4096 for number in range(40)}
_SIX = {b"old %d" % number: 9000 for number in range(6)}


def _move(store: TierPlayer, method: str, sizes: Mapping[bytes, int]) -> list[bool]:
    job = store.submit(method, sizes)
    return store.drain()[job]


def _check_held(store: TierPlayer, sizes: Mapping[bytes, int]) -> None:
    store.look([*sizes])
    _move(store, "get", sizes)


def _reopen(store: TierPlayer) -> None:
    store.go_on_with(store.call(store.harness, "reopen"))
    store.model.reopen()


def _fits(store: TierPlayer) -> None:
    occupied, most = store.harness.occupied_bytes(), store.model.max_bytes
    what = "a store never occupies more than its budget"
    store.true(occupied <= most, what, occupied, f"at most {most} bytes")


# --- processes ---


@example(TierPlayer, "TIER-9", C.KILL)
def check_tier_9_killed_process(store: TierPlayer) -> None:
    """Processes: after kill -9 in the middle of writing there are whole entries only."""
    for run in store.call(store.harness, "killed_runs", 3, current_profile().seed or 0):
        _judge(store, run)
        kept = run["kept"]
    _reopen(store)
    sizes = {bytes.fromhex(key): size for key, size in kept.items()}
    store.model.sizes |= sizes
    store.model.held |= sizes
    _check_held(store, sizes)


@example(TierPlayer, "TIER-9", C.KILL)
def check_tier_9_processes_at_once(store: TierPlayer) -> None:
    """Processes: several processes write into one place at once; every stored page is there."""
    if not hasattr(store.harness, "written_at_once"):  # a harness of its own
        return
    found = store.call(store.harness, "written_at_once", 2, current_profile().seed or 0)
    if not found["refused"]:  # a store may be alone in its place
        _judge(store, found)


def _judge(store: TierPlayer, found: Mapping[str, Any]) -> None:
    store.equal(found["error"], "", "a store opens after its process has ended")
    for name, what in (
        ("wrong", "no entry has other bytes than were put"),
        ("half", "a key that is found can be loaded"),
        ("not_healed", "a key that is not there can be stored again"),
        ("missing", "a key that was reported stored is there"),
    ):
        if name != "missing" or "max_bytes" not in current_profile().options:
            store.equal(found[name], [], what)


@example(TierPlayer, "TIER-8", C.BUDGET, C.KILL)
def check_tier_8_killed_process(store: TierPlayer) -> None:
    """Processes: the bytes that a killed process was writing count until they are removed."""
    store.set_budget(400_000)
    for run in store.call(store.harness, "killed_runs", 2, current_profile().seed or 0):
        store.equal(run["error"], "", "a store opens after its process was killed")
        _fits(store)
    _reopen(store)
    if store.can(C.USAGE):
        used, occupied = store.subject.usage().used_bytes, store.harness.occupied_bytes()
        what = "a store that is opened alone removes half-written bytes"
        store.true(occupied <= used, what, f"{occupied} bytes", f"the {used} of usage")
    store.model.share()
    for number in range(12):
        _move(store, "put", {b"%d new %d" % (number, n): 20_000 for n in range(6)})
        _fits(store)


# --- media that are full, gone or damaged ---


@example(TierPlayer, "TIER-6", C.GONE)
def check_tier_6_full_disk(store: TierPlayer) -> None:
    """Full disk: a page of which only a part can be written fails, and its neighbours do not."""
    large, small = {b"large": 3 << 20}, {b"small": 4096}
    if store.can(C.BUDGET):
        store.set_budget(16 << 20)
    _move(store, "put", {b"as large": 3 << 20})  # the store makes its own files
    before = _files(store)
    _move(store, "put", {b"a file": 4096})
    has_files = len(_files(store) - before) == 1
    if not has_files:  # then the system's limit does not act like a full disk
        store.model.spoil()
    with files_of_at_most(2 << 20):
        job = store.submit("put", large)
        store.model.jobs[job].crossed.update(large)  # it may fail
        store.submit("put", small)
        store.drain()
        _move(store, "get", small)
    store.model.is_spoilt = False
    for sizes in (large, small):
        _move(store, "get", sizes)
        _move(store, "put", sizes)
        _check_held(store, sizes)
    store.compare()


def _files(store: TierPlayer) -> set[Any]:
    return {path for path in store.harness.folder.rglob("*") if path.is_file()}


@example(TierPlayer, "TIER-6", C.GONE)
def check_tier_6_medium_that_is_gone(store: TierPlayer) -> None:
    """Lost medium: every call returns, with failed keys and misses."""
    _move(store, "put", _SIX)
    store.call(store.harness, "lose_medium")
    store.model.spoil()
    for sizes in (_SIX, _MANY, _SIX):
        for method in ("put", "get"):
            store.submit(method, sizes)
            store.look([*sizes])
            store.wait()


@example(TierPlayer, "TIER-8", C.BUDGET, C.GONE, C.REOPEN)
def check_tier_8_damaged_notes(store: TierPlayer) -> None:
    """Damaged media: a store whose own notes are damaged keeps its budget, or is refused."""
    store.set_budget(300_000)
    _move(store, "put", _MANY | _SIX)
    sizes = {path: path.stat().st_size for path in sorted(_files(store))}
    for note in [path for path, size in sizes.items() if 0 < size < SMALLEST_ENTRY]:
        right = note.read_bytes()
        for spoilt in (b"", bytes(len(right)), right[:-1] + bytes([right[-1] ^ 1])):
            store.call(store.subject, "close")
            store.line(f"# {note.name} is damaged")
            note.write_bytes(spoilt)
            try:
                harness = store.harness.reopen()
            except KVViewError:
                note.write_bytes(right)
                harness = store.call(store.harness, "reopen")
            store.go_on_with(harness)
            store.model.reopen()
            store.model.share()
            for number in range(8):
                name = f"{note.name} {spoilt!r} {number}".encode()[-80:]
                _move(store, "put", {name + b"%d" % n: 9000 for n in range(6)})
                _fits(store)


@example(TierPlayer, "TIER-10", C.DAMAGE, C.NAMESPACES, C.VERIFIES)
def check_tier_10_restored_entry(store: TierPlayer) -> None:
    """Damaged media: a file of another namespace under an own name is not an entry."""
    place = store.harness
    if not hasattr(place, "entries"):  # a harness of its own
        return
    try:
        beside = place.with_namespace(replace(place.namespace, weights="2"))
    except KVViewError:  # one namespace in a place
        return
    store.harnesses.append(beside)
    before = place.entries()
    for number, (key, size) in enumerate(_SIX.items()):
        _move(store, "put", {key: size})
        mine, before = place.entries() - before, place.entries()
        beside.store.put(number, [key], [memoryview(bytes_of(key[::-1], size))])
        beside.store.drain(store.patience)
        beside.store.poll()
        theirs, before = place.entries() - before, place.entries()
        if len(mine) == len(theirs) == 1:  # else it is unknown which is which
            mine.pop().write_bytes(theirs.pop().read_bytes())
            store.line(f"# the file of {key!r} is that of other weights now")
    store.model.damage()
    _move(store, "get", _SIX)


@example(TierPlayer, "TIER-8")
def check_tier_8_refused_budget(store: TierPlayer) -> None:
    """Options: a store that cannot keep ``max_bytes`` refuses it."""
    is_ours = isinstance(store.subject, Threaded) and hasattr(store.harness, "with_budget")
    if store.can(C.BUDGET) or not is_ours:  # no law is about the options of other stores
        return
    try:
        store.go_on_with(store.harness.with_budget(500_000))
    except (KVViewError, TypeError):
        return
    store.fail("max_bytes is kept or refused", "taken", "TypeError, or ConfigError with a reason")


# --- growth ---


@example(TierPlayer, "TIER-9", C.GONE, C.REOPEN)
def check_tier_9_growth(store: TierPlayer) -> None:
    """Growth: a put leaves nothing on the medium but its entry."""
    for number in range(2):
        sizes = {b"%d %d" % (number, n): 30_000 for n in range(20)}
        before = _bytes(store)
        _move(store, "put", sizes)
        _reopen(store)
        grown, most = _bytes(store) - before, 20 * 30_000 * 3 // 2 + 100_000
        store.true(grown <= most, "20 pages of 30 kB take their bytes", grown, f"up to {most}")
    files = 0
    for number in range(3):  # a put again, of keys that fail
        _move(store, "get", {key: size + 1 for key, size in sizes.items()})
        _move(store, "put", sizes)
        _reopen(store)
        if not number:
            files = len(_files(store))
    grown = len(_files(store)) - files
    store.true(grown < 20, "a put again makes no new files", f"{grown} more", "no more files")


def _bytes(store: TierPlayer) -> int:
    return sum(path.stat().st_size for path in _files(store))


@example(TierPlayer, "TIER-11", C.GONE, C.PAUSE)
def check_tier_11_threads_and_files(store: TierPlayer) -> None:
    """Growth: loads leave no file open, and close leaves neither a file nor a thread."""
    folder, threads = str(store.harness.folder), {*threading.enumerate()}
    store.go_on_with(store.call(store.harness, "reopen"))
    _move(store, "put", _MANY)
    before = 0
    for number in range(30):
        _move(store, "get", _MANY)
        if number == 4:
            before = len(open_files(folder))
    grown = len(open_files(folder)) - before
    store.true(grown < 25, "25 loads leave no file open", f"{grown} more", "no more files")
    store.call(store.subject, "close")
    end = time.monotonic() + store.patience / 4
    while open_files(folder) and time.monotonic() < end:
        gc.collect()  # files that an ended thread had open
        time.sleep(0.01)
    store.equal(open_files(folder), [], "close leaves no file open")
    left = sorted(thread.name for thread in {*threading.enumerate()} - threads)
    store.equal(left, [], "close leaves no thread of the store's")
