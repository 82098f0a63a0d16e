"""Checks of the tier contract that the model cannot state: processes, full disks, and growth."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random

from kvview.errors import KVViewError
from kvview.testing.effort import current_effort
from kvview.testing.harness import Capability as C
from kvview.testing.search import example
from kvview.testing.tier.io_watch import files_of_at_most, open_files
from kvview.testing.tier.model import bytes_of
from kvview.testing.tier.moves import finished
from kvview.testing.tier.player import TierPlayer
from kvview.testing.tier.store_harness import SMALLEST_ENTRY
from kvview.tier import Threaded

_MANY = {b"key %d" % number: 4096 for number in range(40)}
_SIX = {b"old %d" % number: 9000 for number in range(6)}


def _check_held(store: TierPlayer, sizes: Mapping[bytes, int]) -> None:
    store.look([*sizes])
    store.move("get", sizes)


def _reopen(store: TierPlayer) -> None:
    store.continue_with(store.call(store.harness, "reopen"))
    store.model.reopen()


def _fits(store: TierPlayer) -> None:
    most = store.model.max_bytes
    assert most is not None, "the check has set a budget"
    store.occupies_at_most(most, "a store never occupies more than its budget", "max_bytes")


# --- processes ---


def _kill_writer(store: TierPlayer, rng: Random) -> None:
    """Kill a process that writes, while another process writes the same and other keys."""
    both, first, second = (_draw_keys(rng, number) for number in (20, 600, 60))
    writers = [store.harness.start_writer(both | keys) for keys in (first, second)]
    writers[0].kill(rng.randrange(60), rng.random() * 0.002)
    for writer, keys in zip(writers, (first, second), strict=True):
        store.model.sizes |= both | keys
        store.model.either |= {k: n for k, n in (both | keys).items() if k not in store.model.held}
        for key in writer.stored() or ():
            if store.model.max_bytes is None and "max_bytes" not in current_effort().options:
                store.model.use([key])
    store.line("# two processes write into the place, and one of them is killed")


def _draw_keys(rng: Random, number: int) -> dict[bytes, int]:
    return {rng.randbytes(20): rng.choice((700, 4096, 20_000, 65_536)) for _ in range(number)}


@example(TierPlayer, "TIER-9", C.KILL)
def check_tier_9_killed_process(store: TierPlayer) -> None:
    """Processes: after a kill -9 during a write, the store has only complete entries."""
    for seed in range(2):
        if seed:  # a store may refuse a second process in its place
            store.call(store.subject, "close")
        _kill_writer(store, Random(seed + current_effort().seed))
        _reopen(store)
        sizes = dict(store.model.sizes)
        found = [key for key, flag in zip(sizes, store.look([*sizes]), strict=True) if flag]
        flags = store.move("get", {key: sizes[key] for key in found})
        store.equal(flags, [True] * len(found), "a key that is found can be loaded")
        others = {key: sizes[key] for key in sizes if key not in found}
        store.move("get", others)
        store.move("put", {key: others[key] for key in [*others][:40]})
        _check_held(store, store.model.held)


@example(TierPlayer, "TIER-8", C.BUDGET, C.KILL)
def check_tier_8_killed_process(store: TierPlayer) -> None:
    """Processes: the budget counts the bytes that a killed process was writing."""
    store.set_budget(400_000)
    for seed in range(2):
        _kill_writer(store, Random(seed + current_effort().seed))
        _fits(store)
    _reopen(store)
    if store.can(C.USAGE):
        what = "a store that is opened alone removes half-written bytes"
        store.occupies_at_most(store.subject.usage().used_bytes, what, "used_bytes of usage")
    store.model.share()
    for number in range(12):
        store.move("put", {b"%d new %d" % (number, n): 20_000 for n in range(6)})
        _fits(store)


# --- media that are full, gone or damaged ---


@example(TierPlayer, "TIER-6", C.GONE)
def check_tier_6_full_disk(store: TierPlayer) -> None:
    """Full disk: a page that cannot be written completely fails, but no other page does."""
    large, small = {b"large": 3 << 20}, {b"small": 4096}
    if store.can(C.BUDGET):
        store.set_budget(16 << 20)
    store.move("put", {b"as large": 3 << 20})  # the store makes its own files
    before = _files(store)
    store.move("put", {b"a file": 4096})
    if len(_files(store) - before) != 1:  # the limit does not act like a full disk
        store.model.become_faulty()
    with files_of_at_most(2 << 20):
        job = store.submit("put", large)
        store.model.jobs[job].crossed.update(large)  # the put may fail
        store.submit("put", small)
        store.drain()
        store.move("get", small)
    store.model.is_faulty = False
    for sizes in (large, small):
        store.move("get", sizes)
        store.move("put", sizes)
        _check_held(store, sizes)
    store.compare()


def _files(store: TierPlayer) -> set[Path]:
    return {path for path in store.harness.folder.rglob("*") if path.is_file()}


@example(TierPlayer, "TIER-6")
def check_tier_6_broken_connections(store: TierPlayer) -> None:
    """Lost server: connections break during a job, and the store makes new ones."""
    if not hasattr(store.harness, "break_connections"):  # another harness
        return
    sizes = {b"key %d" % number: 16_384 for number in range(64)}
    store.model.become_faulty()
    store.move("put", sizes)
    for delay in (0.0, 0.001, 0.005):
        store.submit("get", sizes)
        time.sleep(delay)
        if store.call(store.harness, "break_connections") == 0:  # the store is not on a network
            break
        store.drain()
        end, flags = time.monotonic() + store.patience, [False]
        while not all(flags):
            what = "a store works again after its connections were broken"
            got = f"{flags.count(False)} of {len(flags)} keys fail"
            store.true(time.monotonic() < end, what, got, "every key is stored and loaded")
            flags = store.move("put", sizes) + store.move("get", sizes)


@example(TierPlayer, "TIER-8", C.BUDGET, C.GONE, C.REOPEN)
def check_tier_8_damaged_notes(store: TierPlayer) -> None:
    """Damaged media: a store whose own notes are damaged keeps its budget, or does not open."""
    store.set_budget(300_000)
    store.move("put", _MANY | _SIX)
    sizes = {path: path.stat().st_size for path in sorted(_files(store))}
    for note in [path for path, size in sizes.items() if 0 < size < SMALLEST_ENTRY]:
        right = note.read_bytes()
        for wrong in (b"", bytes(len(right)), right[:-1] + bytes([right[-1] ^ 1])):
            store.call(store.subject, "close")
            store.line(f"# {note.name} is damaged")
            note.write_bytes(wrong)
            try:
                store.continue_with(store.harness.reopen())
            except KVViewError:
                note.write_bytes(right)
                store.continue_with(store.call(store.harness, "reopen"))
            store.model.reopen()
            store.model.share()
            for number in range(8):
                name = f"{note.name} {wrong!r} {number}".encode()[-80:]
                store.move("put", {name + b"%d" % n: 9000 for n in range(6)})
                _fits(store)


@example(TierPlayer, "TIER-10", C.DAMAGE, C.NAMESPACES, C.VERIFIES)
def check_tier_10_restored_entry(store: TierPlayer) -> None:
    """Damaged media: a file of another namespace is not an entry, whatever its name is."""
    place = store.harness
    if not hasattr(place, "entries"):  # another harness
        return
    other = store.open_in_place(weights="2")
    if isinstance(other, KVViewError):  # the store allows one namespace in a place
        return
    before = place.entries()
    for number, (key, size) in enumerate(_SIX.items()):
        store.move("put", {key: size})
        mine, before = place.entries() - before, place.entries()
        other.put(number, [key], [memoryview(bytes_of(key[::-1], size))])
        finished(other, store.patience)
        theirs, before = place.entries() - before, place.entries()
        if len(mine) == len(theirs) == 1:  # otherwise the files cannot be distinguished
            theirs.pop().replace(mine.pop())
            store.line(f"# the file of {key!r} is that of other weights now")
    store.model.damage()
    store.move("get", _SIX)


@example(TierPlayer, "TIER-8")
def check_tier_8_refused_budget(store: TierPlayer) -> None:
    """Options: a store that cannot keep a budget refuses ``max_bytes``."""
    is_ours = isinstance(store.subject, Threaded) and hasattr(store.harness, "with_budget")
    if store.can(C.BUDGET) or not is_ours:  # no law concerns the options of other stores
        return
    try:
        store.continue_with(store.harness.with_budget(500_000))
    except (KVViewError, TypeError):
        return
    store.fail("max_bytes is obeyed or refused", "taken", "TypeError, or ConfigError with a reason")


# --- growth ---


@example(TierPlayer, "TIER-9", C.GONE, C.REOPEN)
def check_tier_9_growth(store: TierPlayer) -> None:
    """Growth: a put leaves nothing except its entry on the medium."""
    sizes, num_files = {b"%d" % number: 30_000 for number in range(20)}, []
    for number in range(4):  # a key whose put fails is put again
        store.move("get", {key: size + 1 for key, size in sizes.items()})
        store.move("put", sizes)
        _reopen(store)
        num_files.append(len(_files(store)))
        if number == 0:
            most, reason = 20 * 30_000 * 3 // 2 + 100_000, "half as much again, 100,000 for notes"
            store.occupies_at_most(most, "20 pages of 30,000 bytes take their bytes", reason)
    more = num_files[-1] - num_files[0]
    store.true(more < 20, "a put again makes no new files", f"{more} more", "no more files")


@example(TierPlayer, "TIER-11", C.GONE, C.PAUSE)
def check_tier_11_threads_and_files(store: TierPlayer) -> None:
    """Growth: loads leave no file open, and close leaves neither a file nor a thread."""
    folder, threads = str(store.harness.folder), {*threading.enumerate()}
    store.continue_with(store.call(store.harness, "reopen"))
    store.move("put", _MANY)
    before = 0
    for number in range(30):
        store.move("get", _MANY)
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
