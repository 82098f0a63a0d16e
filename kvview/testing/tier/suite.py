"""The suite of stores, which needs a class of stores and its options."""

from __future__ import annotations

import gc
import inspect
import threading
import time
import tracemalloc
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any, ClassVar

from typing_extensions import override

from kvview.errors import ConfigError, KVViewError, did_you_mean, one_line
from kvview.testing.checks import CHECKS, coverage_check
from kvview.testing.effort import current_effort
from kvview.testing.placeholders import FOLDER, in_size
from kvview.testing.results.law_broken import Gap
from kvview.testing.suites.capability import Capability as C
from kvview.testing.suites.conformance import Conformance, example, failures_of, runs_of
from kvview.testing.supervision import watchdog
from kvview.testing.tier.machine import NOTES, TierMachine
from kvview.testing.tier.model import OVERHEAD, bytes_of
from kvview.testing.tier.under_test.io_watch import files_of_at_most, open_files
from kvview.testing.tier.under_test.opened_store import OpenedStore, importable
from kvview.testing.tier.under_test.store_calls import finished
from kvview.tier import Namespace, Threaded, TierStore
from kvview.tier.store import missing_methods

_NO_FOLDER = (
    f"no option of the store has {FOLDER}, a new folder name, such as root={FOLDER} or "
    f"url=http://127.0.0.1:8765{FOLDER}"
)
_IN_A_FOLDER = f"the store writes nothing under {FOLDER} on this machine"

# A part of a connector may have sizes as options, which are then larger than the kit needs.
_BLOCKS, _BLOCK_BYTES = 4096, 65_536

_BUDGET_OF_NO_EFFECT = 64 << 20
_FEWEST_RUNS = 15
_TRIAL_SECONDS = 5.0  # of CPU time
_STALE = 1.2  # seconds after which no result of an earlier lookup is returned

_LARGE = 4 << 20  # bytes of a page whose write takes long
_WRITTEN_SIZES = (700, 4096, 20_000, 65_536)
_HALF_OF_THE_LARGEST = 32_768

_MANY = {b"key %d" % number: 4096 for number in range(40)}
_SIX = {b"old %d" % number: 9000 for number in range(6)}


class TierConformance(Conformance):
    """The suite of a class of stores.

    The class and its options are enough::

        class TestMyStore(TierConformance):
            store = MyStore
            options = {"root": "{tmp}"}

    The capabilities follow from both, because the kit itself opens the store several times, damages
    its files and blocks its calls.
    """

    contract = "tier"
    machine = TierMachine
    protocols: ClassVar[Mapping[str, type]] = {"store": TierStore}
    store: ClassVar[type[TierStore]]
    """The class; a store at first holds no key, and keeps 16 MiB before it evicts a key."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Options of the class; ``{tmp}`` in a text is replaced by a new folder."""
    patience: ClassVar[float] = 10.0
    """Seconds to wait for a result before it counts as missing."""
    num_stored: ClassVar[list[int]]
    """Number of pages that were stored without and with a budget."""
    first_error: ClassVar[str]
    """The first exception of a store, as the end of a message; empty without one."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.num_stored, cls.first_error = [0, 0], ""

    def make(self, store: type[TierStore], namespace: Namespace, **options: Any) -> TierStore:
        """Make the store under test; override this method to make it in another way.

        Args:
            store: The class, or a subclass of it with calls that the kit can block.
            namespace: Namespace of the store.
            **options: The options, with a folder in the place of ``{tmp}``.
        """
        return store(namespace, **options)  # type: ignore[call-arg]

    @classmethod
    def is_brief(cls) -> bool:
        """Whether the runs are too few to require a budget in one of them."""
        return runs_of(cls, current_effort()) < _FEWEST_RUNS

    def open(self, max_bytes: int | None = None) -> OpenedStore:
        """Open a store in a new folder, with a budget if one is given."""
        budget = {} if max_bytes is None else {"max_bytes": max_bytes}
        return OpenedStore(self.make, self.store, {**self.options, **budget})

    @property
    def budget(self) -> int | None:
        """The budget that the store has by default, if the checks can exceed it."""
        parameter = inspect.signature(self.store).parameters.get("max_bytes")
        default = None if parameter is None else parameter.default
        most = self.options.get("max_bytes", default)
        return most if isinstance(most, int) and 0 < most < _BUDGET_OF_NO_EFFECT else None

    @classmethod
    @override
    def capabilities(cls) -> list[C]:
        return [one for one in super().capabilities() if one not in cls.reasons()]

    @classmethod
    @cache
    def reasons(cls) -> Mapping[C, str]:
        """Return the capabilities that class and options lack, each with the reason."""
        return _reasons(cls)

    @classmethod
    def gaps(cls) -> list[Gap]:
        """Return the laws that the checks could not check, and the pages that were never moved."""
        failures, found = failures_of(cls), []
        needs_budget = C.BUDGET in cls.capabilities() and not cls.is_brief()
        kinds = ("", " with a budget")[: 1 + needs_budget]
        for kind, number in zip(kinds, cls.num_stored, strict=False):
            if not number and not failures:
                what = f"no page was ever stored{kind}{cls.first_error}"
                found.append(Gap(f"stores{kind}", what))
        if found:
            return found
        reason = cls.reasons().get(C.GONE, "")
        if reason and C.BUDGET in cls.capabilities():
            text = f"the bytes that the store occupies cannot be counted, because {reason}"
            found.append(Gap("TIER-8", f"TIER-8 is not checked completely: {text}"))
        if reason and getattr(cls.store, "verifies", False):
            text = f"damaged pages cannot be tried, because {reason}"
            found.append(Gap("TIER-1", f"TIER-1 is not checked completely: {text}"))
        return found

    @classmethod
    def reason_without(cls, missing: Collection[C]) -> str:
        """Return the reason why a check is skipped, as a hint to the author of the store."""
        declared = "the suite declares that the store lacks it"
        return "; ".join(dict.fromkeys(cls.reasons().get(one, declared) for one in missing))

    @override
    @contextmanager
    def parts(self) -> Iterator[Mapping[str, object]]:
        opened = self.open()
        yield {"suite": self, "store": opened.store}
        opened.end()

    # --- processes ---

    @example("TIER-9", C.KILL)
    def test_tier_9_killed_process(self, machine: TierMachine) -> None:
        """Processes: after a kill -9 during a write, the store has only complete entries."""
        machine.start()
        for seed in range(2):
            if seed:  # a store may refuse a second process in its place
                machine.call(machine.store, "close")
            _kill_writer(machine, seed)
            machine.open_again()
            sizes = dict(machine.model.sizes)
            found = [key for key, flag in zip(sizes, machine.look([*sizes]), strict=True) if flag]
            flags = machine.move("get", {key: sizes[key] for key in found})
            machine.equal(flags, [True] * len(found), "a key that is found can be loaded")
            others = {key: sizes[key] for key in sizes if key not in found}
            if machine.can(C.LOOKUPS):
                _leaves_nothing(machine, {key: sizes[key] for key in found}, "a killed process")
            machine.move("get", others)
            machine.move("put", {key: others[key] for key in [*others][:40]})
            _check_held(machine, machine.model.held)

    @example("TIER-8", C.BUDGET, C.KILL, C.GONE)
    def test_tier_8_killed_process(self, machine: TierMachine) -> None:
        """Processes: the budget counts the bytes that a killed process was writing."""
        machine.start(max_bytes=400_000)
        for seed in range(2):
            _kill_writer(machine, seed)
            _fits(machine)
        machine.open_again()
        if machine.can(C.USAGE) and machine.can(C.SHRINKS):
            what = "a store that is opened alone removes half-written bytes"
            used = machine.store.usage().used_bytes
            if used is not None:
                machine.occupies_at_most(used, what, "used_bytes of usage")
        machine.model.share()
        for number in range(12):
            machine.move("put", {b"%d new %d" % (number, n): 20_000 for n in range(6)})
            _fits(machine)

    # --- keys that appear and vanish ---

    @example("TIER-7", C.DELETE)
    def test_tier_7_deleted_keys(self, machine: TierMachine) -> None:
        """Deletes: a deleted key stays a miss, also after a while and in another process."""
        machine.start()
        machine.move("put", _MANY)
        deleted = [*_MANY][::2]
        machine.ask("delete", deleted)
        machine.model.delete(deleted)
        machine.drain()
        time.sleep(_STALE)
        machine.look([*_MANY])
        if machine.can(C.REOPEN):
            machine.open_again()
            machine.look([*_MANY])

    @example("TIER-7", C.REOPEN, C.LOOKUPS)
    def test_tier_7_another_process(self, machine: TierMachine) -> None:
        """Other processes: a lookup finds keys that they store, and misses keys they delete."""
        machine.start()
        machine.move("put", _SIX)
        flags = dict(zip(_SIX, machine.look([*_SIX, *_MANY]), strict=False))
        other = machine.open_in_place()
        if isinstance(other, KVViewError):  # one process at a time
            return
        keys = [*_MANY][:6]
        other.put(1, keys, [memoryview(bytes_of(key, _MANY[key])) for key in keys])
        expected = dict(zip(keys, finished(other, self.patience), strict=True))
        if machine.can(C.DELETE):
            other.delete([*_SIX])
            flags = dict.fromkeys(_SIX, False)
            finished(other, self.patience)
        other.close()
        expected |= flags
        end = time.monotonic() + self.patience
        what = "a lookup follows the puts and deletes of another process"
        while True:
            time.sleep(_STALE / 4)
            found = machine.results([*expected])
            if found == [*expected.values()]:
                return
            machine.true(time.monotonic() < end, what, found, repr([*expected.values()]))

    @example("TIER-7", C.LOOKUPS)
    def test_tier_7_unknown_keys(self, machine: TierMachine) -> None:
        """Growth: a store keeps nothing in memory of keys that it does not have."""
        machine.start()
        used: list[int] = []
        tracemalloc.start()
        try:
            for number in range(4):
                for part in range(8):
                    keys = [b"unknown %d %d %d" % (number, part, one) for one in range(500)]
                    machine.results(keys)
                time.sleep(_STALE)
                machine.results([b"unknown"])
                gc.collect()
                used.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        grown = min(after - before for before, after in pairwise(used))
        what = "lookups of new keys take no memory"
        machine.true(grown < 4000 * 32, what, f"{grown:,} bytes for 4,000 keys", "no growth")

    @example("TIER-8", C.BUDGET, C.LOOKUPS)
    def test_tier_8_full_store(self, machine: TierMachine) -> None:
        """Full store: the pages that are found fit in the budget, and lookups pin no page."""
        most = 200_000
        machine.start(max_bytes=most)
        for key in _MANY | _SIX:
            machine.move("put", {key: 9000})
        time.sleep(_STALE)
        num_found = sum(machine.look([*_MANY, *_SIX]))
        what = "the pages that lookups find fit in the budget"
        got = f"{num_found} pages of 9,000 bytes"
        machine.true(num_found * 9000 <= most, what, got, f"at most {most:,} bytes")
        end = time.monotonic() + self.patience
        for number in range(1 << 30):
            machine.look([*_MANY, *_SIX])
            flags = machine.move("put", {b"new %d %d" % (number, one): 9000 for one in range(4)})
            if any(flags) or not num_found:
                return
            what = "a full store stores new pages after its pages were looked up"
            machine.true(time.monotonic() < end, what, flags, "evicts pages to make room")
            machine.model.refused.clear()

    @example("TIER-8", C.BUDGET)
    def test_tier_8_page_again(self, machine: TierMachine) -> None:
        """Page again: a page that is put many times counts once, and evicts no other page."""
        machine.start(max_bytes=200_000)
        machine.move("put", _SIX)
        for _ in range(30):
            machine.move("put", dict([*_SIX.items()][:1]))
        _check_held(machine, _SIX)

    @example("TIER-1", C.BUDGET)
    def test_tier_1_evicted_during_a_load(self, machine: TierMachine) -> None:
        """Full store: a page that is evicted while it is loaded has its bytes, or fails."""
        machine.start(max_bytes=3_000_000)
        held: dict[bytes, int] = {}
        for number in range(12):
            new = {b"large %d %d" % (number, one): 200_000 for one in range(8)}
            machine.submit("get", held)
            machine.submit("put", new)
            machine.drain()
            held = {**dict([*held.items()][-8:]), **new}

    # --- namespaces ---

    @example("TIER-10", C.KILL, C.NAMESPACES)
    def test_tier_10_living_runs(self, machine: TierMachine) -> None:
        """Runs: another process that opens the place leaves the pages of living runs."""
        machine.start()
        stores = [machine.open_in_place(run=name) for name in ("one", "two")]
        if any(isinstance(store, KVViewError) for store in stores):  # one store at a time
            return
        keys, pages = [*_SIX], [memoryview(bytes_of(key, size)) for key, size in _SIX.items()]
        stores[0].put(1, keys, pages)
        stored = finished(stores[0], self.patience)
        machine.opened.start_writer({b"key": 300}, run="three").stored()
        found = [bytearray(page) for page in pages]
        stores[0].get(2, keys, [memoryview(page) for page in found])
        loaded = finished(stores[0], self.patience)
        machine.equal(loaded, stored, "a run that lives keeps its pages")
        machine.equal(found, [bytearray(page) for page in pages], "its pages have their bytes")

    # --- media that are full or gone ---

    @example("TIER-6", C.GONE)
    def test_tier_6_full_disk(self, machine: TierMachine) -> None:
        """Full disk: a page that cannot be written completely fails, but no other page does."""
        large, small = {b"large": 3 << 20}, {b"small": 4096}
        machine.start(max_bytes=16 << 20 if machine.can(C.BUDGET) else None)
        machine.move("put", {b"as large": 3 << 20})  # the store makes its own files
        before = machine.opened.files()
        machine.move("put", {b"a file": 4096})
        if len(machine.opened.files() - before) != 1:  # the limit does not act like a full disk
            machine.model.become_faulty()
        with files_of_at_most(2 << 20):
            job = machine.submit("put", large)
            machine.model.jobs[job].first.clear()  # the put may fail
            machine.submit("put", small)
            machine.drain()
            machine.move("get", small)
        machine.model.is_faulty = False
        for sizes in (large, small):
            machine.move("get", sizes)
            machine.move("put", sizes)
            _check_held(machine, sizes)
        machine.compare()

    @example("TIER-6")
    def test_tier_6_broken_connections(self, machine: TierMachine) -> None:
        """Lost server: connections break during a job, and the store makes new ones."""
        machine.start()
        sizes = {b"key %d" % number: 16_384 for number in range(64)}
        machine.model.become_faulty()
        machine.move("put", sizes)
        for delay in (0.0, 0.001, 0.005):
            machine.submit("get", sizes)
            time.sleep(delay)
            if machine.call(machine.opened, "break_connections") == 0:  # no store on a network
                break
            machine.drain()
            end, flags = time.monotonic() + self.patience, [False]
            while 2 * flags.count(False) > len(flags):  # a store may refuse some keys
                what = "a store works again after its connections were broken"
                got = f"{flags.count(False)} of {len(flags)} keys fail"
                expected = "most keys are stored and loaded"
                machine.true(time.monotonic() < end, what, got, expected)
                flags = machine.move("put", sizes) + machine.move("get", sizes)

    # --- growth ---

    @example("TIER-9", C.GONE, C.REOPEN)
    def test_tier_9_growth(self, machine: TierMachine) -> None:
        """Growth: a put leaves nothing except its entry on the medium."""
        machine.start()
        sizes, num_files = {b"%d" % number: 30_000 for number in range(20)}, []
        for number in range(4):  # a key whose put fails is put again
            machine.move("get", {key: size + 1 for key, size in sizes.items()})
            machine.move("put", sizes)
            machine.open_again()
            num_files.append(len(machine.opened.files()))
            if number == 0 and machine.can(C.SHRINKS):
                most = 20 * 30_000 * 3 // 2 + 100_000
                reason = "half as much again, 100,000 for notes"
                what = "20 pages of 30,000 bytes take their bytes"
                machine.occupies_at_most(most, what, reason)
        more = num_files[-1] - num_files[0]
        machine.true(more < 20, "a put again makes no new files", f"{more} more", "no more files")
        left: list[int] = []
        rounds = 2 if machine.can(C.SHRINKS) else 24
        for number in range(rounds if machine.can(C.DELETE) else 0):
            new = {b"%d new %d" % (number, one): 30_000 for one in range(20)}
            machine.move("put", new)
            machine.ask("delete", deleted := [*machine.model.held])
            machine.model.delete(deleted)
            machine.open_again()
            left.append(machine.opened.occupied_bytes())
        machine.look([*machine.model.sizes])  # deleted keys do not come back with their space
        if left:
            what, reason = "deleted pages take no more bytes each time", "as before, and notes"
            most = left[0] + NOTES
            if not machine.can(C.SHRINKS):
                most, reason = rounds * 20 * 30_000 // 2, "half of all bytes that were put"
            machine.occupies_at_most(most, what, reason)

    @example("TIER-11", C.GONE, C.THREADED)
    def test_tier_11_threads_and_files(self, machine: TierMachine) -> None:
        """Growth: loads leave no file open, and close leaves neither a file nor a thread."""
        threads = {*threading.enumerate()}
        machine.start()
        folder = str(machine.opened.folder)
        machine.move("put", _MANY)
        before = 0
        for number in range(30):
            machine.move("get", _MANY)
            if number == 4:
                before = len(open_files(folder))
        machine.opened.damage("lose the start")
        machine.model.damage()
        machine.look([*_MANY])  # no get, because the guard verifies the pages of most stores
        grown = len(open_files(folder)) - before
        machine.true(grown < 25, "loads leave no file open", f"{grown} more", "no more files")
        machine.call(machine.store, "close")
        end = time.monotonic() + self.patience / 4
        while open_files(folder) and time.monotonic() < end:
            gc.collect()  # files that an ended thread had open
            time.sleep(0.01)
        machine.equal(open_files(folder), [], "close leaves no file open")
        left = sorted(thread.name for thread in {*threading.enumerate()} - threads)
        machine.equal(left, [], "close leaves no thread of the store's")


CHECKS.append(
    coverage_check(
        "check_coverage_of_stores",
        "Pages were stored, and the place of the store shows every law.",
        "tier",
        lambda suite: suite.gaps(),  # type: ignore[attr-defined]
    )
)


def _check_held(machine: TierMachine, sizes: Mapping[bytes, int]) -> None:
    machine.look([*sizes])
    machine.move("get", sizes)


def _fits(machine: TierMachine) -> None:
    most = machine.model.max_bytes
    assert most is not None, "the check has set a budget"
    machine.occupies_at_most(most, "a store never occupies more than its budget", "max_bytes")


def _leaves_nothing(machine: TierMachine, sizes: Mapping[bytes, int], subject: str) -> None:
    if machine.can(C.GONE) and machine.can(C.SHRINKS):
        most = sum(sizes.values()) * 17 // 16 + len(sizes) * OVERHEAD + NOTES
        reason = f"{len(sizes)} pages, 1/16 and {OVERHEAD} more for each, {NOTES:,} for notes"
        machine.occupies_at_most(most, f"{subject} leaves no bytes in a reopened store", reason)


def _kill_writer(machine: TierMachine, seed: int) -> None:
    """Kill a process that writes, while another process writes the same and other keys.

    With seed 0 the system ends the process in the middle of a file, so this kill does not depend on
    time. With other seeds the process is killed a moment after it has stored some keys, because not
    every store writes files.
    """
    rng, model = Random(seed + current_effort().seed), machine.model
    both, first, second = (_draw_keys(rng, number) for number in (20, 60, 60))
    num_stored = rng.randrange(len(both), len(both | first))
    most_growth = _HALF_OF_THE_LARGEST
    if model.max_bytes is None:  # the kill comes while a large page is being written
        most_growth = _LARGE // 2
        small = dict([*(both | first).items()][len(both) : num_stored])
        first = small | {rng.randbytes(20): _LARGE for _ in range(4)} | first
    start = machine.opened.start_writer
    writers = [start(both | first, None if seed else most_growth), start(both | second)]
    writers[0].kill(num_stored, rng.random() * 0.002)
    model.share()
    for writer, keys in zip(writers, (first, second), strict=True):
        model.sizes |= both | keys
        model.either |= {k: size for k, size in (both | keys).items() if k not in model.held}
        for key in writer.stored() or ():
            if model.max_bytes is None:
                model.use([key])


def _draw_keys(rng: Random, number: int) -> dict[bytes, int]:
    return {rng.randbytes(20): rng.choice(_WRITTEN_SIZES) for _ in range(number)}


# --- classes of stores ---


def suite_of(
    store: type[TierStore], options: Mapping[str, Any], lacks: Collection[str] = ()
) -> type[TierConformance]:
    """Make the suite of a class of stores.

    Args:
        store: The class.
        options: Options of the class; ``{tmp}`` in a text is replaced by a new folder.
        lacks: Names of the capabilities that the user of the store does not need.

    Raises:
        ConfigError: The class lacks a method, or cannot be made with these options.
    """
    name = store.__qualname__
    if lacking := ", ".join(missing_methods(store)):
        raise ConfigError(f"{name} is not a tier store, because it lacks {lacking}")
    if inspect.isabstract(store):
        lacking = ", ".join(sorted(vars(store)["__abstractmethods__"]))
        raise ConfigError(f"{name} is abstract, because it lacks {lacking}")
    options = in_size(options, _BLOCKS, _BLOCK_BYTES)
    _require_options(store, options)
    more = f", lacks={tuple(lacks)!r}" if lacks else ""
    made = f"suite_of(load_target({importable(store)!r}), {dict(options)!r}{more})"
    imports = f"from kvview.testing import load_target\nfrom {__name__} import suite_of"
    members = {
        "store": store,
        "options": dict(options),
        "made_by": f"{imports}\n\nTest{store.__name__} = {made}",
        "lacks": tuple(lacks),
        "__module__": store.__module__,
    }
    return type(f"Test{store.__name__}", (TierConformance,), members)


def _require_options(store: type[TierStore], options: Mapping[str, Any]) -> None:
    name = store.__qualname__
    try:
        signature = inspect.signature(store)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    try:
        signature.bind(None, **options)
    except TypeError as error:
        known = signature.parameters
        close = "".join(did_you_mean(one, known) for one in options if one not in known)
        raise ConfigError(
            f"{name}{signature} must accept a namespace and the options {sorted(options)}: "
            f"{one_line(error)}; set options with --option NAME=VALUE, {FOLDER} in a text is a "
            f"new folder{close}"
        ) from None


def _try(suite: TierConformance) -> tuple[bool, bool]:
    """Store a page and open the store again.

    Returns:
        Whether the page is in a file of the folder, unless the put has failed, and whether the
        reopened store has the page.
    """
    key, page = b"a trial", memoryview(bytes_of(b"a trial", 4096))
    try:
        opened = suite.open()
    except Exception:  # the inspection of the suite reports it
        return True, False
    has_files = True
    try:
        with watchdog.limit(_TRIAL_SECONDS), watchdog.watching(), watchdog.calling():
            opened.store.put(1, [key], [page])
            if finished(opened.store, suite.patience) == [True]:
                has_files = opened.occupied_bytes() > 0
            opened = opened.reopen()
            opened.store.get(1, [key], [memoryview(bytearray(4096))])
            return has_files, finished(opened.store, suite.patience) == [True]
    except (Exception, watchdog.HookTimeout):  # the checks find it
        return has_files, False
    finally:
        opened.end()


def _reasons(suite: type[TierConformance]) -> dict[C, str]:
    """Return the capabilities that a class and its options lack, each with the reason."""
    store, options = suite.store, suite.options
    is_seen, is_found = _try(suite())
    places = [str(value) for value in options.values() if FOLDER in str(value)]
    has_place = "" if places or is_found else _NO_FOLDER
    is_local = any(place.partition("://")[0] in (place, "file") for place in places)
    has_files = "" if is_local and is_seen else has_place or _IN_A_FOLDER
    reasons = {C.REOPEN: has_place, C.NAMESPACES: has_place, C.GONE: has_files}
    # Another process may not see a page that a store keeps in the memory of this process.
    reasons[C.KILL], reasons[C.VERIFIES] = "" if places else _NO_FOLDER, has_files
    if not importable(store):
        reasons[C.KILL] = reasons[C.KILL] or "another process cannot import the class of the store"
    if "max_bytes" not in inspect.signature(store).parameters:
        reasons[C.BUDGET] = "the store takes no option max_bytes"
    if not getattr(store, "verifies", False):
        reasons[C.VERIFIES] = (
            has_files or "the store does not set verifies = True, so the guard finds damaged pages"
        )
    if not issubclass(store, Threaded):
        reasons[C.THREADED] = "the store is not derived from Threaded"
    if getattr(store, "reuses_space", False):
        reasons[C.SHRINKS] = "the store sets reuses_space = True"
    for method in (C.DELETE, C.USAGE, C.TOUCH):
        if not callable(getattr(store, method.value, None)):
            reasons[method] = f"the store has no method {method.value}"
    return {capability: reason for capability, reason in reasons.items() if reason}
