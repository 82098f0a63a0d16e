"""Random moves of a scheduler on an offloading manager, against plain sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvview.keys import OffloadKey
from kvview.offloading import LookupResult
from kvview.testing.harness import Capability, Factory
from kvview.testing.machines import run_machine
from kvview.testing.offloading.driver import ManagerDriver, key, keys

picks = st.lists(st.integers(0, 31), min_size=1, max_size=6)


class TierOracle:
    """What a tier must hold: three sets and two counters."""

    def __init__(self) -> None:
        self.stored: set[OffloadKey] = set()
        self.pending: set[OffloadKey] = set()
        self.loading: Counter[OffloadKey] = Counter()
        self.late_stores: set[OffloadKey] = set()  # in flight since before a reset
        self.late_loads: Counter[OffloadKey] = Counter()
        self.last_use: dict[OffloadKey, int] = {}
        self.now = 0

    @property
    def late(self) -> set[OffloadKey]:
        """Keys that transfers from before a reset still use."""
        return self.late_stores | set(self.late_loads)

    def use(self, used: Sequence[OffloadKey]) -> None:
        """Keys are used at one time."""
        self.now += 1
        self.last_use.update(dict.fromkeys(used, self.now))

    def touch(self, touched: Sequence[OffloadKey]) -> None:
        """Of one call the first is the most recent."""
        for one in reversed(touched):
            self.use([one])

    def reset(self) -> None:
        """Forget; what is in flight goes on."""
        self.late_stores |= self.pending
        self.late_loads += self.loading
        self.stored, self.pending, self.loading = set(), set(), Counter()

    def answer(self, one: OffloadKey) -> LookupResult:
        """What lookup must say."""
        if one in self.pending:
            return LookupResult.HIT_PENDING
        return LookupResult.HIT if one in self.stored else LookupResult.MISS


def offloading_machine(factory: Factory) -> type[RuleBasedStateMachine]:
    """The machine over the managers that ``factory`` makes."""
    harness = factory()
    capabilities = frozenset(harness.capabilities)
    num_keys = min(2 * harness.capacity, 64)
    domain = keys(*range(num_keys))

    class OffloadingMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.tier = ManagerDriver(factory, "OFF-*")
            self.oracle = TierOracle()
            if harness.capacity > 16:  # so that a short run meets evictions
                self.prefill(harness.capacity - 8)

        # Half of the rules are off in a run (swarm testing), and without what these two do
        # at its start most runs would never load a key.
        @initialize(stored=st.integers(0, 8), loading=st.integers(0, 4))
        def begin(self, stored: int, loading: int) -> None:
            self.offer(list(range(stored)) or [0])
            self.finish(list(range(stored)) or [0], success=True)
            if loading:
                self.load(list(range(loading)))

        def prefill(self, num_blocks: int) -> None:
            filler = keys(*range(1000, 1000 + num_blocks))
            output = self.tier.must_offer(filler)
            self.tier.finish(output.keys_to_store)
            self.oracle.stored.update(filler)
            self.oracle.use(filler)

        @rule(picks=picks)
        def offer(self, picks: list[int]) -> None:
            tier, oracle = self.tier, self.oracle
            offered = list(dict.fromkeys(key(i % num_keys) for i in picks))
            held = oracle.stored | oracle.pending
            new = [k for k in offered if k not in held and k not in oracle.late]
            evictable = oracle.stored - set(oracle.loading) - set(offered)
            room = tier.capacity - len(held | oracle.late)
            output = tier.offer(offered)
            if output is None:
                tier.true(
                    room + len(evictable) < len(new),
                    "prepare_store makes room when keys may be evicted",
                    None,
                    f"an output: {room} free, {len(evictable)} evictable",
                    "OFF-3",
                )
                return
            evicted = set(output.evicted_keys)
            tier.equal(list(output.keys_to_store), new, "all new keys are stored", "OFF-3")
            in_flight = sorted(evicted & (oracle.pending | set(oracle.loading)))
            tier.equal(in_flight, [], "no key in flight is evicted", "OFF-1")
            tier.equal(sorted(evicted - oracle.stored), [], "what is evicted was held", "OFF-6")
            if Capability.LRU in capabilities:
                oldest = sorted(oracle.last_use[one] for one in evictable)[: len(evicted)]
                ages = [oracle.last_use[one] for one in output.evicted_keys]
                tier.equal(ages, oldest, "what was used longest ago goes first", "OFF-10")
            oracle.use(new)
            oracle.stored -= evicted
            oracle.pending.update(new)
            total = len(oracle.stored | oracle.pending)
            tier.true(
                total <= tier.capacity, "the capacity holds", total, f"<= {tier.capacity}", "OFF-5"
            )

        @precondition(lambda self: self.oracle.pending)
        @rule(picks=picks, success=st.booleans())
        def finish(self, picks: list[int], success: bool) -> None:
            pending = sorted(self.oracle.pending)
            chosen = list(dict.fromkeys(pending[i % len(pending)] for i in picks))
            self.tier.finish(chosen, success=success)
            self.oracle.pending -= set(chosen)
            if success:
                self.oracle.stored |= set(chosen)

        @rule(picks=picks, success=st.booleans())
        def finish_what_is_not_stored(self, picks: list[int], success: bool) -> None:
            chosen = list(dict.fromkeys(key(i % num_keys) for i in picks))
            if not (self.oracle.pending | self.oracle.late_stores).issuperset(chosen):
                self.tier.no_store(chosen, success=success)

        @precondition(lambda self: self.oracle.stored)
        @rule(picks=picks)
        def load(self, picks: list[int]) -> None:
            stored = sorted(self.oracle.stored)
            chosen = list(dict.fromkeys(stored[i % len(stored)] for i in picks))
            if not self.oracle.late.intersection(chosen):  # whose completion would come first?
                self.tier.load(chosen)
                self.oracle.loading.update(chosen)

        @precondition(lambda self: self.oracle.loading)
        @rule(picks=picks)
        def end_load(self, picks: list[int]) -> None:
            loading = sorted(self.oracle.loading)
            chosen = list(dict.fromkeys(loading[i % len(loading)] for i in picks))
            self.tier.end_load(chosen)
            self.oracle.loading = +(self.oracle.loading - Counter(chosen))

        @rule(picks=picks)
        def end_too_many_loads(self, picks: list[int]) -> None:
            chosen = [key(i % num_keys) for i in picks]
            if Counter(chosen) - self.oracle.loading - self.oracle.late_loads:
                self.tier.no_load(chosen)

        @rule(picks=picks)
        def load_what_is_not_ready(self, picks: list[int]) -> None:
            chosen = [key(i % num_keys) for i in picks]
            if not self.oracle.stored.issuperset(chosen):
                self.tier.not_loadable(chosen)

        @rule(picks=picks)
        def touch(self, picks: list[int]) -> None:
            touched = [key(i % num_keys) for i in picks]
            self.tier.touch(touched)
            self.oracle.touch(touched)

        @precondition(lambda self: Capability.RESET in capabilities)
        @rule(is_rare=st.sampled_from([False, False, False, True]))
        def reset(self, is_rare: bool) -> None:
            if is_rare:
                self.tier.reset()
                self.oracle.reset()

        @precondition(lambda self: self.oracle.late)
        @rule(success=st.booleans())
        def finish_what_is_late(self, success: bool) -> None:
            oracle = self.oracle
            if oracle.late_stores:
                self.tier.finish(sorted(oracle.late_stores), success=success)
            for one in sorted(oracle.late_loads.elements()):
                self.tier.end_load([one])
            oracle.late_stores.clear()
            oracle.late_loads.clear()

        @invariant()
        def lookup_tells_the_truth(self) -> None:
            with self.tier.unrecorded():
                told = {k: self.tier.lookup(k).name for k in domain}
                known = {k: self.oracle.answer(k).name for k in domain}
                self.tier.equal(told, known, "lookup tells the truth", "OFF-6")

        @precondition(lambda self: Capability.EVENTS in capabilities)
        @invariant()
        def advertised_is_loadable(self) -> None:
            with self.tier.unrecorded():
                got = self.tier.advertised()
            self.tier.equal(got, self.oracle.stored, "advertised is what is loadable", "EVENT-2")

    return OffloadingMachine


def run_offloading_machine(factory: Factory) -> None:
    """Search for calls that break a law of the manager.

    Raises:
        LawBroken: With the shortest script found.
    """
    run_machine(lambda: offloading_machine(factory))
