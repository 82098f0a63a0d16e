"""ARC as vLLM implements it, for predictions of the hits of a server with this policy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from kvview import OffloadKey
from kvview_reference.offloading.policies import InFlight, Keys

_Order = OrderedDict[OffloadKey, None]


class VLLMARCPolicy:
    """The ARC of vLLM 0.33, which differs from the ARC of the paper.

    1. A new key enters T1, even if a ghost list remembers the key, and moves to T2 when a later
       request uses it.
    2. Victims are taken from T1 while T1 has at least its target size, and otherwise from T2.
    3. Each ghost list remembers as many keys as the tier holds.

    Compared with the paper's ARC, it lost at most 2.2 percentage points of the prompt blocks.

    Args:
        capacity: Keys that the tier can hold.

    Source: ``vllm/v1/kv_offload/cpu/policies/arc.py`` (0.33.0).
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0
        self._once: _Order = OrderedDict()
        self._again: _Order = OrderedDict()
        self._ghosts_once: _Order = OrderedDict()
        self._ghosts_again: _Order = OrderedDict()

    def admit(self, keys: Keys, num_victims: int, in_flight: InFlight, /) -> list[OffloadKey]:
        """Choose and drop victims, then add new keys."""
        self._learn(keys)
        victims = list(self._choose(num_victims, in_flight)) if num_victims else []
        for key in victims:
            is_once = key in self._once
            del (self._once if is_once else self._again)[key]
            (self._ghosts_once if is_once else self._ghosts_again)[key] = None
        for key in reversed(keys):
            self._once[key] = None
        for ghosts in (self._ghosts_once, self._ghosts_again):
            for key in keys:
                ghosts.pop(key, None)
            while len(ghosts) > self._capacity:
                ghosts.popitem(last=False)
        return victims

    def touch(self, keys: Keys, in_flight: InFlight, /) -> None:
        """Count one use of each held key; a use during its store counts as its first use."""
        once, again, storing = self._once, self._again, in_flight.storing
        for key in reversed(keys):
            if key in again:
                again.move_to_end(key)
            elif key in once:
                if key in storing:
                    once.move_to_end(key)
                else:
                    del once[key]
                    again[key] = None

    def release(self, keys: Iterable[OffloadKey], /) -> None:
        """Record that keys are no longer in flight."""

    def remove(self, keys: Iterable[OffloadKey], /) -> None:
        """Drop held keys whose store failed."""
        for key in keys:
            self._once.pop(key, None)
            self._again.pop(key, None)

    def _learn(self, keys: Keys) -> None:
        once, again = self._ghosts_once, self._ghosts_again
        if once.keys().isdisjoint(keys) and again.keys().isdisjoint(keys):
            return
        for key in reversed(keys):
            if key in once:
                step = max(1.0, len(again) / len(once))
                self._target = min(self._target + step, self._capacity)
                once.move_to_end(key)
            elif key in again:
                step = max(1.0, len(once) / len(again))
                self._target = max(self._target - step, 0.0)
                again.move_to_end(key)

    def _choose(self, num_victims: int, in_flight: InFlight) -> Iterator[OffloadKey]:
        """Yield the keys that are not in flight, the next victim first."""
        loading, storing = in_flight
        once, again = (
            (key for key in order if key not in loading and key not in storing)
            for order in (self._once, self._again)
        )
        num_once = len(self._once)
        for _ in range(num_victims):
            found = next(once, None) if num_once >= int(self._target) else None
            if found is None:
                found = next(again, None)
                if found is not None:
                    yield found
                    continue
                found = next(once)
            num_once -= 1
            yield found
