"""The guard contract as an executable model: leases, budgets and a clock over the pool's model.

The model uses no guard. The model computes which references each guard, view and lease has, how
many blocks may still be held, which leases a call ends, and every row of ``leaks`` and ``stats``.
The model allows every choice that the contract leaves open: whether a touch without a new block
succeeds while other views hold more than the budget, and the order in which ``free_all`` releases
blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from kvview.testing.pool.model import PoolModel

Since = tuple[float, str | None]
"""The time at which a reference was taken, and the request that the engine had set."""

Row = tuple[int, object, int, Since]
"""A reference in a leak report: the guard, the job, the block, and the time (GUARD-11)."""


@dataclass(eq=False)
class LeaseModel:
    """A lease whose blocks are held.

    Args:
        guard: The guard that made the lease.
        blocks: The held blocks, with one entry per reference, without the null block.
        job: Name of the job in reports.
        since: Time at which the lease was taken.
        deadline: Time at which the lease expires, or None.
    """

    guard: int
    blocks: tuple[int, ...]
    job: object
    since: Since
    deadline: float | None
    is_active: bool = True
    refs: Counter[int] = field(default_factory=Counter)


class GuardModel(PoolModel):
    """The state of a pool and of the guards over it.

    Args:
        num_blocks: Blocks in the pool, the null block included.
        null: The null block, or None.
    """

    def __init__(self, num_blocks: int, null: int | None) -> None:
        super().__init__(num_blocks, null)
        self.seconds = 0.0
        """The time on the clock of the guards."""
        self.request: str | None = None
        """The request that the engine has set (``speak_of``)."""
        self.below: dict[int, int] = {}
        """The view under each guard."""
        self.budgets: dict[int, int | None] = {}
        self.leases: list[LeaseModel] = []
        """Leases whose blocks are held, including ended leases that the engine refused to free."""
        self.since: dict[int, dict[int, Since]] = {}
        """Time at which each guard took its first plain reference on each block."""
        self.stats: dict[int, Counter[str]] = {}

    def add_guard(self, below: int, budget: int | None) -> int:
        """Add a guard over a view; the smallest of several budgets counts (GUARD-5)."""
        at = len(self.held)
        self.add_view()
        limits = [one for one in (budget, self.budgets.get(below)) if one]
        self.below[at], self.budgets[at] = below, min(limits, default=None)
        self.since[at], self.stats[at] = {}, Counter()
        return at

    def guards(self) -> list[int]:
        """Return the open guards, each after the view under it."""
        return [at for at in self.stats if at not in self.closed]

    # --- guards over guards ---

    def tree(self, at: int) -> list[int]:
        """Return a view and the guards over it (GUARD-10)."""
        return [at, *(one for above in self._above(at) for one in self.tree(above))]

    def _above(self, at: int) -> list[int]:
        return [guard for guard, below in self.below.items() if below == at]

    def closing(self, at: int) -> set[int]:
        """Return the views that close with a guard: the views under it, and all their guards."""
        while at in self.below:
            at = self.below[at]
        return set(self.tree(at))

    # --- references ---

    @override
    def accounts(self) -> list[Counter[int]]:
        return [*self.held, *(lease.refs for lease in self.leases)]

    @override
    def held_through(self, view: int) -> Counter[int]:
        """Return the references of a view, including references of its leases and guards."""
        tree = self.tree(view)
        leased = [lease.refs for lease in self.leases if lease.guard in tree]
        return sum((*(self.held[at] for at in tree), *leased), Counter[int]())

    def _owner(self, refs: Counter[int]) -> int | None:
        """Return the guard to which an account belongs; None for a plain view or the engine."""
        leased = ((lease.guard, lease.refs) for lease in self.leases)
        owners = [*((at, self.held[at]) for at in self.stats), *leased]
        return next((at for at, held in owners if held is refs), None)

    @override
    def take(self, blocks: Sequence[int], refs: Counter[int]) -> None:
        at = self._owner(refs)
        real = [block for block in blocks if block != self.null]
        if at is not None and refs is self.held[at]:
            for block in real:
                self.since[at].setdefault(block, (self.seconds, self.request))
        super().take(blocks, refs)
        if at is not None:
            stats = self.stats[at]
            stats["touched"] += len(real)
            stats["peak_held"] = max(stats["peak_held"], stats["touched"] - stats["freed"])

    @override
    def give(self, blocks: Sequence[int], refs: Counter[int], *, to_head: bool = False) -> None:
        super().give(blocks, refs, to_head=to_head)
        at = self._owner(refs)
        if at is not None:
            self.stats[at]["freed"] += sum(block != self.null for block in blocks)
            if refs is self.held[at]:
                self.since[at] = {b: then for b, then in self.since[at].items() if refs[b]}

    # --- the budget (GUARD-5) ---

    def pinned(self) -> set[int]:
        """Return the blocks that any open view, guard or lease of the pool holds."""
        held = [refs for at, refs in enumerate(self.held) if at not in self.closed]
        held += [lease.refs for lease in self.leases if lease.guard not in self.closed]
        return set().union(*held)

    def num_pinnable(self, at: int) -> int | None:
        """Return the number of additional blocks that a guard may hold; None without a budget."""
        budget = self.budgets.get(at)
        return None if budget is None else max(0, budget - len(self.pinned()))

    def may_hold(self, at: int, blocks: Sequence[int]) -> bool | None:
        """Return whether a touch is allowed; None if the law does not decide this."""
        budget, pinned = self.budgets.get(at), self.pinned()
        if budget is None:
            return True
        new = set(blocks) - pinned - {self.null}
        if not new and len(pinned) > budget:
            return None
        return len(pinned | new) <= budget

    # --- leases (GUARD-2, GUARD-3, GUARD-7) ---

    def lease(self, at: int, blocks: Sequence[int], job: object, ttl: float | None) -> LeaseModel:
        """Take a lease."""
        real = tuple(block for block in blocks if block != self.null)
        deadline = None if ttl is None else self.seconds + ttl
        lease = LeaseModel(at, real, job, (self.seconds, self.request), deadline)
        self.leases.append(lease)
        self.take(real, lease.refs)
        self.stats[at].update(leases=1, active_leases=1)
        return lease

    def is_active(self, lease: LeaseModel) -> bool:
        """Whether the lease has not ended and its view is open (GUARD-7)."""
        return lease.is_active and lease.guard not in self.closed

    def end(self, lease: LeaseModel) -> None:
        """Release a lease's references, once (GUARD-2)."""
        if self.is_active(lease):
            lease.is_active = False
            self._give_back(lease)

    def _give_back(self, lease: LeaseModel) -> None:
        self.give(lease.blocks, lease.refs)
        self.leases.remove(lease)
        self.stats[lease.guard]["active_leases"] -= 1

    def free_all(self, at: int, place: Sequence[int]) -> None:
        """Release every reference of a guard and of the guards over it, and close them (GUARD-11).

        Args:
            at: The guard.
            place: The order in which the blocks joined the queue, which is the engine's choice.
        """
        tree = self.tree(at)
        leases = [lease for lease in self.leases if lease.guard in tree]
        self.closed |= self.closing(at)
        accounts = [*(self.held[guard] for guard in tree), *(lease.refs for lease in leases)]
        for block in dict.fromkeys([*place, *self.blocks]):
            for refs in accounts:
                self.give([block] * refs[block], refs)
        for lease in leases:
            lease.is_active = False
            self.leases.remove(lease)
            self.stats[lease.guard]["active_leases"] -= 1

    def expire(self, at: int, *, is_failing: bool = False) -> list[LeaseModel]:
        """End the due leases of a guard, earliest deadline first (GUARD-3).

        If the engine refuses to free their blocks, the leases have ended nevertheless, and the
        blocks stay held until the next attempt (GUARD-8).
        """
        due: list[tuple[float, LeaseModel]] = []
        for lease in self.leases:
            if lease.guard == at and lease.deadline is not None and lease.deadline <= self.seconds:
                due.append((lease.deadline, lease))
        ended = []
        for _, lease in sorted(due, key=lambda pair: pair[0]):
            if lease.is_active:
                lease.is_active = False
                self.stats[at]["expired"] += 1
                ended.append(lease)
            if not (is_failing and lease.blocks):
                self._give_back(lease)
        return ended

    # --- reports (GUARD-11) ---

    def rows(self, at: int) -> Iterator[Row]:
        """Yield each reference that ``leaks`` of a guard reports, also of guards over it."""
        tree = self.tree(at)
        for lease in self.leases:
            if lease.guard in tree:
                for block in lease.blocks:
                    yield lease.guard, lease.job, block, lease.since
        for guard in tree:
            for block, times in self.held[guard].items():
                for _ in range(times):
                    yield guard, None, block, self.since[guard][block]
