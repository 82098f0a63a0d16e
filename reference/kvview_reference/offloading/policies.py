"""Replacement policies, which choose the keys that are evicted.

A policy only orders keys; the manager handles pages, pins and events. Each call receives a batch of
keys, such as the keys of a request, so that the work is done in C code.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from heapq import heappop, heappush
from itertools import islice
from math import floor
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

from kvview import ConfigError, OffloadKey
from kvview.errors import one_line
from kvview.targets import load_target

Keys = Sequence[OffloadKey]
"""Keys of one request, in prefix order."""


class InFlight(NamedTuple):
    """Held keys that transfers use now, so they must not be evicted."""

    loading: Set[OffloadKey]
    storing: Set[OffloadKey]


@runtime_checkable
class CachePolicy(Protocol):
    """Orders the keys of one tier for eviction.

    1. A key is held from ``admit`` until it is a victim or is removed.
    2. A key in flight **must not** become a victim. ``release`` is called when the key may be a
       victim again, so a policy need not examine the key earlier.
    3. The first key of a batch is the most recent: batches are in prefix order,
       and a chain is evicted from its tail.
    """

    def admit(self, keys: Keys, num_victims: int, in_flight: InFlight, /) -> list[OffloadKey]:
        """Choose and drop victims, then add new keys.

        Args:
            keys: Keys that are not held yet, without duplicates; none of these may be a victim.
            num_victims: Number of keys to evict; at least as many held keys are not in flight.
            in_flight: Keys that must not be evicted.

        Returns:
            The victims, first evicted first.
        """
        ...

    def touch(self, keys: Keys, in_flight: InFlight, /) -> None:
        """Count one use of each held key; uses during its store count as its first use."""
        ...

    def release(self, keys: Iterable[OffloadKey], /) -> None:
        """Record that keys are no longer in flight; their recency does not change."""
        ...

    def remove(self, keys: Iterable[OffloadKey], /) -> None:
        """Drop held keys whose store failed or whose bytes are lost, as if never stored."""
        ...


@runtime_checkable
class SupportsLeftovers(Protocol):
    """A policy that keeps its keys in dicts, which are freed in pieces when they are unused."""

    def leftovers(self) -> Iterable[dict[Any, Any]]:
        """Return all dicts that hold many keys."""
        ...


class RecencyOrder:
    """Keys in the order of their last use; the oldest key is removed in constant amortised time.

    If a key in flight is the oldest key, it is set aside, so that later calls need not skip it
    again. A key that is set aside is older than all keys in ``order``, and is popped before them
    once it is released.
    """

    def __init__(self) -> None:
        self.order: OrderedDict[OffloadKey, None] = OrderedDict()
        self.aside: dict[OffloadKey, int] = {}  # the numbers grow with recency
        self._waiting: set[OffloadKey] = set()  # of those aside: not released yet
        self._released: list[tuple[int, OffloadKey]] = []  # of those aside: a heap
        self._next_number = 0
        self._newest: list[OffloadKey] = []  # entered last; none was used or released

    def __len__(self) -> int:
        return len(self.order) + len(self.aside)

    def leftovers(self) -> Iterable[dict[Any, Any]]:
        """Return all dicts that hold many keys."""
        return (self.order,)

    def enter(self, keys: Keys) -> None:
        """Add keys that are missing, as the most recent keys."""
        order = self.order
        for key in reversed(keys):
            order[key] = None
        self._newest = list(keys)

    def without_newest(self, keys: Keys) -> Keys:
        """Return the keys that the caller must move when ``keys`` are used.

        The keys of a request are mostly touched when they are stored. If the last of these keys
        were added just before, they are already in their places. This saves a tenth of the time at
        50,000 blocks.
        """
        newest, self._newest = self._newest, []
        return keys[: -len(newest)] if newest and keys[-len(newest) :] == newest else keys

    def recall(self, keys: Iterable[OffloadKey]) -> None:
        """Put back the ``keys`` that are set aside; the caller then moves them."""
        if self.aside:
            for key in self.aside.keys() & set(keys):
                del self.aside[key]
                self._waiting.discard(key)
                self.order[key] = None

    def remove(self, keys: Iterable[OffloadKey], /) -> None:
        """Remove the ``keys`` that are present."""
        self.recall(keys)
        for key in keys:
            self.order.pop(key, None)

    def pop_oldest(self, limit: int, in_flight: InFlight) -> list[OffloadKey]:
        """Remove up to ``limit`` keys that are not in flight, the oldest key first."""
        loading, storing = in_flight
        popped: list[OffloadKey] = []
        while self._released and len(popped) < limit:
            number, key = heappop(self._released)
            if self.aside.get(key) != number:
                continue  # used since
            if key in loading or key in storing:
                self._waiting.add(key)
            else:
                del self.aside[key]
                popped.append(key)
        order = self.order
        while order and len(popped) < limit:
            oldest = list(islice(order, limit - len(popped)))
            for key in oldest:
                del order[key]
            if not (loading.isdisjoint(oldest) and storing.isdisjoint(oldest)):
                oldest = self._set_aside(oldest, in_flight)
            popped += oldest
        return popped

    def _set_aside(self, keys: list[OffloadKey], in_flight: InFlight) -> list[OffloadKey]:
        """Set aside the keys that are in flight, and return the other keys."""
        in_use = [key for key in keys if key in in_flight.loading or key in in_flight.storing]
        self._waiting.update(in_use)
        for key in in_use:
            self._next_number += 1
            self.aside[key] = self._next_number
        return [key for key in keys if key not in self.aside]

    def release(self, keys: Iterable[OffloadKey], /) -> None:
        """Allow the removal of keys that were set aside because they were in flight."""
        self._newest = []
        if self._waiting:
            for key in self._waiting.intersection(keys):
                self._waiting.remove(key)
                heappush(self._released, (self.aside[key], key))


class LRUPolicy(RecencyOrder):
    """Evicts the least recently used key."""

    def __init__(self, capacity: int) -> None:
        super().__init__()

    def admit(self, keys: Keys, num_victims: int, in_flight: InFlight, /) -> list[OffloadKey]:
        """Choose and drop victims, then add new keys."""
        victims = self.pop_oldest(num_victims, in_flight) if num_victims else []
        self.enter(keys)
        return victims

    def touch(self, keys: Keys, in_flight: InFlight, /) -> None:
        """Count one use of each held key; a use during its store counts as its first use."""
        keys = self.without_newest(keys)
        self.recall(keys)
        order, move_to_end = self.order, self.order.move_to_end
        for key in reversed(keys):
            if key in order:
                move_to_end(key)


class ARCPolicy:
    """Adaptive replacement, which balances keys used once and keys used again.

    1. T1 holds keys used once, and T2 keys used again. B1 and B2 remember keys that were evicted
       from T1 and from T2 (ghosts). These are the names of the paper.
    2. A new key found in B1 raises the target size of T1, and a new key found in B2 lowers it; both
       keys enter T2. Any other new key enters T1, and moves to T2 when it is touched after its
       store.
    3. ``|T1| + |B1|`` is at most the capacity, and all four lists together have at most twice the
       capacity.
    4. The policy first adapts its target to a whole batch, and then makes room. With one key per
       call, the policy is exactly the published algorithm.
    5. A failed store leaves neither a key nor a ghost, but does not revert the target.

    Args:
        capacity: Keys that the tier can hold.

    Source: N. Megiddo, D. S. Modha, "ARC: A Self-Tuning, Low Overhead
    Replacement Cache", FAST '03, figure 4.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0  # p of the paper: the target size of T1
        self._t1, self._t2 = RecencyOrder(), RecencyOrder()
        self._b1: OrderedDict[OffloadKey, None] = OrderedDict()
        self._b2: OrderedDict[OffloadKey, None] = OrderedDict()

    def admit(self, keys: Keys, num_victims: int, in_flight: InFlight, /) -> list[OffloadKey]:
        """Choose and drop victims, then add new keys."""
        b1, b2 = self._b1, self._b2
        again: list[OffloadKey] = []
        found_in_b2 = not b2.keys().isdisjoint(keys)
        if found_in_b2 or not b1.keys().isdisjoint(keys):
            again = [key for key in reversed(keys) if key in b1 or key in b2]
            self._learn(again)
        victims: list[OffloadKey] = []
        if num_victims:
            num_once = len(keys) - len(again)
            victims = self._evict(num_victims, num_once, found_in_b2, in_flight)
        if again:
            t2 = self._t2.order
            for key in again:
                t2[key] = None
            keys = [key for key in keys if key not in t2]
        self._t1.enter(keys)
        self._bound_ghosts()
        return victims

    def touch(self, keys: Keys, in_flight: InFlight, /) -> None:
        """Count one use of each held key; a use during its store counts as its first use."""
        storing = in_flight.storing
        others = self._t1.without_newest(keys)
        if len(others) < len(keys) and keys[-1] in storing:  # with every key that entered with it
            keys = others
        self._t1.recall(keys)
        self._t2.recall(keys)
        t1, t2 = self._t1.order, self._t2.order
        t1_move_to_end, t2_move_to_end = t1.move_to_end, t2.move_to_end
        for key in reversed(keys):
            if key in t1:
                if key in storing:
                    t1_move_to_end(key)
                else:
                    del t1[key]
                    t2[key] = None
            elif key in t2:
                t2_move_to_end(key)

    def release(self, keys: Iterable[OffloadKey], /) -> None:
        """Record that keys are no longer in flight; their recency does not change."""
        self._t1.release(keys)
        self._t2.release(keys)

    def remove(self, keys: Iterable[OffloadKey], /) -> None:
        """Drop held keys whose store failed, as if they had never been stored."""
        self._t1.remove(keys)
        self._t2.remove(keys)

    def leftovers(self) -> Iterable[dict[Any, Any]]:
        """Return all dicts that hold many keys."""
        return self._t1.order, self._t2.order, self._b1, self._b2

    def _learn(self, ghosts: Iterable[OffloadKey]) -> None:
        b1, b2 = self._b1, self._b2
        for key in ghosts:
            if key in b1:
                self._target = min(self._target + max(1.0, len(b2) / len(b1)), self._capacity)
                del b1[key]
            else:
                self._target = max(self._target - max(1.0, len(b1) / len(b2)), 0.0)
                del b2[key]

    def _evict(
        self, num_victims: int, num_once: int, found_in_b2: bool, in_flight: InFlight
    ) -> list[OffloadKey]:
        t1, t2, b1, b2 = self._t1, self._t2, self._b1, self._b2
        surplus = len(t1) - floor(self._target) + (num_once - 1 if num_once else 0)
        if found_in_b2 and len(t1) == self._target:
            surplus += 1
        victims = t1.pop_oldest(min(num_victims, surplus), in_flight)
        missing = num_victims - len(victims)
        from_t2 = t2.pop_oldest(missing, in_flight) if missing else []
        if len(from_t2) < missing:
            victims += t1.pop_oldest(missing - len(from_t2), in_flight)
        for key in victims:
            b1[key] = None
        for key in from_t2:
            b2[key] = None
        return victims + from_t2

    def _bound_ghosts(self) -> None:
        num_t1, num_t2, b1, b2 = len(self._t1), len(self._t2), self._b1, self._b2
        for _ in range(num_t1 + len(b1) - self._capacity):
            b1.popitem(False)
        for _ in range(num_t1 + num_t2 + len(b1) + len(b2) - 2 * self._capacity):
            b2.popitem(False)


PolicyFactory = Callable[[int], CachePolicy]
"""Makes an empty policy for a tier with room for this number of keys."""

_FACTORIES: dict[str, PolicyFactory] = {"lru": LRUPolicy, "arc": ARCPolicy}


def register_policy(name: str, factory: PolicyFactory, *, replace: bool = False) -> None:
    """Register a policy under a name, for every manager that is built afterwards.

    Args:
        name: Value of a manager's ``cache_policy``.
        factory: Makes the policy; called with the capacity in keys, at the start and after each
            reset.
        replace: Whether a registered name may be replaced.

    Raises:
        ConfigError: The name is already registered and ``replace`` is False.
    """
    if name in _FACTORIES and not replace:
        raise ConfigError(f"cache policy {name!r} is registered already; pass replace=True")
    _FACTORIES[name] = factory


def policy_factory(name: str | PolicyFactory) -> PolicyFactory:
    """Return the factory that is registered under a name, or the class of a target (OFF-7).

    Args:
        name: Registered name, ``path/to/file.py:Policy``, ``package.module:Policy``, or a factory.

    Raises:
        ConfigError: The name is unknown (the message lists the known names), or the target cannot
            be imported.
    """
    if callable(name):
        return name
    factory = _FACTORIES.get(name) if isinstance(name, str) else None
    if factory is None and isinstance(name, str) and ":" in name:
        return partial(_build, name, load_target(name))
    if factory is None:
        known = ", ".join(sorted(name for name in _FACTORIES if ":" not in name))
        raise ConfigError(
            f"OFF-7: cache policy {name!r} is unknown; use {known}, or file.py:Policy"
        )
    return factory


def _build(name: str, found: Any, capacity: int) -> CachePolicy:
    """Return the policy class of a target; None if the name is not a target."""
    try:
        policy = found(capacity)
    except TypeError as error:
        why = f"cannot be built from a capacity: {one_line(error)}"
        raise ConfigError(f"OFF-7: cache policy {name!r} {why}") from error
    lacks = [call for call in ("admit", "touch", "release", "remove") if not hasattr(policy, call)]
    if lacks:
        raise ConfigError(f"OFF-7: cache policy {name!r} lacks {', '.join(lacks)}")
    return cast("CachePolicy", policy)
