"""The machine of the tier contract: an engine, other processes, and faults of the medium."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from random import Random
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize

from kvview.errors import KVViewError, TierJobError
from kvview.testing.suites.capability import Capability as C
from kvview.testing.suites.conformance import Needs, observable, of_state, operation
from kvview.testing.tier.model import FLAT, OVERHEAD, TWIN, bytes_of
from kvview.testing.tier.under_test.io_watch import slow_renames
from kvview.testing.tier.under_test.store_calls import TierCalls, finished, sized
from kvview.tier import Namespace

_BUDGETS = (100_000, 400_000, 3_000_000)
NOTES = 64 << 10  # maximum of bytes for a store's own notes; a log of SQLite has 32 KiB
_SLACK = 30_000  # maximum difference between the usage and the medium
_SPECIAL = (b"..", b"/", b"a/a", b"\0", b"a\0", b"\n", b" ", b"%61", b"\xff", b"*", b"-", b"a.tmp")
_FLAT_KEYS = tuple(b"%b%d" % (FLAT, number) for number in range(20))
_NEVER_PUT = b"never put"
_MOST_KNOWN = 60

# --- arguments; none depends on a result of the store, because results depend on time ---

_budgets = of_state(lambda machine: st.sampled_from((None,) * 3 + _BUDGETS * machine.can(C.BUDGET)))
_new_keys = st.one_of(
    st.integers(0, 999).map(lambda number: b"key %d" % number),
    st.integers(1, 100).map(lambda length: Random(length).randbytes(length)),
    st.sampled_from((*_SPECIAL, *_FLAT_KEYS)),
    st.integers(0, 5).map(lambda number: b"%b%d" % (TWIN, number)),
)
_changes: tuple[Callable[[bytes], bytes], ...] = (
    lambda key: key[:-1] or b"k",
    lambda key: (key + b"\0")[:100],
    lambda key: key.swapcase(),
    lambda key: key.hex().encode()[:100],
    lambda key: key[::-1],
)


def _known_keys(machine: TierMachine) -> st.SearchStrategy[list[bytes]]:
    known = st.sampled_from([_NEVER_PUT, *machine.keys])
    return st.lists(known, max_size=machine.most, unique=True)


def _all_keys(machine: TierMachine) -> st.SearchStrategy[list[bytes]]:
    known = st.sampled_from([*machine.keys] or [b"key"])
    similar = st.builds(lambda change, key: change(key), st.sampled_from(_changes), known)
    return st.lists(known | _new_keys | similar, max_size=machine.most, unique=True)


_known, _keys = of_state(_known_keys), of_state(_all_keys)


def _other_value(value: Any, change: str) -> Any:
    """Change a value of a namespace, a text perhaps only in its punctuation."""
    if isinstance(value, int):
        return value + 1
    return value.replace("-", change) if "-" in value else f"{value}{change}"


def _has_budget(machine: TierMachine) -> bool:
    return machine.max_bytes is not None


class TierMachine(TierCalls):
    """Runs an engine, other processes, and faults of the medium, on one store after another."""

    laws = tuple(f"TIER-{number}" for number in range(1, 12))
    needs: ClassVar[Needs] = {
        "TIER-8": (C.BUDGET,),
        "TIER-9": (C.REOPEN,),
        "TIER-10": (C.NAMESPACES,),
    }

    num_calls = 22  # fewer calls, because a run may wait for the store

    def __init__(self) -> None:
        super().__init__()
        self.keys: dict[bytes, None] = {}
        """Keys that were drawn, the last ones last."""
        self.most = 3
        """Maximum number of keys of a call."""

    @initialize(max_bytes=_budgets, most=st.sampled_from((3, 6, 40)), waits=st.booleans())
    def start(self, max_bytes: int | None = None, most: int = 6, waits: bool = False) -> None:
        """Start with a store; the engine may wait for the wake-ups of the store."""
        self.calls.append(("start", {"max_bytes": max_bytes, "most": most, "waits": waits}))
        self.most, self.waits_for_wake_up = most, waits
        self.elsewhere: set[tuple[str, bytes]] = set()  # keys of other namespaces, by their field
        self.open(max_bytes)

    def start_again(self, max_bytes: int | None) -> None:
        """Start with another store after the end of the first."""
        self.begin_operation("TIER-7")
        self.teardown()
        self.open(max_bytes)

    def remember(self, keys: Sequence[bytes]) -> None:
        """Make keys known to later calls."""
        self.keys |= dict.fromkeys(keys)
        for key in [*self.keys][:-_MOST_KNOWN]:
            del self.keys[key]

    # --- jobs ---

    @operation("TIER-7", keys=_keys)
    def put(self, keys: list[bytes]) -> None:
        """Store keys, both new and known."""
        self.remember(keys)
        self.submit("put", sized(keys))

    @operation("TIER-8", C.BUDGET, when=_has_budget, before=_keys, after=_keys)
    def put_too_large(self, before: list[bytes], after: list[bytes]) -> None:
        """Store keys, and between them a page that is larger than the budget."""
        most = self.max_bytes
        assert most is not None, "the rule needs a budget"
        self.remember([*before, *after])
        self.submit("put", sized(before) | {b"too large %d" % most: 2 * most} | sized(after))

    @operation("TIER-7", keys=_known, change=st.sampled_from((0, 0, 1, 7, -1)))
    def get(self, keys: list[bytes], change: int) -> None:
        """Load keys, including missing keys, also into pages of another size."""
        self.submit("get", sized(keys, change))

    @operation("TIER-2", keys=_known, number=st.sampled_from((20, 120)))
    def burst(self, keys: list[bytes], number: int) -> None:
        """Start many jobs at once, each with at most two keys."""
        for at in range(number):
            self.submit("get", sized(keys[at % (len(keys) + 1) :][: at % 3]))

    @operation("TIER-2")
    def take_reports(self) -> None:
        """Poll once."""
        self.poll()

    @operation("TIER-11", method=st.sampled_from(("drain", "wait")))
    def finish(self, method: str) -> None:
        """Let every job end, by ``drain`` or by ``poll``."""
        self.drain() if method == "drain" else self.wait()

    @operation("TIER-7")
    def load_all(self) -> None:
        """Load every key that is held or may be held."""
        self.wait()
        self.look([*self.model.held])
        self.move("get", self.model.held | self.model.either)

    @operation("TIER-3")
    def rest(self) -> None:
        """Let late effects of a store come."""
        time.sleep(0.03)

    @operation("TIER-6", key=_new_keys)
    def be_refused(self, key: bytes) -> None:
        """Submit malformed jobs; later lookups show that none of these jobs was started."""
        self.blame("TIER-6")
        self.remember([key])
        other, size, job = b"another key", 4096, self.next_number()
        page, more = memoryview(bytearray(size)), memoryview(bytearray(size))
        wrong: list[tuple[list[bytes], list[memoryview]]] = [
            ([key, other], [page]),
            ([key], [page, more]),
            ([key, b""], [page, more]),
            ([key, b"k" * 101], [page, more]),
            ([key, key], [page, more]),
            ([key], [page.cast("B", (64, 64))]),
            ([key], [page.cast("I")]),
            ([key], [page[::2]]),
            ([key], [page[:0]]),
        ]
        for method in ("put", "get"):
            for keys, pages in wrong:
                self.refused(TierJobError, self.store, method, job, keys, pages)
            for number in [*self.model.jobs][:1]:
                self.refused(TierJobError, self.store, method, number, [key], [page])
        readonly = memoryview(bytes(size))
        self.refused(TierJobError, self.store, "get", job, [key], [readonly])

    @operation("TIER-7", C.DELETE, keys=_known, when_put=st.sampled_from(("", "before", "after")))
    def delete(self, keys: list[bytes], when_put: str) -> None:
        """Delete keys, also while they are being put, and before they are put again at once."""
        if when_put == "before":
            self.submit("put", sized(keys))
        self.ask("delete", keys)
        self.model.delete(keys)
        if when_put == "after":
            self.submit("put", sized(keys))

    @operation("TIER-8", C.TOUCH, keys=_known)
    def touch(self, keys: list[bytes]) -> None:
        """Use keys through ``touch``."""
        self.wait()
        self.ask("touch", keys)
        time.sleep(0.01)  # a thread of the store may handle the touch
        self.model.touch(keys)

    @operation("TIER-8", C.BUDGET, C.TOUCH, when=_has_budget)
    def use_and_fill(self) -> None:
        """Use a few keys again and again while other keys fill the store."""
        assert self.max_bytes is not None, "the rule needs a budget"
        self.wait()
        used = [key for key in self.model.held if self.model.held[key] < 10_000][:4]
        size = self.max_bytes // 20
        for number in range(24):
            self.ask("touch", used[::2])
            self.submit("get", {key: self.model.sizes[key] for key in used[1::2]})
            self.wait()
            time.sleep(0.005)  # a thread of the store may handle the touch
            self.model.touch(used[::2])
            self.submit("put", {b"cold %d %d" % (self.num_jobs, number): size})
            self.wait()

    @operation(
        "TIER-5",
        C.THREADED,
        new=st.lists(_new_keys, min_size=2, max_size=2, unique=True),
        known=_known,
    )
    def hold_up(self, new: list[bytes], known: list[bytes]) -> None:
        """Make every call while I/O is blocked."""
        self.call(self.opened, "pause")
        late = threading.Timer(self.suite.patience, self.opened.resume)
        late.start()
        try:
            self.remember(new)
            self.submit("put", sized(new))
            self.submit("get", sized(known))
            if self.can(C.DELETE):
                self.ask("delete", known)
                self.model.delete(known)
            self.ask("lookup", [*self.keys][:40])
            self.poll()
            drained = self.call(self.store, "drain", 0.01)
            self.equal(drained, not self.model.jobs, "drain returns whether all jobs have ended")
            self.be_refused(key=b"key")
        finally:
            late.cancel()
            self.opened.resume()

    # --- other processes ---

    @operation("TIER-9", C.REOPEN)
    def reopen(self) -> None:
        """Continue with a reopened store, as in another process."""
        self.blame("TIER-9")
        self.wait()
        self.open_again()

    def open_again(self) -> None:
        """Close the store, and continue as another process in its place."""
        self.continue_with(self.call(self.opened, "reopen"))
        self.model.reopen()

    @operation("TIER-11", keys=_keys, is_reopened=st.booleans(), max_bytes=_budgets)
    def close(self, keys: list[bytes], is_reopened: bool, max_bytes: int | None) -> None:
        """Close with jobs in flight, after which jobs fail; then reopen, or start again."""
        self.blame("TIER-11")
        self.remember(keys)
        for key in keys:
            self.submit("put", sized([key]))
        self.model.close()
        self.call(self.store, "close")
        self.poll()
        left = sorted(self.model.jobs)
        self.equal(left, [], "close ends every job")
        self.model.is_closed = True
        for method in ("put", "get"):
            self.submit(method, sized([*self.keys][:3]))
        self.wait()
        self.look([*self.keys])
        self.call(self.store, "close")
        self.pages_are_left_alone()
        if is_reopened and self.can(C.REOPEN):
            self.blame("TIER-9")
            self.open_again()
        else:
            self.start_again(max_bytes)

    def open_in_place(self, **changes: Any) -> Any:
        """Open the place a second time; returns the error if only one store may be open."""
        try:
            opened = self.opened.with_namespace(replace(self.opened.namespace, **changes))
        except KVViewError as error:
            return error
        self.all_opened.append(opened)
        return opened.store

    @operation("TIER-9", C.REOPEN, C.NAMESPACES, keys=_keys)
    def write_beside(self, keys: list[bytes]) -> None:
        """Let another process open the same place and write while this process writes."""
        self.blame("TIER-9")
        with slow_renames(0.002):
            self.remember(keys)
            self.submit("put", sized(keys))
            other = self.open_in_place()
            if isinstance(other, KVViewError):
                return
            new = [b"%d of another %d" % (self.num_jobs, number) for number in range(4)]
            theirs = sized(new)
            self.model.sizes |= theirs
            self.model.either |= theirs
            other.put(1, new, [memoryview(bytes_of(key, size)) for key, size in theirs.items()])
            flags = finished(other, self.suite.patience)
            other.close()
            self.wait()
        self.remember(new)
        if self.model.max_bytes is None:
            self.model.use(key for key, flag in zip(new, flags, strict=True) if flag)
        self.model.share()
        self.submit("get", theirs)
        counted = b"counts again %d" % self.num_jobs
        self.submit("put", {counted: 300})  # the store may now count the bytes

    # A budget excludes the notes of another namespace.
    @operation(
        "TIER-10",
        C.NAMESPACES,
        when=lambda machine: not _has_budget(machine),
        field=st.sampled_from([field.name for field in fields(Namespace)]),
        change=st.sampled_from(("x", " ", "_", "/")),
        keys=_keys,
    )
    def open_another_namespace(self, field: str, change: str, keys: list[bytes]) -> None:
        """Open the same place for a namespace that differs in one field."""
        self.blame("TIER-10")
        self.remember(keys)
        self.submit("put", sized(keys))
        self.wait()
        value = _other_value(getattr(self.opened.namespace, field), change)
        other = self.open_in_place(**{field: value})
        if isinstance(other, KVViewError):
            is_named = str(value) in str(other)
            self.true(is_named, "a refusal names both namespaces", str(other), f"{value!r} in it")
            return
        keys = [k for k in keys if k in self.model.held and (field, k) not in self.elsewhere]
        other.get(1, keys, [memoryview(bytearray(self.model.sizes[key])) for key in keys])
        flags = finished(other, self.suite.patience)
        self.equal(flags, [False] * len(keys), f"another {field} shares no bytes")
        with self.patiently("every lookup is answered", "TIER-5") as wait:
            while None in (found := list(other.lookup(keys))):
                self.woken.set()
                other.poll()
                wait(found)
        self.equal(found, [False] * len(keys), f"another {field} shares no key")
        other.put(2, keys, [memoryview(bytes_of(key[::-1], self.model.sizes[key])) for key in keys])
        finished(other, self.suite.patience)
        if self.can(C.DELETE):
            other.delete(keys)
        else:
            self.elsewhere.update((field, key) for key in keys)
        other.close()
        only_law, self.only_law = self.only_law, "TIER-10"
        self.submit("get", {key: self.model.sizes[key] for key in keys})
        self.wait()
        self.only_law = only_law

    # --- faults of the medium ---

    @operation(
        "TIER-1",
        C.VERIFIES,
        how=st.sampled_from(("flip", "lose the start", "lose the end", "swap")),
        is_large=st.booleans(),
        is_loaded=st.booleans(),
    )
    def damage(self, how: str, is_large: bool, is_loaded: bool) -> None:
        """Damage every entry on the medium, also that of a large page; then load the entries."""
        if is_large:
            self.submit("put", {b"a large page": 400_000})
        self.wait()
        self.call(self.opened, "damage", how)
        self.model.damage()
        if is_loaded:
            self.load_all()

    @operation(
        "TIER-6",
        C.GONE,
        new=st.lists(_new_keys, min_size=10, max_size=40, unique=True),
        max_bytes=_budgets,
    )
    def lose_medium(self, new: list[bytes], max_bytes: int | None) -> None:
        """Remove the medium, after which every call must return, with failed keys and misses."""
        self.blame("TIER-6")
        self.call(self.opened, "lose_medium")
        self.model.become_faulty()
        for keys in ([*self.keys], new, [*self.keys]):
            for method in ("put", "get"):
                self.submit(method, sized(keys))
                self.look(keys)
                self.wait()
        self.start_again(max_bytes)

    # --- observables ---

    @observable("TIER-7")
    def lookups(self) -> None:
        """Compare every recently drawn key, and similar keys."""
        rng = Random(self.num_jobs)
        known = [*self.keys]
        similar = [key[:-1] + b"." for key in known[-4:]] + [key[:99] + b"!" for key in known[:4]]
        keys = dict.fromkeys([*known, *(key for key in similar if key not in self.model.sizes)])
        self.look(rng.sample([*keys], min(len(keys), 40)))

    @observable("TIER-8", C.BUDGET)
    def budget(self) -> None:
        """Compare the bytes on the medium with the bytes that ``usage`` returns."""
        most, opened = self.max_bytes, self.opened
        if most is None or not self.can(C.GONE):
            return
        what = "a store never occupies more than its budget"
        self.occupies_at_most(most, what, "max_bytes")
        if not self.can(C.SHRINKS):
            return
        held = (*self.model.held.values(), *self.model.either.values())
        expected = sum(held) + OVERHEAD * len(held) + NOTES
        end = time.monotonic() + self.suite.patience
        while not self.model.jobs and not self.model.damaged:
            used = occupied = opened.occupied_bytes()
            if self.can(C.USAGE):
                usage = self.call(self.store, "usage")
                self.equal(usage.max_bytes, most, "usage has the budget")
                used = occupied if usage.used_bytes is None else usage.used_bytes
            is_late = time.monotonic() > end
            if abs(used - occupied) < _SLACK and occupied <= expected:
                return
            if is_late:
                self.learn_evictions()
                what = "usage is the number of bytes on the medium"
                self.true(abs(used - occupied) < _SLACK, what, used, f"about {occupied}")
                what = "deleted, evicted and incomplete entries leave no bytes"
                if not self.model.sizes:
                    what = "a store without a put occupies bytes for its own notes only"
                reason = f"{len(held)} pages of {sum(held):,}, {OVERHEAD} more for each"
                self.occupies_at_most(expected, what, f"{reason}, {NOTES:,} for notes")
            time.sleep(0.002)  # a thread may still be removing deleted files
