"""The guard contract as an executable model: owners, budgets and a clock over the pool's model.

The model uses no guard. The model computes which references each guard and view has, how many
blocks may still be held, and every row of ``leaks`` and ``stats``.
The model allows every choice that the contract leaves open: whether a touch without a new block
succeeds while other views hold more than the budget, and the order in which ``free_all`` releases
blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from typing_extensions import override

from kvview.testing.pool.model import PoolModel

Since = tuple[float, str | None]
"""The time at which a reference was taken, and the request that the engine had set."""

Row = tuple[int, int, Since]
"""A reference in a leak report: the guard, the block, and the time (GUARD-7)."""


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
        self.since: dict[int, dict[int, Since]] = {}
        """Time at which each guard took its first reference on each block."""
        self.stats: dict[int, Counter[str]] = {}

    def add_guard(self, below: int, budget: int | None) -> int:
        """Add a guard over a view; the smallest of several budgets counts (GUARD-3)."""
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
        """Return a view and the guards over it (GUARD-6)."""
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
    def held_through(self, view: int) -> Counter[int]:
        """Return the references of a view, including references of the guards over it."""
        return sum((self.held[at] for at in self.tree(view)), Counter[int]())

    def _owner(self, refs: Counter[int]) -> int | None:
        """Return the guard to which an account belongs; None for a plain view or the engine."""
        return next((at for at in self.stats if self.held[at] is refs), None)

    @override
    def take(self, blocks: Sequence[int], refs: Counter[int]) -> None:
        at = self._owner(refs)
        real = [block for block in blocks if block != self.null]
        if at is not None:
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
            self.since[at] = {b: then for b, then in self.since[at].items() if refs[b]}

    # --- the budget (GUARD-3) ---

    def pinned(self) -> set[int]:
        """Return the blocks that any open view or guard of the pool holds."""
        held = [refs for at, refs in enumerate(self.held) if at not in self.closed]
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

    def free_all(self, at: int, place: Sequence[int]) -> None:
        """Release every reference of a guard and of the guards over it, and close them (GUARD-7).

        Args:
            at: The guard.
            place: The order in which the blocks joined the queue, which is the engine's choice.
        """
        tree = self.tree(at)
        self.closed |= self.closing(at)
        for block in dict.fromkeys([*place, *self.blocks]):
            for refs in (self.held[guard] for guard in tree):
                self.give([block] * refs[block], refs)

    # --- reports (GUARD-7) ---

    def rows(self, at: int) -> Iterator[Row]:
        """Yield each reference that ``leaks`` of a guard reports, also of guards over it."""
        for guard in self.tree(at):
            for block, times in self.held[guard].items():
                for _ in range(times):
                    yield guard, block, self.since[guard][block]
