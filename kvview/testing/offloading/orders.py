"""The eviction orders that the offloading contract defines: LRU, and ARC as published.

An order contains the held keys with the time of their last use. An order receives the victims that
a manager chose, and yields for each promise whether the promise was kept. A manager that declares
neither order may evict any key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from kvview.keys import OffloadKey

Promise = tuple[str, str, bool]
"""A law, a promise of the law, and whether the promise was kept."""


def oldest(uses: Mapping[OffloadKey, int], may_go: Collection[OffloadKey]) -> list[int]:
    """Return the times of the last uses of the keys that may be evicted, the oldest first."""
    return sorted(uses[key] for key in may_go if key in uses)


class AnyOrder:
    """No defined order: every key that is not in flight may be evicted."""

    def replace(
        self,
        new: Sequence[OffloadKey],
        victims: Sequence[OffloadKey],
        may_go: Collection[OffloadKey],
    ) -> Iterator[Promise]:
        """Replace victims, each of which must be a key that may be evicted, by new keys."""
        yield from ()

    def touch(self, key: OffloadKey, *, is_storing: bool) -> None:
        """Use a key that is held."""

    def forget(self, key: OffloadKey) -> None:
        """Drop a key whose store failed (OFF-4)."""


class LRUOrder(AnyOrder):
    """The order that evicts the least recently used key first (OFF-10).

    The new keys of one call have the same time, so they may be evicted in any order.
    """

    def __init__(self) -> None:
        self.now = 0
        self.last_use: dict[OffloadKey, int] = {}

    def replace(
        self,
        new: Sequence[OffloadKey],
        victims: Sequence[OffloadKey],
        may_go: Collection[OffloadKey],
    ) -> Iterator[Promise]:
        """Evict the least recently used keys, and use the new keys."""
        ages = [self.last_use[key] for key in victims]
        expected = oldest(self.last_use, may_go)[: len(victims)]
        what = "the keys whose last use is longest ago are evicted, oldest first"
        yield "OFF-10", what, ages == expected
        for key in victims:
            del self.last_use[key]
        self.now += 1
        self.last_use |= dict.fromkeys(new, self.now)

    def touch(self, key: OffloadKey, *, is_storing: bool) -> None:
        """Use a key that is held."""
        self.now += 1
        self.last_use[key] = self.now

    def forget(self, key: OffloadKey) -> None:
        """Drop a key whose store failed."""
        del self.last_use[key]


class ARCOrder(AnyOrder):
    """Adaptive replacement as published (OFF-11), with the names of the paper.

    T1 has the keys used once, T2 the keys used again; B1 and B2 remember the keys that were evicted
    from T1 and T2. The paper defines every victim as long as new keys come one at a time, the
    published victim is not in flight, and no store fails after an eviction. In all other cases
    ``is_exact`` becomes False, and the manager may choose between T1 and T2. Within each list the
    least recently used key is still evicted first. If a key is evicted in such a case and stored
    again, it may be in either list until it is touched.

    Args:
        c: Keys that fit.

    Source: N. Megiddo, D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache",
    FAST '03, figure 4.
    """

    def __init__(self, c: int) -> None:
        self.c, self.p = c, 0.0
        self.t1: dict[OffloadKey, int] = {}
        self.t2: dict[OffloadKey, int] = {}
        self.b1: list[OffloadKey] = []  # the oldest key first, as in B2
        self.b2: list[OffloadKey] = []
        self.open: set[OffloadKey] = set()
        """Held keys that may be either in T1 or in T2."""
        self.evicted: set[OffloadKey] = set()
        self.is_exact = True
        self.now = 0

    def replace(
        self,
        new: Sequence[OffloadKey],
        victims: Sequence[OffloadKey],
        may_go: Collection[OffloadKey],
    ) -> Iterator[Promise]:
        """Evict as published or, if not exact, the least recently used keys of each list."""
        yield from self._in_order_of_use(victims, may_go)
        is_full = len(self.t1) + len(self.t2) == self.c
        if (len(new) > 1 and (victims or self.b1 or self.b2)) or (victims and not is_full):
            self.is_exact = False
        enters, has_ghost = self.t1, True
        if self.is_exact and len(new) == 1:
            enters = self.t2 if new[0] in self.b1 or new[0] in self.b2 else self.t1
            has_ghost = enters is self.t2 or len(self.t1) < self.c
            published = self._make_room(new[0])
            self.is_exact = set(published).issubset(may_go)
            is_kept = not self.is_exact or set(victims).issubset(published)
            yield "OFF-11", f"the published algorithm evicts one of {published}", is_kept
        self._evict(victims, has_ghost=has_ghost)
        self._enter(new, enters)

    def _in_order_of_use(
        self, victims: Sequence[OffloadKey], may_go: Collection[OffloadKey]
    ) -> Iterator[Promise]:
        for name, uses in (("once", self.t1), ("again", self.t2)):
            ages = [uses[key] for key in victims if key in uses]
            is_kept = ages == oldest(uses, may_go)[: len(ages)]
            what = f"of the keys used {name}, the key used longest ago is evicted first"
            yield "OFF-11", what, is_kept

    def _evict(self, victims: Sequence[OffloadKey], *, has_ghost: bool) -> None:
        for key in victims:
            for uses, ghosts in ((self.t1, self.b1), (self.t2, self.b2)):
                if uses.pop(key, None) and has_ghost:
                    ghosts.append(key)
        self.open -= set(victims)
        self.evicted |= set(victims)

    def _enter(self, new: Sequence[OffloadKey], enters: dict[OffloadKey, int]) -> None:
        self.b1, self.b2 = ([key for key in b if key not in new] for b in (self.b1, self.b2))
        self.now += 1
        for key in new:
            if self.is_exact or key not in self.evicted:
                enters[key] = self.now
            else:
                self.open.add(key)

    def _make_room(self, x: OffloadKey) -> list[OffloadKey]:
        """Apply cases II to IV of figure 4; returns keys of which one must be the victim."""
        t1, t2, b1, b2, c = self.t1, self.t2, self.b1, self.b2, self.c
        num_known = len(t1) + len(t2) + len(b1) + len(b2)
        if x in b1:
            self.p = min(self.p + max(len(b2) / len(b1), 1), c)
        elif x in b2:
            self.p = max(self.p - max(len(b1) / len(b2), 1), 0)
        elif len(t1) == c:
            return _first(t1)
        elif len(t1) + len(b1) == c:
            del b1[0]
        elif num_known < c:
            return []
        elif num_known == 2 * c:
            del b2[0]
        is_large = len(t1) > self.p or (x in b2 and len(t1) == self.p)
        return _first(t1 if t1 and is_large else t2)

    def touch(self, key: OffloadKey, *, is_storing: bool) -> None:
        """Use a key that is held; a use during its store still counts as the first use."""
        self.now += 1
        if key in self.t1 and is_storing:
            self.t1[key] = self.now
        elif key not in self.open or not is_storing:
            self.t1.pop(key, None)
            self.open.discard(key)
            self.t2[key] = self.now

    def forget(self, key: OffloadKey) -> None:
        """Drop a key whose store failed; the paper does not cover failures."""
        self.is_exact = self.is_exact and not (self.b1 or self.b2)
        self.t1.pop(key, None)
        self.t2.pop(key, None)
        self.open.discard(key)


def _first(uses: Mapping[OffloadKey, int]) -> list[OffloadKey]:
    """The least recently used keys, which are several if one call stored them together."""
    return [key for key, time in uses.items() if time == min(uses.values())]
