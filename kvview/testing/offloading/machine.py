"""The state machine of the offloading contract: calls on a manager and on its model."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize

from kvview.errors import KeyNotLoadableError, TransferNotInFlightError
from kvview.keys import OffloadKey, make_offload_key
from kvview.offloading import OffloadingManager, PrepareStoreOutput, ReqContext
from kvview.testing.offloading.model import ManagerModel
from kvview.testing.offloading.orders import AnyOrder, ARCOrder, LRUOrder
from kvview.testing.results.law_broken import short_repr
from kvview.testing.suites.capability import Capability as C
from kvview.testing.suites.conformance import (
    ContractMachine,
    Needs,
    observable,
    of_state,
    operation,
)

_SIZES = (2, 1, 3, 5, 5, 8, 8, 8, 12, 12, 12, 20, 40, 300)
_GROUPS = (0, 1, 258)
_MOST_LOOKUPS = 40
_MOST_USES = 120
# Neighbouring keys share a block hash in several groups.
KEYS = [make_offload_key(b"k%d" % at, group) for at in range(320) for group in _GROUPS]

Keys = Sequence[OffloadKey]
KeyLists = st.SearchStrategy[list[OffloadKey]]


def _uses(most: int, fewest: int) -> KeyLists:
    """Return lists of keys that are used one after another, from few or from many keys."""
    return st.lists(st.sampled_from(KEYS[:most]), min_size=fewest, max_size=_MOST_USES)


USES = st.one_of(*(_uses(most, fewest) for most in (4, 7, 16, 40) for fewest in (0, 60)))


class OffloadingMachine(ContractMachine):
    """Makes the calls of an engine on one manager, and compares all results with the model."""

    laws = (
        *(f"OFF-{number}" for number in (1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12)),
        *(f"EVENT-{number}" for number in range(1, 6)),
    )
    needs: ClassVar[Needs] = {
        "OFF-10": (C.LRU,),
        "OFF-11": (C.ARC,),
        "OFF-12": (C.STORE_THRESHOLD,),
        "EVENT-1": (C.EVENTS,),
        "EVENT-2": (C.EVENTS,),
        "EVENT-3": (C.EVENTS,),
        "EVENT-4": (C.EVENTS,),
        "EVENT-5": (C.EVENTS, C.RESETS),
    }

    @initialize(
        capacity=st.sampled_from(_SIZES),
        threshold=st.sampled_from((1, 1, 1, 1, 2, 3)),
        most=st.sampled_from((1, 3, 3, 6, 12, 42)),
        used=USES,
    )
    def start(self, capacity: int, threshold: int, most: int, used: Keys) -> None:
        """Make a manager, and use some keys one after another.

        Args:
            capacity: Number of keys that fit.
            threshold: Number of offers of a key before the key is stored.
            most: Maximum number of keys that one call names, and that one rule draws.
            used: The keys that are used.
        """
        suite: Any = self.suite
        self.context = ReqContext("r")
        self.begin_operation("OFF-3")
        self.manager: OffloadingManager
        if self.can(C.STORE_THRESHOLD):
            self.manager = self.call(suite, "with_threshold", capacity, threshold)
        else:
            threshold = 1
            self.manager = self.call(suite, "make", capacity)
        make_order: Any = partial(ARCOrder, capacity) if self.can(C.ARC) else AnyOrder
        self.model = ManagerModel(
            capacity,
            LRUOrder if self.can(C.LRU) else make_order,
            threshold=threshold,
            has_pages=self.can(C.PAGES),
        )
        self.most = min(most, capacity + 2)
        self.keys = KEYS[: 3 * capacity + 4]
        self.num_fresh = 0
        self.num_compared = 0
        self.recent: deque[OffloadKey] = deque(maxlen=max(16, capacity))
        """Keys that recent calls named."""
        self.evicted: deque[OffloadKey] = deque(maxlen=2 * capacity)
        self.results: deque[tuple[Any, str]] = deque(maxlen=6)
        """Results of recent calls, with a copy of their content at the time of the call."""
        self.use(used)

    # --- the keys of calls ---

    def some(self, among: Collection[OffloadKey]) -> KeyLists:
        """Return lists of different keys of a collection, sometimes of all."""
        found = sorted(among)
        some = st.lists(st.sampled_from(found), min_size=1, max_size=self.most, unique=True)
        return some | st.just(found[: self.most])

    def any_keys(self) -> KeyLists:
        """Return lists of keys in one or two states."""
        model = self.model
        states = (self.keys, self.recent, model.stored, model.storing, model.late, self.evicted)
        pools = [st.sampled_from(sorted(keys)) for keys in (*states, model.loads) if keys]
        pairs = st.tuples(st.sampled_from(pools), st.sampled_from(pools))
        return pairs.flatmap(
            lambda pair: st.lists(pair[0] | pair[1], min_size=1, max_size=2 * self.most)
        )

    def fresh(self, number: int) -> list[OffloadKey]:
        """Return keys that no call has named."""
        self.num_fresh += number
        return [make_offload_key(b"new%d" % (self.num_fresh - at), 0) for at in range(number)]

    def wanted(self, number: int) -> list[OffloadKey]:
        """Return new keys that are stored at their next offer, because it reaches the threshold."""
        keys = self.fresh(number)
        for _ in range(self.model.threshold - 1):
            self.offer(keys)
        return keys

    # --- calls on manager and model ---

    def offer(self, keys: Keys) -> bool:
        """Call ``prepare_store``; returns whether the manager accepted it."""
        self.recent.extend(keys)
        lacking = self.model.num_lacking(keys)[1]
        may_go = self.model.may_go(keys)
        output = self.call(self.manager, "prepare_store", list(keys), self.context)
        if output is None:
            what = f"prepare_store makes room: {len(may_go)} keys may go, {lacking} lack room"
            law = "OFF-3" if lacking else "OFF-5"
            self.true(lacking > len(may_go), what, None, "an output", law)
            self.model.why |= dict.fromkeys(keys, "OFF-3")
            return False
        is_output = isinstance(output, PrepareStoreOutput)
        self.true(is_output, "prepare_store returns an output", output, "one", "OFF-3")
        taken, evicted = list(output.keys_to_store), list(output.evicted_keys)
        spec: Any = output.store_spec
        pages = list(spec.block_ids) if self.can(C.PAGES) else []
        self.results.append((output, repr(output)))
        self.judge(self.model.store(keys, taken, evicted, pages), output)
        self.evicted.extend(evicted)
        return True

    def end_stores(self, keys: Keys, *, success: bool) -> None:
        """Call ``complete_store``, for a single success with the default argument."""
        if not self.model.late.isdisjoint(keys):
            self.begin_operation("OFF-8")
        more: dict[str, Any] = {} if success and len(keys) == 1 else {"success": success}
        if keys:
            self.call(self.manager, "complete_store", list(keys), self.context, **more)
            self.model.end_stores(keys, success=success)

    def begin_load(self, keys: Keys) -> None:
        """Call ``prepare_load``."""
        if not keys:
            return
        spec = self.call(self.manager, "prepare_load", tuple(keys), self.context)
        self.model.load(keys)
        if self.can(C.PAGES):
            self.results.append((spec, repr(spec)))
            expected = [self.model.pages[key] for key in keys]
            what = "a load names the page of each key, in order"
            self.equal(list(spec.block_ids), expected, what, "OFF-2")

    def end_loads(self, keys: Keys) -> None:
        """Call ``complete_load``."""
        if not self.model.late.isdisjoint(keys):
            self.begin_operation("OFF-8")
        if keys:
            self.call(self.manager, "complete_load", list(keys), self.context)
            self.model.end_loads(keys)

    def use(self, keys: Keys) -> None:
        """Let requests use keys, one after another, by a touch or by a completed store."""
        self.recent.extend(keys)
        for key in keys:
            if key in self.model.stored:
                self.call(self.manager, "touch", [key], self.context)
                self.model.touch([key])
            elif self.offer([key]) and key in self.model.storing:
                self.end_stores([key], success=True)

    # --- rules ---

    @operation("OFF-3", keys=of_state(lambda m: m.any_keys()))
    def store(self, keys: Keys) -> None:
        """Offer new, held and repeated keys, and keys in flight."""
        self.offer(keys)

    @operation(
        "OFF-4",
        when=lambda m: m.model.storing or m.model.late_stores,
        keys=of_state(lambda m: m.some(m.model.storing | m.model.late_stores)),
        success=st.booleans(),
    )
    def finish_store(self, keys: Keys, success: bool) -> None:
        """Complete some stores, of one call or of several calls."""
        self.end_stores(keys, success=success)

    @operation(
        "OFF-2",
        when=lambda m: m.model.stored,
        keys=of_state(lambda m: m.some(m.model.stored)),
        is_repeated=st.booleans(),
    )
    def load(self, keys: Keys, is_repeated: bool) -> None:
        """Load some keys, sometimes one of them twice."""
        self.begin_load([*keys, *keys[:is_repeated]])

    @operation(
        "OFF-1",
        when=lambda m: m.model.loads or m.model.late_loads,
        keys=of_state(lambda m: m.some(m.model.loads + m.model.late_loads)),
    )
    def finish_load(self, keys: Keys) -> None:
        """Complete some loads, of one call or of several calls."""
        self.end_loads(keys)

    @operation("OFF-6", keys=of_state(lambda m: m.any_keys()))
    def touch(self, keys: Keys) -> None:
        """Touch keys that are held or not held, sometimes one of them twice."""
        self.call(self.manager, "touch", tuple(keys), self.context)
        self.model.touch(keys)

    @operation("OFF-3", keys=USES)
    def use_keys(self, keys: Keys) -> None:
        """Use new, held, and recently evicted keys, one after another."""
        self.use(keys)

    @operation(
        "OFF-1",
        num_idle=st.sampled_from((1, 0, 2, 8)),
        num_new=st.sampled_from((1, 2, 8)),
        is_loaded=st.booleans(),
    )
    def squeeze(self, num_idle: int, num_new: int, is_loaded: bool) -> None:
        """Load all keys except a few, store new keys in the remaining room, and store again."""
        idle = sorted(self.model.may_go([]))
        busy = idle[num_idle:]
        self.begin_load(busy)
        keys = self.wanted(num_new) + self.fresh(self.model.threshold - 1)
        is_stored = self.offer(keys + busy[:2])
        if is_loaded:
            self.end_loads(busy)
        if not is_stored:
            self.offer(keys)

    @operation(
        "OFF-5",
        success=st.booleans(),
        num_kept=st.sampled_from((0, 1, 2)),
        num_more=st.sampled_from((0, 1)),
    )
    def replace_keys(self, success: bool, num_kept: int, num_more: int) -> None:
        """Complete all transfers, replace all keys except a few, and offer one more key."""
        self.end_all(success)
        kept = sorted(self.model.stored)[:num_kept]
        self.offer(kept + self.wanted(self.model.capacity - len(kept) + num_more))
        self.offer(self.wanted(1))

    def end_all(self, success: bool) -> None:
        """Complete all transfers."""
        self.end_stores(sorted(self.model.late_stores), success=not success)
        self.end_stores(sorted(self.model.storing), success=success)
        self.end_loads(sorted((self.model.loads + self.model.late_loads).elements()))

    @operation(
        "OFF-9",
        method=st.sampled_from(("prepare_load", "complete_load", "complete_store")),
        keys=of_state(lambda m: m.any_keys()),
        success=st.booleans(),
    )
    def be_refused(self, method: str, keys: Keys, success: bool) -> None:
        """Load keys of which some are not ready, or complete transfers that are not in flight."""
        model = self.model
        is_right, error, law = {
            "prepare_load": (model.stored.issuperset(keys), KeyNotLoadableError, "OFF-2"),
            "complete_load": (model.is_loading(keys), TransferNotInFlightError, "OFF-9"),
            "complete_store": (model.is_storing(keys), TransferNotInFlightError, "OFF-9"),
        }[method]
        more = {"success": success} if method == "complete_store" else {}
        if not is_right:
            self.refused(error, self.manager, method, list(keys), self.context, law=law, **more)
            model.why |= dict.fromkeys(keys, law)

    @operation("OFF-8", C.RESETS, is_idle=st.booleans())
    def reset(self, is_idle: bool) -> None:
        """Reset the manager, sometimes without transfers in flight."""
        if is_idle:
            self.end_all(success=True)
        self.begin_operation("OFF-8")
        self.call(self.manager, "reset")
        self.model.reset()

    @operation("EVENT-2", C.EVENTS)
    def take_events(self) -> None:
        """Compare the events since the last call with the changes that are due."""
        changes = []
        for event in list(self.call(self.manager, "take_events")):
            is_name = isinstance(event.medium, str) and event.medium != ""
            self.true(is_name, "an event names a medium", event, "a name", "EVENT-1")
            changes += [("-" if event.removed else "+", key) for key in event.keys]
        self.judge(self.model.take_events(changes), changes)

    # --- observables ---

    @observable("OFF-6")
    def lookup(self) -> None:
        """Compare ``lookup`` for recent keys and some others, which change from call to call."""
        self.num_compared += 1
        step = 1 + len(self.keys) // _MOST_LOOKUPS
        for key in dict.fromkeys([*self.recent, *self.keys[self.num_compared % step :: step]]):
            got = self.call(self.manager, "lookup", key, self.context)
            expected = self.model.answer(key)
            if got != expected:
                what = f"lookup of {short_repr(key)} returns {expected.name}"
                self.equal(got, expected, what, self.model.why.get(key, "OFF-6"))

    @observable("OFF-2")
    def earlier_results(self) -> None:
        """Compare earlier results with their copies, because a transfer may still read them."""
        for result, text in self.results:
            self.equal(repr(result), text, "a result does not change after its call")
