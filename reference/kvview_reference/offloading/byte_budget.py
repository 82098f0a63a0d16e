"""A manager of a tier whose pages differ in size, such as compressed pages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from typing_extensions import override

from kvview import OffloadKey, PrepareStoreOutput, ReqContext
from kvview_reference.offloading.manager import CPUOffloadingManager
from kvview_reference.offloading.policies import PolicyFactory

_SMALLEST_PART = 64
"""The smallest page that counts is this part of the largest, so that the keys are bounded."""


class ByteBudgetManager(CPUOffloadingManager):
    """Tracks keys whose pages together take at most a number of bytes.

    1. The largest size of a page is reserved until :meth:`resize` receives its actual size.

    Args:
        budget: Bytes of all pages together.
        max_bytes: Returns the largest size of each key's page, in bytes; at most ``largest_page``.
        largest_page: Bytes.
        cache_policy: As for :class:`CPUOffloadingManager`.
        enable_events: Whether to gather events.
        store_threshold: As for :class:`CPUOffloadingManager`.

    Raises:
        ConfigError: The budget is not positive, or the policy is unknown.
    """

    def __init__(
        self,
        budget: int,
        max_bytes: Callable[[Sequence[OffloadKey]], list[int]],
        largest_page: int,
        cache_policy: str | PolicyFactory = "lru",
        enable_events: bool = False,
        *,
        store_threshold: int = 1,
    ) -> None:
        most_keys = max(1, _SMALLEST_PART * budget // largest_page)
        super().__init__(most_keys, cache_policy, enable_events, store_threshold=store_threshold)
        self._budget = budget
        self._max_bytes = max_bytes
        self._sizes: dict[OffloadKey, int] = {}
        self._used = 0

    @override
    def num_storable(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many of the first of these new keys a store has room for now."""
        room = self._room()
        num_keys = 0
        for size in self._max_bytes(keys):
            if (room := room - size) < 0:
                break
            num_keys += 1
        return min(num_keys, super().num_storable(keys))

    def _room(self) -> int:
        """Return the bytes that are free, or that an eviction of all other keys frees."""
        in_flight = self._in_flight.loading | self._in_flight.storing
        return self._budget - sum(map(self._sizes.__getitem__, in_flight))

    @override
    def prepare_store(
        self, keys: Collection[OffloadKey], ctx: ReqContext | None = None, /
    ) -> PrepareStoreOutput | None:
        """Make room for new keys and protect them until ``complete_store`` (OFF-3)."""
        offered = dict.fromkeys(keys)
        held = [key for key in offered if self.page_of(key) is not None]
        new = self._new_of(offered)
        sizes = self._max_bytes(new)
        self.prepare_load(held)  # so that they are not evicted for the new keys (OFF-3)
        evicted: list[OffloadKey] = []
        has_room = sum(sizes) <= self._room() and len(new) <= super().num_storable(new)
        while has_room and self._used + sum(sizes) > self._budget:
            evicted += self.evict(1)
        self.complete_load(held)
        if not has_room:
            return None
        output = super().prepare_store(keys, ctx)
        if output is None:
            return None
        output.evicted_keys = [*evicted, *self._forget(output.evicted_keys)]
        largest = dict(zip(new, sizes, strict=True))
        for key in output.keys_to_store:
            self._sizes[key] = largest[key]
            self._used += largest[key]
        return output

    @override
    def complete_store(
        self,
        keys: Collection[OffloadKey],
        ctx: ReqContext | None = None,
        /,
        success: bool = True,
    ) -> None:
        """End stores; the keys are then loadable or, after a failure, no longer held (OFF-4)."""
        super().complete_store(keys, ctx, success)
        if not success:
            self._forget(keys)

    def resize(self, keys: Collection[OffloadKey], num_bytes: int) -> None:
        """Replace the reserved sizes of stored keys by the bytes that they take together."""
        reserved = sum(map(self._sizes.__getitem__, keys))
        for key in keys:
            size = -(-self._sizes[key] * num_bytes // max(1, reserved))
            self._used += size - self._sizes[key]
            self._sizes[key] = size

    @override
    def evict(self, num_keys: int) -> list[OffloadKey]:
        """Evict at most this number of keys that no transfer uses, and return them in order."""
        return list(self._forget(super().evict(num_keys)))

    @override
    def discard(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Drop loadable keys whose bytes are lost or no longer needed."""
        return list(self._forget(super().discard(keys)))

    def _forget(self, keys: Iterable[OffloadKey]) -> Iterable[OffloadKey]:
        for key in keys:
            self._used -= self._sizes.pop(key, 0)
        return keys

    @override
    def reset(self) -> None:
        """Drop every key, the state of the policy and all counts of offers (OFF-8)."""
        super().reset()
        self._sizes.clear()
        self._used = 0
