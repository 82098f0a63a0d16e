"""Random holds, leases and expiries through three guards of one pool, against plain counters."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvview.errors import BlockNotHeldError, PinBudgetExceeded, UnknownBlockError
from kvview.testing.harness import Capability, Factory
from kvview.testing.machines import run_machine
from kvview.testing.pool.driver import PoolDriver

_BUDGETS = (8, 5, None)  # of the view, and of two guards over it
_NUM_BLOCKS = 11  # that are used: a few more than the budget

guards = st.integers(0, len(_BUDGETS) - 1)
picks = st.lists(st.integers(0, _NUM_BLOCKS - 1), min_size=1, max_size=5)


@dataclass(eq=False)
class _Lease:
    lease: Any
    guard: int
    blocks: list[int]
    deadline: float | None
    is_active: bool = True


class _Guard:
    """What one guard holds."""

    def __init__(self, guard: Any, budget: int) -> None:
        self.guard = guard
        self.budget = budget
        self.plain: Counter[int] = Counter()
        self.leased: Counter[int] = Counter()

    @property
    def held(self) -> Counter[int]:
        """Every reference."""
        return self.plain + self.leased


def guard_machine(factory: Factory) -> type[RuleBasedStateMachine]:
    """The machine over the guards that ``factory`` makes."""

    class GuardMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            pool = self.pool = PoolDriver(factory, "GUARD-*")
            pool.use(pool.call(pool.harness, "budgeted", _BUDGETS[0]), "view")
            self.guards = [_Guard(pool.view, 8)]
            for name, budget in (("one", _BUDGETS[1]), ("two", _BUDGETS[2])):
                guard = pool.call(pool.harness, "guard_over", pool.view, budget)
                pool.name(guard, name)
                self.guards.append(_Guard(guard, budget or 8))
            self.leases: list[_Lease] = []
            self.now = 0.0

        def teardown(self) -> None:
            for lease in self.leases:
                with suppress(Exception):  # or it is told in the log (GUARD-9)
                    lease.lease.release()
            super().teardown()

        def blocks(self, picks: list[int]) -> list[int]:
            return [self.pool.blocks[i] for i in picks]

        def is_allowed(self, guard: _Guard, blocks: list[int]) -> bool | None:
            """Whether the budget has room; None where it is used up by others already."""
            held = set().union(*(one.held for one in self.guards))
            if len(held) > guard.budget:
                return None
            return len(held | set(blocks)) <= guard.budget

        @rule(number=guards, picks=picks)
        def touch(self, number: int, picks: list[int]) -> None:
            one, blocks = self.guards[number], self.blocks(picks)
            is_allowed = self.is_allowed(one, blocks)
            if is_allowed:
                self.pool.call(one.guard, "touch_blocks", blocks)
                one.plain.update(blocks)
            elif is_allowed is False:
                self.refused(PinBudgetExceeded, one, "touch_blocks", blocks, "GUARD-5")

        @rule(number=guards, picks=picks)
        def free(self, number: int, picks: list[int]) -> None:
            one, blocks = self.guards[number], self.blocks(picks)
            if Counter(blocks) - one.plain:
                self.refused(BlockNotHeldError, one, "free_blocks", blocks, "GUARD-10")
                blocks = list((Counter(blocks) & one.plain).elements())
            self.pool.call(one.guard, "free_blocks", blocks)
            one.plain -= Counter(blocks)

        @rule(number=guards, picks=picks, wrong=st.sampled_from([-1, 10**9, True]))
        def name_what_is_no_block(self, number: int, picks: list[int], wrong: int) -> None:
            one, blocks = self.guards[number], self.blocks(picks)
            for method in ("touch_blocks", "free_blocks", "lease"):
                self.refused(UnknownBlockError, one, method, [*blocks, wrong], "GUARD-1")

        def refused(
            self, error: type[Exception], one: _Guard, method: str, blocks: list[int], law: str
        ) -> None:
            self.pool.refused(error, one.guard, method, blocks, law=law)

        @rule(number=guards, picks=picks, ttl=st.sampled_from([None, 2, 5, 9]))
        def lease(self, number: int, picks: list[int], ttl: float | None) -> None:
            one, blocks = self.guards[number], self.blocks(picks)
            is_allowed = self.is_allowed(one, blocks)
            if is_allowed:
                lease = self.pool.call(one.guard, "lease", blocks, ttl=ttl)
                self.pool.name(lease, f"lease_{len(self.leases)}")
                deadline = None if ttl is None else self.now + ttl
                self.leases.append(_Lease(lease, number, blocks, deadline))
                one.leased.update(blocks)
            elif is_allowed is False:
                self.refused(PinBudgetExceeded, one, "lease", blocks, "GUARD-5")

        def ended(self, lease: _Lease) -> None:
            lease.is_active = False
            self.guards[lease.guard].leased -= Counter(lease.blocks)

        @precondition(lambda self: self.leases)
        @rule(picks=picks)
        def release(self, picks: list[int]) -> None:
            lease = self.leases[picks[0] % len(self.leases)]
            got = self.pool.call(lease.lease, "release")
            what = "a lease is released once"
            self.pool.equal(got, lease.is_active, what, "GUARD-2")
            if lease.is_active:
                self.ended(lease)

        @precondition(lambda self: self.leases)
        @rule(picks=picks, ttl=st.sampled_from([1, 4, 12]))
        def renew(self, picks: list[int], ttl: float) -> None:
            lease = self.leases[picks[0] % len(self.leases)]
            if lease.is_active:
                self.pool.call(lease.lease, "renew", ttl)
                lease.deadline = self.now + ttl
            else:
                law = "GUARD-7"
                self.pool.refused(BlockNotHeldError, lease.lease, "renew", ttl, law=law)

        @rule(seconds=st.sampled_from([1, 3, 6]))
        def advance(self, seconds: float) -> None:
            self.pool.call(self.pool.harness, "advance", seconds)
            self.now += seconds
            for one in self.guards:
                self.pool.call(one.guard, "touch_blocks", [])
            for lease in self.leases:
                if lease.is_active and lease.deadline is not None and lease.deadline <= self.now:
                    self.ended(lease)

        @rule()
        def run_full(self) -> None:
            self.pool.held = Counter()
            for one in self.guards:
                self.pool.held += one.held
            self.pool.check_free()

        @invariant()
        def reports_are_right(self) -> None:
            pool = self.pool
            all_held = [one.held for one in self.guards]
            everything = all_held[0] + all_held[1] + all_held[2]
            with pool.unrecorded():
                for number, one in enumerate(self.guards):
                    wanted = all_held[number] if number else everything
                    got = dict(pool.call(one.guard, "held_blocks"))
                    pool.equal(got, dict(wanted), "a guard tells what it holds", "GUARD-10")
                    left = pool.call(one.guard, "num_pinnable_blocks")
                    wanted_left = max(0, one.budget - len(everything))
                    pool.equal(left, wanted_left, "the budget less the blocks held", "GUARD-5")
                for lease in self.leases:
                    is_active = pool.read(lease.lease, "is_active")
                    pool.equal(is_active, lease.is_active, "a lease says if it is over", "GUARD-7")
                if pool.can(Capability.LEAKS):
                    leaks = pool.call(pool.view, "leaks")
                    told = Counter(b for leak in leaks for b in leak.block_ids)
                    pool.equal(told, everything, "leaks tells each reference", "GUARD-11")

    return GuardMachine


def run_guard_machine(factory: Factory) -> None:
    """Search for calls that break a law of the guard.

    Raises:
        LawBroken: With the shortest script found.
    """
    run_machine(lambda: guard_machine(factory))
