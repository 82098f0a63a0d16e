"""The offloading contract as an executable model: dictionaries, counters and the laws.

The model calls no manager. The model computes which key is a hit, which keys a store takes and how
many it evicts, which transfers are in flight, and which events are due. If the contract leaves a
choice to the manager (a page, a victim among several), the model adopts the choice of the manager.
The methods of the model yield tuples: the law, the promise, and whether the promise was kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from kvview.keys import OffloadKey
from kvview.offloading import LookupResult
from kvview.testing.offloading.orders import AnyOrder, Promise
from kvview.testing.results.law_broken import short_repr

Keys = Sequence[OffloadKey]
Change = tuple[str, OffloadKey]
"""A change of the tier: ``("+", key)`` for a stored key, ``("-", key)`` for a removed key."""


class ManagerModel:
    """The state of a manager, as the contract defines it.

    Args:
        capacity: Number of keys that fit.
        make_order: Makes the order of eviction, at the start and at each reset.
        threshold: Number of offers of a key before the key is stored (OFF-12).
        has_pages: Whether specs name pages.
    """

    def __init__(
        self,
        capacity: int,
        make_order: Callable[[], AnyOrder] = AnyOrder,
        *,
        threshold: int = 1,
        has_pages: bool = True,
    ) -> None:
        self.capacity, self.threshold, self.has_pages = capacity, threshold, has_pages
        self.make_order = make_order
        self.order = make_order()
        self.stored: set[OffloadKey] = set()
        """Keys that can be loaded."""
        self.storing: set[OffloadKey] = set()
        self.loads: Counter[OffloadKey] = Counter()
        """Number of loads under way for each stored key."""
        self.late_stores: set[OffloadKey] = set()
        """Keys of stores that were started before a reset and continue (OFF-8)."""
        self.late_loads: Counter[OffloadKey] = Counter()
        self.pages: dict[OffloadKey, int] = {}
        """Pages of stored keys and of all keys in flight."""
        self.offers: Counter[OffloadKey] = Counter()
        self.why: dict[OffloadKey, str] = {}
        """For each key, the law of the last call with it; by default OFF-6."""
        self.advertised: set[OffloadKey] = set()
        """Keys that the events so far advertise."""
        self.due: list[Change] = []
        """Changes since the last call of ``take_events``."""
        self.num_until_reset = 0
        """Number of these changes up to the last reset, including the removals of the reset."""

    # --- the present state ---

    @property
    def late(self) -> set[OffloadKey]:
        """Return the keys that transfers started before a reset still use."""
        return self.late_stores | self.late_loads.keys()

    def answer(self, key: OffloadKey) -> LookupResult:
        """Return the expected result of ``lookup`` (OFF-6)."""
        if key in self.storing:
            return LookupResult.HIT_PENDING
        return LookupResult.HIT if key in self.stored else LookupResult.MISS

    def num_free(self) -> int:
        """Return the number of pages that no key and no transfer uses (OFF-5)."""
        return self.capacity - len(self.stored) - len(self.storing) - len(self.late)

    # --- stores ---

    def new_of(self, offered: Keys) -> list[OffloadKey]:
        """Return the keys that a store takes: not held, not in flight, and offered often enough."""
        taken = self.stored | self.storing | self.late
        enough = self.threshold - 1
        keys = dict.fromkeys(offered)
        return [key for key in keys if key not in taken and self.offers[key] >= enough]

    def may_go(self, offered: Keys) -> set[OffloadKey]:
        """Return the keys that a store of these keys may evict (OFF-1, OFF-3)."""
        return self.stored - self.loads.keys() - set(offered)

    def num_lacking(self, offered: Keys) -> tuple[int, int]:
        """Return the minimum and the maximum number of pages that are missing for a store.

        A transfer started before a reset keeps its page. If specs name no pages, the tier may or
        may not have room for the key of this transfer.
        """
        most = len(self.new_of(offered)) - self.num_free()
        least = most if self.has_pages else most - len(self.late)
        return max(least, 0), max(most, 0)

    def store(
        self, offered: Keys, taken: Keys, evicted: Keys, pages: Sequence[int]
    ) -> Iterator[Promise]:
        """Record the start of a store that the manager accepted."""
        new, may_go = self.new_of(offered), self.may_go(offered)
        least, most = self.num_lacking(offered)
        others = set(new).symmetric_difference(taken)
        law = "OFF-3" if not others else self._why_left_out(min(others))
        yield law, f"keys_to_store are the new keys, in order: {new}", list(taken) == new
        in_flight = self.storing | self.loads.keys()
        yield "OFF-1", "no key in flight is evicted", in_flight.isdisjoint(evicted)
        yield "OFF-3", "no key of the input is evicted", not set(evicted) & set(offered)
        is_held = self.stored.issuperset(evicted) and len(set(evicted)) == len(evicted)
        yield "OFF-6", "each evicted key was held, and is evicted once", is_held
        is_right = least <= len(evicted) <= most
        law = "OFF-12" if not new and self.threshold > 1 else "OFF-5"
        yield law, f"{most} keys are evicted, one for each key that lacks room", is_right
        yield from self.order.replace(new, evicted, may_go)
        for key in evicted:
            self.stored.discard(key)
            self.pages.pop(key, None)
            self.due.append(("-", key))
            self.why[key] = "OFF-6"
        if self.has_pages:
            used = {page for key, page in self.pages.items() if key in self.late}
            yield "OFF-8", "no page of a late transfer is reused", used.isdisjoint(pages)
            used = set(self.pages.values())
            is_own = len(set(pages)) == len(pages) == len(new) and used.isdisjoint(pages)
            yield "OFF-3", "no two new keys share a page", is_own
            self.pages |= dict(zip(new, pages, strict=True))
        self.storing |= set(new)
        self.offers.update(set(offered))
        self.why |= dict.fromkeys(new, "OFF-6")

    def _why_left_out(self, key: OffloadKey) -> str:
        """Return the law by which a store takes or skips a key."""
        if key in self.late:
            return "OFF-8"
        return "OFF-12" if self.threshold > 1 and self.answer(key).name == "MISS" else "OFF-3"

    def is_storing(self, keys: Keys) -> bool:
        """Whether stores of all these keys are in flight (OFF-9)."""
        return (self.storing | self.late_stores).issuperset(keys)

    def end_stores(self, keys: Keys, *, success: bool) -> None:
        """End stores (OFF-4, OFF-6); a store that started before a reset has no effect (OFF-8)."""
        for key in dict.fromkeys(keys):
            if key in self.late_stores:
                self.late_stores.discard(key)
                self.pages.pop(key, None)
                continue
            self.storing.discard(key)
            if success:
                self.stored.add(key)
                self.due.append(("+", key))
            else:
                self.pages.pop(key, None)
                self.order.forget(key)
            self.why[key] = "OFF-6" if success else "OFF-4"

    # --- loads and uses ---

    def load(self, keys: Keys) -> None:
        """Start loads of stored keys, one for each mention (OFF-2)."""
        self.loads.update(keys)

    def is_loading(self, keys: Keys) -> bool:
        """Whether each key has at least as many loads in flight as mentions (OFF-9)."""
        return Counter(keys) <= self.loads + self.late_loads

    def end_loads(self, keys: Keys) -> None:
        """End one load for each mention of a key."""
        for key in keys:
            loads = self.late_loads if key in self.late_loads else self.loads
            loads[key] -= 1
            if not loads[key]:
                del loads[key]
                if loads is self.late_loads:
                    self.pages.pop(key, None)

    def touch(self, keys: Keys) -> None:
        """Use the keys that are held; the first key becomes the most recent."""
        for key in reversed(keys):
            if key in self.stored or key in self.storing:
                self.order.touch(key, is_storing=key in self.storing)

    def reset(self) -> None:
        """Drop every key, the order and the offers; transfers continue (OFF-8)."""
        self.due += [("-", key) for key in sorted(self.stored)]
        self.num_until_reset = len(self.due)
        self.why |= dict.fromkeys(self.stored | self.storing, "OFF-8")
        self.late_stores |= self.storing
        self.late_loads += self.loads
        self.pages = {key: page for key, page in self.pages.items() if key in self.late}
        self.stored, self.storing, self.loads = set(), set(), Counter()
        self.offers.clear()
        self.order = self.make_order()

    # --- events ---

    def take_events(self, got: Sequence[Change]) -> Iterator[Promise]:
        """Compare the events of a call with the changes that are due."""
        for sign, key in got:
            is_turn = (key in self.advertised) == (sign == "-")
            yield "EVENT-1", f"stores and removals of {short_repr(key)} alternate", is_turn
            self.advertised.symmetric_difference_update([key])
        before, due = Counter(self.due[: self.num_until_reset]), self.due[self.num_until_reset :]
        start = max(0, len(got) - len(due)) if self.num_until_reset else 0
        extra = Counter(got) - before - Counter(due)
        is_failure = any(sign == "+" and self.why.get(key) == "OFF-4" for sign, key in extra)
        yield "EVENT-4", "a failed store advertises nothing", not is_failure
        if Counter(got[start:]) == Counter(due):
            is_kept = list(got[start:]) == due
            yield "EVENT-3", f"the events are in the order of the changes: {due}", is_kept
        law = "EVENT-5" if self.num_until_reset else "EVENT-2"
        what = "the events advertise the keys that can be loaded"
        yield law, what, self.advertised == self.stored and not extra
        yield "EVENT-2", f"the events report exactly these changes: {due}", list(got[start:]) == due
        self.due.clear()
        self.num_until_reset = 0
