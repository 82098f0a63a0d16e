"""The operations of the guard contract, which run on guards of one pool and on their model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, ClassVar

from typing_extensions import override

from kvview.errors import (
    BlockNotHeldError,
    KVViewError,
    UnknownBlockError,
    ViewClosedError,
)
from kvview.pool import SupportsPinBudget
from kvview.testing.guard.logs import logged
from kvview.testing.guard.model import LeaseModel
from kvview.testing.guard.moves import TICK, GuardMoves
from kvview.testing.guard.unchecked import UncheckedPool
from kvview.testing.harness import Capability as C
from kvview.testing.pool.player import PoolPlayer
from kvview.testing.search import Label, check_by_search, observable, operation


def _pool_laws() -> dict[str, Label]:
    return {
        law: Label(f"Among guards and leases, too: {label.summary}", (C.LEASES, *label.needs))
        for law, label in PoolPlayer.labels.items()
        if law.startswith("POOL")
    }


@check_by_search
class GuardPlayer(GuardMoves):
    """Plays operations on guards over one pool, while time passes and the engine may fail."""

    labels: ClassVar[Mapping[str, Label]] = {
        "GUARD-1": Label("A call that raises has changed nothing.", (C.LEASES,)),
        "GUARD-2": Label("A lease releases its references exactly once.", (C.LEASES,)),
        "GUARD-3": Label(
            "Leases expire in the order of their deadlines, at the next call.", (C.LEASES,)
        ),
        "GUARD-4": Label("A call from another thread is refused.", (C.LEASES, C.ONE_THREAD)),
        "GUARD-5": Label(
            "A budget counts once each block that any view holds.", (C.LEASES, C.GUARDS)
        ),
        "GUARD-7": Label("A lease that has ended refuses with and renew.", (C.LEASES,)),
        "GUARD-8": Label(
            "If the engine does not take blocks back, the guard tries again.", (C.LEASES, C.GUARDS)
        ),
        "GUARD-10": Label(
            "No guard releases blocks that another guard or a lease holds.", (C.LEASES, C.GUARDS)
        ),
        "GUARD-11": Label("leaks and stats report the held blocks and the calls.", (C.LEASES,)),
        **_pool_laws(),
    }
    # --- time ---

    @operation("GUARD-3", weight=9)
    def advance(self) -> None:
        """Let time pass, often until or just before a deadline, and then call each guard."""
        self.blame("GUARD-3")
        deadlines = [one.deadline for one in self.model.leases if one.deadline is not None]
        left = [deadline - self.model.seconds for deadline in deadlines]
        left = [step - early for step in left for early in (0, 0, TICK) if step > early]
        self._advance_by(self.rng.choice([*left, 0.5, 3.0]))
        for at in self.guards():
            self._call_after(at, self.model.expire(at))

    def _advance_by(self, seconds: float) -> None:
        self.call(self.harness, "advance", seconds)
        self.model.seconds += seconds

    def _call_after(self, at: int, ended: list[LeaseModel]) -> None:
        """Make any call of a guard; after the call, its due leases have ended."""
        view, block = self.views[at], self.rng.choice(self.model.blocks)
        able: list[tuple[str, list[Any]]] = [("touch_blocks", [[]]), ("free_blocks", [[]])]
        able += self.queries(block)
        more: list[Callable[[], object]] = [
            lambda: self._call_one(view, able),
            lambda: self.hold(at, [block]),
            lambda: self.take_lease(at),
            lambda: self.refused(UnknownBlockError, view, "touch_blocks", [block, -1]),
            lambda: self.refused(UnknownBlockError, view, "lease", [block, -1]),
            lambda: self.listed(view, "iter_free_block_ids_with_hash"),
            lambda: self._release_expired(view, ended),
            lambda: self._end_due(ended) if ended else self.call(view, "free_blocks", []),
        ]
        if not self.model.held[at][block]:
            more.append(lambda: self.refused(BlockNotHeldError, view, "free_blocks", [block]))
        self.rng.choice(more)()
        self.blame("GUARD-3")

    def _call_one(self, view: Any, calls: list[tuple[str, list[Any]]]) -> None:
        method, args = self.rng.choice(calls)
        self.call(view, method, *args)

    def _release_expired(self, view: Any, ended: list[LeaseModel]) -> None:
        if not self.can(C.LEAKS):
            self.call(view, "touch_blocks", [])
            return
        got = [(leak.job, tuple(leak.block_ids)) for leak in self.call(view, "release_expired")]
        self.derive()
        expected = [(lease.job, lease.blocks) for lease in ended]
        self.equal(got, expected, "release_expired returns the leases that it ended", "GUARD-3")

    def _end_due(self, ended: list[LeaseModel]) -> None:
        """Use a due lease, which must expire before the use."""
        for one, lease in self.leases:
            if lease in ended:
                self.equal(self.call(one, "release"), False, "an expired lease has ended")
                return
        self.call(self.views[ended[0].guard], "touch_blocks", [])

    # --- the engine ---

    @operation("GUARD-1", C.GUARDS, weight=5)
    def fail_the_engine(self) -> None:
        """Let calls of an engine without checks fail, also when a lease expires."""
        if not isinstance(self.harness, UncheckedPool):
            self.advance()
            return
        at = self.rng.choice(self.guards())
        if self.rng.random() < 0.6:
            self.blame("GUARD-1")
            free = self.some(self.model.blocks, repeat=True)
            held = self.some(self.model.held[at].elements())
            calls = [("touch_blocks", free), ("lease", free)]
            calls += [("free_blocks", held), ("give_back_blocks", held)] * bool(held)
            method, blocks = self.rng.choice(calls)
            if method in ("touch_blocks", "lease") and not self.model.may_hold(at, free):
                return
            name = "touch_blocks" if method == "lease" else method
            self.call(self.harness, "fail", name)
            self.refused(RuntimeError, self.views[at], method, blocks, law="GUARD-1")
            self.call(self.harness, "fail", "")
            return
        self.blame("GUARD-8")
        self.call(self.harness, "fail", "free_blocks")
        self._advance_by(self.rng.choice((5.0, 200.0)))
        for guard in self.guards():
            ended = self.model.expire(guard, is_failing=True)
            with logged() as messages:
                self.call(self.views[guard], "touch_blocks", [])
            self.equal(len(messages), len(ended), "a failed expiry is logged once")
        self.compare()
        self.call(self.harness, "fail", "")
        self._advance_by(1000.0)
        for guard in self.guards():
            self.model.expire(guard)
            self.call(self.views[guard], "touch_blocks", [])

    @operation("GUARD-11", C.ENGINE_SIDE)
    def speak_of(self) -> None:
        """Set the request for which blocks are taken from now on."""
        self.blame("GUARD-11")
        self.model.request = self.rng.choice((None, "r1", "r2"))
        self.call(self.views[self.rng.choice(self.guards())], "speak_of", self.model.request)

    @operation("GUARD-11", C.ENGINE_SIDE, weight=0.5)
    def account(self) -> None:
        """Compare the counters of a guard and of the guards over it."""
        self.blame("GUARD-11")
        at = self.rng.choice(self.guards())
        tree = [self.views[guard] for guard in self.model.tree(at)]
        got = self.call(self.views[at], "guards")
        self.derive()
        is_right = len(got) == len(tree) and all(guard in got for guard in tree)
        self.true(is_right, "guards returns a guard and those over it", got, f"{tree}")
        if self.can(C.STATS):
            by_owner = self.call(self.views[at], "accounts")
            accounts = [one for counters in by_owner.values() for one in counters]
            self.derive()
            stats = [guard.stats for guard in tree]
            is_right = all(any(one is other for other in stats) for one in accounts)
            is_right = is_right and len(accounts) == len(stats) and accounts[0] is stats[0]
            self.true(is_right, "accounts returns the counters of each", accounts, f"{stats}")

    @override
    @operation("POOL-10", C.CLOSE)
    def close(self) -> None:
        if 0 not in self.model.closed:
            self._keep_a_guard(self.closing(0))
            super().close()

    def _keep_a_guard(self, ended: set[int]) -> None:
        """Open a guard that stays open when these views are closed, unless there is one already."""
        if not set(self.guards()) - ended and self.can(C.VIEWS, C.GUARDS):
            self.open_view()
            self.open_guard(len(self.views) - 1)
            self.compare()

    @operation("GUARD-11", C.ENGINE_SIDE, C.CLOSE)
    def free_all(self) -> None:
        """Let the engine take back all blocks that a guard holds, and close the guard."""
        self.blame("GUARD-11")
        at = self.rng.choice(self.guards())
        ended = self.closing(at)
        self._keep_a_guard(ended)
        self.blame("GUARD-11")
        tree = self.model.tree(at)
        self.call(self.views[at], "free_all")
        self.call(self.views[at], "free_all")
        leases = [lease for lease in self.model.leases if lease.guard in tree]
        accounts = [self.model.held[guard] for guard in tree] + [lease.refs for lease in leases]
        held = [block for refs in accounts for block in refs]
        self.model.closed |= ended
        if self.can(C.CACHE) and len(self.model.closed) < len(self.views):
            with self.unrecorded():  # the blocks come in any order
                walk = self.listed(self.a_view(), "iter_free_block_ids_with_hash")
            place = {block: number for number, (block, _) in enumerate(walk)}
            held.sort(key=lambda block: place.get(block, -1))
        for block in dict.fromkeys(held):
            for refs in accounts:
                self.model.give([block] * refs[block], refs)
        for lease in leases:
            lease.is_active = False
            self.model.leases.remove(lease)
            self.model.stats[lease.guard]["active_leases"] -= 1
        if self.can(C.STATS):
            self.stats(tree)
        self.end_views(ended)

    @override
    def end_views(self, ended: set[int]) -> None:
        super().end_views(ended)
        self.leaks(sorted(ended & self.model.stats.keys()))
        self.lease_states()
        for one, lease in self.leases:
            if lease.guard in ended:
                self.equal(self.call(one, "release"), False, "the lease has ended", "GUARD-7")
                self.refused(KVViewError, one, "__enter__", law="GUARD-7")
        self.leases = [pair for pair in self.leases if pair[1].guard not in ended]
        if self.can(C.GUARDS):
            for at in sorted(ended):
                view = self.views[at]
                self.refused(ViewClosedError, self.harness, "guard_over", view, None, law="POOL-10")
        if self.can(C.ENGINE_SIDE):
            for at in ended & self.model.stats.keys():
                self.call(self.views[at], "free_all")  # because no references are left
        if not self.guards() and not self.is_over:
            self.compare()
            self.is_over = True

    # --- observables ---

    @observable("GUARD-7")
    def lease_states(self) -> None:
        """Compare whether each lease is active."""
        for one, lease in self.leases:
            got = self.read(one, "is_active")
            self.equal(got, self.model.is_active(lease), "a lease is active until it ends")

    @observable("GUARD-5")
    def pinnable(self) -> None:
        """Compare the number of blocks that each guard may still hold."""
        for at in self.guards():
            left = self.model.num_pinnable(at)
            has_query = isinstance(self.views[at], SupportsPinBudget)
            what = "num_pinnable_blocks is there exactly with a budget"
            self.equal(has_query, left is not None, what, "GUARD-5")
            if has_query:
                got = self.call(self.views[at], "num_pinnable_blocks")
                self.equal(got, left, "the budget less the blocks that are held")

    @observable("GUARD-11", C.STATS)
    def stats(self, guards: Sequence[int] | None = None) -> None:
        """Compare the counters of each guard."""
        for at in self.guards() if guards is None else guards:
            got, expected = self.read(self.views[at], "stats"), self.model.stats[at]
            self.derive()
            names = ("touched", "freed", "leases", "active_leases", "expired", "refused")
            for name in (*names, "peak_held"):
                self.equal(getattr(got, name), expected[name], f"stats.{name} of view {at}")
            self.equal(got.held, expected["touched"] - expected["freed"], "stats.held")

    @observable("GUARD-11", C.LEAKS)
    def leaks(self, guards: Sequence[int] | None = None) -> None:
        """Compare the leak report of each guard, reference by reference, the oldest first."""
        for at in reversed(self.guards() if guards is None else guards):
            leaks = list(self.call(self.views[at], "leaks"))
            self.derive()
            rows = list(self.model.rows(at))
            ages = [leak.age for leak in leaks]
            self.equal(ages, sorted(ages, reverse=True), "the oldest leak comes first")
            if leaks and self.model.tree(at) == [at]:
                self.owners.setdefault(at, leaks[0].owner)
            has_names = all(guard in self.owners for guard, *_ in rows)
            mask = (has_names, True, True, True, self.can(C.ENGINE_SIDE))
            now, owners = self.model.seconds, self.owners
            expected = Counter(
                tuple(compress((owners.get(guard), job, block, now - then, request), mask))
                for guard, job, block, (then, request) in rows
            )
            got = Counter(
                tuple(compress((leak.owner, leak.job, block, leak.age, leak.request_id), mask))
                for leak in leaks
                for block in leak.block_ids
            )
            self.equal(got, expected, f"leaks of view {at} has each reference")
            if ages:
                limit = max(ages) if self.model.seconds else 0.5
                old = [leak.age for leak in self.call(self.views[at], "leaks", limit)]
                self.derive()
                self.equal(old, [age for age in ages if age >= limit], "leaks filters by age")
