"""A policy that acts like LRU or ARC, whichever has more hits on a sample of the keys."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any
from zlib import crc32

from kvview import OffloadKey
from kvview_reference.offloading.policies import ARCPolicy, CachePolicy, InFlight, Keys, LRUPolicy

_SAMPLE = 8
"""One of this number of keys is in the miniatures.

With one of 16, the choice at 10,000 blocks was noise.
"""
_AHEAD, _STILL_AHEAD = 1.03, 1.01
"""Ratios of ARC's hits to LRU's at which ARC starts and continues to decide.

They differ, because each change costs hits.
"""
_DECAY = 0.9
"""Weight that old hits keep after as many uses as a miniature has room for keys."""

_NOTHING = InFlight(frozenset(), frozenset())
_Order = OrderedDict[OffloadKey, int]


class LRUOrARCPolicy:
    """Evicts like LRU, or like ARC, which distinguishes keys used once from keys used again.

    1. Both policies are simulated with one eighth of the capacity, on one eighth of the keys, which
       a hash selects. ARC decides while it has more hits in this simulation.
    2. When LRU decides, the least recently used key is evicted. When ARC decides, the oldest key
       that was used once is evicted if the share of such keys is above the target of the simulated
       ARC; otherwise the oldest key that was used again.
    3. A new key that the tier held recently counts as used again.

    Args:
        capacity: Number of keys that the tier can hold.

    Source: C. Waldspurger et al., "Cache Modeling and Optimization using Miniature Simulations",
    ATC '17; M. Qureshi et al., "Adaptive Insertion Policies", ISCA '07 (a duel of policies).
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._once: _Order = OrderedDict()  # to the number of their last use, oldest first
        self._again: _Order = OrderedDict()
        self._aside: dict[OffloadKey, tuple[_Order, int]] = {}  # met in flight
        self._ghosts: OrderedDict[OffloadKey, None] = OrderedDict()
        self._now = 0
        self._newest: list[OffloadKey] = []  # admitted last; none was used or released
        self._duel = _Duel(max(1, capacity // _SAMPLE))

    def admit(self, keys: Keys, num_victims: int, in_flight: InFlight, /) -> list[OffloadKey]:
        """Choose and drop victims, then add new keys."""
        self._duel.use(_sample_of(keys))
        ghosts = self._ghosts
        again = [] if ghosts.keys().isdisjoint(keys) else [key for key in keys if key in ghosts]
        for key in again:
            del ghosts[key]
        victims = self._evict(num_victims, in_flight) if num_victims else []
        for key in victims:
            ghosts[key] = None
        for _ in range(len(ghosts) - self._capacity):
            ghosts.popitem(last=False)
        once = self._once
        for now, key in enumerate(reversed(keys), self._now + 1):
            once[key] = now
        self._now += len(keys)
        for key in reversed(again):
            self._again[key] = once.pop(key)
        self._newest = [] if again else list(keys)
        return victims

    def touch(self, keys: Keys, in_flight: InFlight, /) -> None:
        """Count one use of each held key; a use during its store counts as its first use."""
        newest = self._newest
        self.release(keys)
        once, again, storing = self._once, self._again, in_flight.storing
        # As in RecencyOrder.without_newest, keys that entered with this request are already in
        # their place.
        if newest and keys[-len(newest) :] == newest:
            keys = keys[: -len(newest)]
        sample = _sample_of(keys)
        self._duel.use([k for k in sample if k in again or (k in once and k not in storing)])
        for now, key in enumerate(reversed(keys), self._now + 1):
            if key in again:
                again[key] = now
                again.move_to_end(key)
            elif key in once:
                if key in storing:
                    once[key] = now
                    once.move_to_end(key)
                else:
                    del once[key]
                    again[key] = now
        self._now += len(keys)

    def release(self, keys: Iterable[OffloadKey], /) -> None:
        """Record that keys are no longer in flight; their recency does not change."""
        self._newest = []
        if self._aside:
            self._put_back(self._aside.keys() & set(keys))

    def remove(self, keys: Iterable[OffloadKey], /) -> None:
        """Drop held keys whose store failed, as if they had never been stored."""
        for key in keys:
            self._aside.pop(key, None)
            self._once.pop(key, None)
            self._again.pop(key, None)

    def leftovers(self) -> Iterable[dict[Any, Any]]:
        """Return all dicts that hold many keys."""
        return self._once, self._again, self._ghosts

    def _evict(self, num_victims: int, in_flight: InFlight) -> list[OffloadKey]:
        once, again = self._once, self._again
        share = self._duel.share_used_once
        victims: list[OffloadKey] = []
        while missing := num_victims - len(victims):
            order, num, until = again, missing, self._now
            if not once or not again:
                order = once or again
            elif share is None:
                oldest, oldest_again = next(iter(once.values())), next(iter(again.values()))
                order = once if oldest <= oldest_again else again
                until = max(oldest, oldest_again)
            elif (surplus := len(once) - int(share * self._capacity)) > 0:
                order, num = once, min(missing, surplus)
            victims += self._take(order, num, until, in_flight)
        return victims

    def _take(self, order: _Order, num: int, until: int, in_flight: InFlight) -> list[OffloadKey]:
        """Take at most this number of the oldest keys that were not used later than ``until``."""
        taken: dict[OffloadKey, int] = {}
        for _ in range(min(num, len(order))):
            key, last_use = order.popitem(last=False)
            if last_use > until:
                order[key] = last_use
                order.move_to_end(key, last=False)
                break
            taken[key] = last_use
        loading, storing = in_flight
        if not (loading.isdisjoint(taken) and storing.isdisjoint(taken)):
            for key in [key for key in taken if key in loading or key in storing]:
                self._aside[key] = order, taken.pop(key)
        return list(taken)

    def _put_back(self, keys: Iterable[OffloadKey]) -> None:
        back = [(key, *self._aside.pop(key)) for key in keys]
        for key, order, last_use in sorted(back, key=lambda one: -one[2]):
            order[key] = last_use
            order.move_to_end(key, last=False)


class _Duel:
    """A simulation of LRU and ARC on a sample of all keys, with a smaller capacity.

    Args:
        capacity: Number of keys that each policy holds.
    """

    def __init__(self, capacity: int) -> None:
        self._arc = ARCPolicy(capacity)
        self._of_lru, self._of_arc = (
            _Miniature(policy, capacity) for policy in (LRUPolicy(capacity), self._arc)
        )
        self._capacity = capacity
        self._num_uses = 0
        self._is_arc_ahead = False

    @property
    def share_used_once(self) -> float | None:
        """Share of the keys that ARC reserves for keys used once; None while LRU decides."""
        return self._arc.target / self._capacity if self._is_arc_ahead else None

    def use(self, sample: Keys) -> None:
        """Record uses of keys of the sample."""
        if not sample:
            return
        lru, arc = self._of_lru, self._of_arc
        lru.use(sample)
        arc.use(sample)
        self._num_uses += len(sample)
        if self._num_uses >= self._capacity:
            self._num_uses = 0
            lru.hits *= _DECAY
            arc.hits *= _DECAY
        self._is_arc_ahead = arc.hits > (_STILL_AHEAD if self._is_arc_ahead else _AHEAD) * lru.hits


def _sample_of(keys: Keys) -> Keys:
    return [key for key in keys if not crc32(key) % _SAMPLE]


class _Miniature:
    """A simulated policy, with the keys that it would hold, but without pages."""

    def __init__(self, policy: CachePolicy, capacity: int) -> None:
        self._policy, self._capacity = policy, capacity
        self._held: set[OffloadKey] = set()
        self.hits = 0.0

    def use(self, keys: Keys) -> None:
        """Use keys; each key counts as a hit or is admitted."""
        held = self._held
        hits = [key for key in keys if key in held]
        new = [key for key in keys if key not in held][: self._capacity]
        if hits:
            self.hits += len(hits)
            self._policy.touch(hits, _NOTHING)
        if new:
            num_victims = max(0, len(held) + len(new) - self._capacity)
            held.difference_update(self._policy.admit(new, num_victims, _NOTHING))
            held.update(new)
