"""ARC as published, and random uses of a manager that are compared with it (OFF-11).

Source: N. Megiddo, D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache",
FAST '03, figure 4.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvview.keys import OffloadKey
from kvview.testing.harness import Capability, Factory
from kvview.testing.machines import run_machine
from kvview.testing.offloading.driver import ManagerDriver, key

starts = st.integers(0, 63)  # modulo the number of keys


class PublishedARC:
    """Figure 4, its four cases; the names are the paper's.

    Args:
        c: Keys that fit.
    """

    def __init__(self, c: int) -> None:
        self.c, self.p = c, 0.0
        self.t1: list[OffloadKey] = []  # the least recent first, as in all four
        self.t2: list[OffloadKey] = []
        self.b1: list[OffloadKey] = []
        self.b2: list[OffloadKey] = []

    def holds(self, x: OffloadKey) -> bool:
        """Whether a key is in the cache."""
        return x in self.t1 or x in self.t2

    def hit(self, x: OffloadKey) -> None:
        """Case I."""
        (self.t1 if x in self.t1 else self.t2).remove(x)
        self.t2.append(x)

    def miss(self, x: OffloadKey) -> list[OffloadKey]:
        """Cases II to IV; returns what was evicted."""
        t1, t2, b1, b2, c = self.t1, self.t2, self.b1, self.b2, self.c
        if x in b1 or x in b2:
            if x in b1:
                self.p = min(self.p + max(len(b2) / len(b1), 1), c)
            else:
                self.p = max(self.p - max(len(b1) / len(b2), 1), 0)
            evicted = self._replace(x)
            (b1 if x in b1 else b2).remove(x)
            t2.append(x)
            return evicted
        evicted = []
        if len(t1) + len(b1) == c:
            if len(t1) < c:
                del b1[0]
                evicted = self._replace(x)
            else:
                evicted = [t1.pop(0)]
        elif len(t1) + len(t2) + len(b1) + len(b2) >= c:
            if len(t1) + len(t2) + len(b1) + len(b2) == 2 * c:
                del b2[0]
            evicted = self._replace(x)
        t1.append(x)
        return evicted

    def _replace(self, x: OffloadKey) -> list[OffloadKey]:
        if self.t1 and (len(self.t1) > self.p or (x in self.b2 and len(self.t1) == self.p)):
            self.b1.append(self.t1.pop(0))
            return self.b1[-1:]
        self.b2.append(self.t2.pop(0))
        return self.b2[-1:]


def arc_machine(factory: Factory) -> type[RuleBasedStateMachine]:
    """The machine over the managers that ``factory`` makes."""
    harness = factory()
    num_keys = 3 * harness.capacity
    has_reset = Capability.RESET in harness.capabilities

    class ArcMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.tier = ManagerDriver(factory, "OFF-11")
            self.arc = PublishedARC(self.tier.capacity)

        def use(self, number: int) -> None:
            one = key(number % num_keys)
            if self.arc.holds(one):
                self.arc.hit(one)
                self.tier.touch([one])
                return
            output = self.tier.store(number % num_keys)
            evicted = list(output.evicted_keys)
            self.tier.equal(evicted, self.arc.miss(one), "ARC evicts as published")

        @rule(start=starts, length=st.integers(1, 16))
        def scan(self, start: int, length: int) -> None:
            for number in range(start, start + length):
                self.use(number)

        @rule(picks=st.lists(starts, min_size=1, max_size=8))
        def use_some(self, picks: list[int]) -> None:
            for number in picks:
                self.use(number)

        @precondition(lambda self: self.arc.b1 or self.arc.b2)
        @rule(picks=st.lists(starts, min_size=1, max_size=4))
        def use_what_was_evicted(self, picks: list[int]) -> None:
            for number in picks:
                ghosts = sorted(self.arc.b1 + self.arc.b2)
                self.use(int(ghosts[number % len(ghosts)][1:-4]))

        @precondition(lambda self: has_reset)
        @rule(is_rare=st.sampled_from([False, False, False, True]))
        def reset(self, is_rare: bool) -> None:
            if is_rare:
                self.tier.reset()
                self.arc = PublishedARC(self.tier.capacity)

    return ArcMachine


def run_arc_machine(factory: Factory) -> None:
    """Search for uses after which a manager evicts otherwise.

    Raises:
        LawBroken: With the shortest script found.
    """
    run_machine(lambda: arc_machine(factory))
