"""The operations of the tier contract, which run on a store and on its model."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from typing_extensions import override

from kvview.errors import KVViewError
from kvview.testing.harness import Capability as C
from kvview.testing.search import Label, check_by_search, observable, operation
from kvview.testing.tier.io_watch import slow_renames
from kvview.testing.tier.model import OVERHEAD, TierModel, bytes_of
from kvview.testing.tier.moves import TierMoves, finished, size_of

_BUDGETS = (100_000, 400_000, 3_000_000)
_NOTES = 64 << 10  # maximum of bytes for a store's own notes; a log of SQLite has 32 KiB
_SLACK = 30_000  # maximum difference between the usage and the medium


@check_by_search
class TierPlayer(TierMoves):
    """Plays an engine, other processes, and faults of the medium, on one store."""

    labels: ClassVar[Mapping[str, Label]] = {
        "TIER-1": Label("A loaded page has the bytes that were put; any other page fails."),
        "TIER-2": Label("Each job is reported once, with one flag for each key."),
        "TIER-3": Label("No page is touched after its job was reported."),
        "TIER-4": Label("A failed key is a miss until it is stored again."),
        "TIER-5": Label("No call waits for I/O, and every lookup is answered."),
        "TIER-6": Label("Misuse raises TierJobError and starts nothing; nothing else raises."),
        "TIER-7": Label("A lookup finds the held keys and no others."),
        "TIER-8": Label(
            "A store keeps its budget, and evicts the keys used least recently.", (C.BUDGET,)
        ),
        "TIER-9": Label("A reopened store has all stored entries.", (C.REOPEN,)),
        "TIER-10": Label("Two namespaces share nothing.", (C.NAMESPACES,)),
        "TIER-11": Label("drain and close end every job."),
    }

    @override
    def start(self) -> None:
        super().start()
        if self.can(C.BUDGET) and not self.plan.is_small and self.rng.random() < 0.5:
            self.set_budget(self.rng.choice(_BUDGETS))

    def set_budget(self, max_bytes: int) -> None:
        """Continue with a store that has a budget."""
        self.continue_with(self.call(self.harness, "with_budget", max_bytes))
        names_evicted = any(hasattr(self.subject, n) for n in ("on_evicted", "take_evicted"))
        self.model = TierModel(
            max_bytes, evicts_by_use=self.can(C.TOUCH), names_evicted=names_evicted
        )

    @operation("TIER-8", C.BUDGET, C.TOUCH)
    def use_and_fill(self) -> None:
        """Use a few keys again and again while other keys fill the store."""
        if self.model.max_bytes is None:
            return
        self.wait()
        used = [key for key in self.model.held if self.model.held[key] < 10_000][:4]
        size = self.model.max_bytes // 20
        for number in range(24):
            self.ask("touch", used[::2])
            self.submit("get", {key: self.model.sizes[key] for key in used[1::2]})
            self.wait()
            time.sleep(0.005)  # a thread of the store may handle the touch
            self.model.use(used[::2])
            self.submit("put", {b"cold %d %d" % (self.next_job, number): size})
            self.wait()

    @operation("TIER-5", C.PAUSE)
    def hold_up(self) -> None:
        """Make every call while I/O is blocked."""
        self.call(self.harness, "pause")
        late = threading.Timer(self.patience, self.harness.resume)
        late.start()
        try:
            self.submit("put", self.sized([self.new_key(), self.new_key()]))
            self.get()
            if self.can(C.DELETE):
                self.delete()
            self.ask("lookup", [*self.keys][:40], shown="keys")
            self.poll()
            drained = self.call(self.subject, "drain", 0.01)
            self.equal(drained, not self.model.jobs, "drain returns whether all jobs have ended")
            self.be_refused()
        finally:
            late.cancel()
            self.harness.resume()

    @operation("TIER-9", C.REOPEN)
    def reopen(self) -> None:
        """Continue with a reopened store, as in another process."""
        self.blame("TIER-9")
        self.wait()
        self.continue_with(self.call(self.harness, "reopen"))
        self.model.reopen()

    @operation("TIER-11", C.REOPEN, weight=0.4)
    def close_and_reopen(self) -> None:
        """Close with jobs in flight, and continue as another process."""
        self.close()
        self.is_over = False
        self.reopen()

    @operation("TIER-1", C.DAMAGE, C.VERIFIES, weight=1.5)
    def damage(self) -> None:
        """Damage every entry on the medium."""
        if self.rng.random() < 0.4:
            self.submit("put", {b"a large page": 400_000})
        self.wait()
        hows = ("flip",) if self.model.max_bytes else ("flip", "flip", "cut", "grow", "swap")
        self.call(self.harness, "damage", self.rng.choice(hows))  # a budget excludes other bytes
        self.model.damage()
        if self.rng.random() < 0.5:
            self.load_all()

    @operation("TIER-6", C.GONE, weight=0.3)
    def lose_medium(self) -> None:
        """Remove the medium, after which every call must return, with failed keys and misses."""
        self.blame("TIER-6")
        self.call(self.harness, "lose_medium")
        self.model.become_faulty()
        for keys in ([*self.keys], [self.new_key() for _ in range(40)], [*self.keys]):
            for method in ("put", "get"):
                self.submit(method, self.sized(keys))
                self.look(keys)
                self.wait()
        self.is_over = True

    def open_in_place(self, **changes: Any) -> Any:
        """Open the folder a second time; returns the error if only one store may be open."""
        try:
            harness = self.harness.with_namespace(replace(self.harness.namespace, **changes))
        except KVViewError as error:
            return error
        self.harnesses.append(harness)
        return harness.store

    @operation("TIER-9", C.REOPEN, C.NAMESPACES)
    def write_beside(self) -> None:
        """Let another process open the same folder and write while this process writes."""
        self.blame("TIER-9")
        with slow_renames(0.002):
            self.submit("put", self.sized([self.new_key() for _ in range(6)]))
            other = self.open_in_place()
            if isinstance(other, KVViewError):
                return
            new = [b"%d of another %d" % (self.next_job, number) for number in range(4)]
            theirs = {key: size_of(key) for key in new}
            self.model.sizes |= theirs
            self.model.either |= theirs
            other.put(1, new, [memoryview(bytes_of(key, size)) for key, size in theirs.items()])
            flags = finished(other, self.patience)
            other.close()
            # A budget may not have room for two large pages that are in flight at once.
            stored = [
                flag or not self.model.has_room(theirs[key])
                for key, flag in zip(new, flags, strict=True)
            ]
            self.equal(stored, [True] * 4, "a page that another process writes is stored")
            self.wait()
        self.keys |= theirs
        if self.model.max_bytes is None:
            self.model.use(theirs)
        self.model.share()
        self.submit("get", theirs)
        self.submit("put", self.sized([self.new_key()]))  # the store may now count the bytes

    @operation("TIER-10", C.NAMESPACES)
    def open_another_namespace(self) -> None:
        """Open the same folder for a namespace that differs in one field."""
        if self.model.max_bytes is not None:  # a budget excludes their notes
            return
        self.blame("TIER-10")
        self.wait()
        name, value = self.another_field()
        keys = self.some(self.model.held)
        self.line(f"# a store of another namespace in the same place: {name}={value!r}")
        other = self.open_in_place(**{name: value})
        if isinstance(other, KVViewError):
            is_named = str(value) in str(other)
            self.true(is_named, "a refusal names both namespaces", str(other), f"{value!r} in it")
            return
        other.get(1, keys, [memoryview(bytearray(self.model.sizes[key])) for key in keys])
        flags = finished(other, self.patience)
        self.equal(flags, [False] * len(keys), f"another {name} shares no bytes")
        with self.patiently("every lookup is answered", "TIER-5") as wait:
            while None in (found := list(other.lookup(keys))):
                self.woken.set()
                other.poll()
                wait(found)
        self.equal(found, [False] * len(keys), f"another {name} shares no key")
        other.close()

    # --- observables ---

    @observable("TIER-8", C.BUDGET)
    def budget(self) -> None:
        """Compare the bytes on the medium with the bytes that ``usage`` returns."""
        most, harness = self.model.max_bytes, self.harness
        if most is None or self.model.is_closed:
            return
        what = "a store never occupies more than its budget"
        self.occupies_at_most(most, what, "max_bytes")
        held = (*self.model.held.values(), *self.model.either.values())
        expected = sum(held) + OVERHEAD * len(held) + _NOTES
        end = time.monotonic() + self.patience
        while not self.model.jobs and not self.model.damaged:
            used = occupied = harness.occupied_bytes()
            if self.can(C.USAGE):
                usage = self.call(self.subject, "usage")
                self.equal(usage.max_bytes, most, "usage has the budget")
                used = usage.used_bytes
            is_late = time.monotonic() > end
            if abs(used - occupied) < _SLACK and occupied <= expected:
                return
            if is_late:
                self.learn_evictions()
                what = "usage is the number of bytes on the medium"
                files = self.files_in_words()
                self.true(abs(used - occupied) < _SLACK, what, used, f"about {occupied}{files}")
                what = "deleted, evicted and incomplete entries leave no bytes"
                if not self.model.sizes:
                    what = "a store without a put occupies bytes for its own notes only"
                reason = f"{len(held)} pages of {sum(held):,}, {OVERHEAD} more for each"
                self.occupies_at_most(expected, what, f"{reason}, {_NOTES:,} for notes")
            time.sleep(0.002)  # a thread may still be removing deleted files
