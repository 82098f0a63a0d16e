"""The hits of a cache at every size, for LRU and for the optimum of all policies.

Both computations read runs (:mod:`kvview_reference.sizing.references`) and count blocks. A block is
a hit only if all blocks before it in the prefix are hits. With LRU, a prefix was always used at
least as recently as the blocks that follow it. So a cache hits the blocks whose stack distance is
at most the size of the cache.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate

from kvview_reference.sizing.references import References


class Curve:
    """The hits of a cache by its size, exact at every size.

    Args:
        reached: Changes of the slope, by size. From a size on, each further block of capacity adds
            that many more hits than before (or fewer, if negative).
    """

    def __init__(self, reached: dict[int, int]) -> None:
        self._sizes = sorted(reached)
        self._slopes = list(accumulate(reached[size] for size in self._sizes))
        steps = zip(self._sizes, self._sizes[1:], self._slopes, strict=False)
        rises = ((high - low) * slope for low, high, slope in steps)
        self._hits = list(accumulate(rises, initial=0))

    @property
    def full_size(self) -> int:
        """The smallest size beyond which a cache gains no hits."""
        return self._sizes[-1] if self._sizes else 0

    def hits(self, size: int) -> int:
        """Count the blocks that a cache of this size hits."""
        at = bisect_right(self._sizes, size) - 1
        if at < 0:
            return 0
        return self._hits[at] + (size - self._sizes[at]) * self._slopes[at]


def knee_of(curve: Sequence[tuple[int, float]]) -> int:
    """Find the size at which a curve is farthest above the line between its ends.

    Source: V. Satopaa et al., "Finding a 'Kneedle' in a Haystack", ICDCS Workshops 2011.
    """
    (low, first), (high, last) = curve[0], curve[-1]
    slope = (last - first) / max(1, high - low)
    distances = {size: rate - first - slope * (size - low) for size, rate in curve}
    knee = max(distances, key=distances.__getitem__)
    return knee if distances[knee] > 0 else high


Reach = tuple[int, int]
"""A stack distance ``d`` and the number ``n`` of adjacent blocks from there on.

A cache of ``d + 1`` blocks hits one of them, a cache of ``d + n`` blocks hits all ``n``.
"""


def lru_reaches(references: References) -> Iterator[list[Reach]]:
    """Yield the stack distances of the blocks that each request uses again, in prefix order.

    The list of a request ends before its first new block. The blocks of a request become the most
    recent blocks, and its first block the most recent of all, because engines free a chain from its
    tail.

    Source: R. Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems
    Journal 9(2), 1970; the tree is P. Fenwick's.
    """
    weights = references.weights()
    num_slots = sum(map(len, references.requests))
    tree = [0] * (num_slots + 1)  # weights by slot; later slots are more recent
    slots = [0] * len(weights)
    total = next_slot = 0
    for runs in references.requests:
        reaches: list[Reach] = []
        furthest, is_prefix = 0, True
        for run in runs:
            slot, weight = slots[run], weights[run]
            if not slot:
                is_prefix = False
                continue
            if is_prefix:
                older, at = 0, slot
                while at:
                    older += tree[at]
                    at &= at - 1
                distance = max(total - older, furthest)
                reaches.append((distance, weight))
                furthest = distance + weight - 1
        for run in runs:
            slot, weight = slots[run], weights[run]
            if slot:
                while slot <= num_slots:
                    tree[slot] -= weight
                    slot += slot & -slot
            else:
                total += weight
        for run in reversed(runs):
            next_slot += 1
            slots[run] = slot = next_slot
            weight = weights[run]
            while slot <= num_slots:
                tree[slot] += weight
                slot += slot & -slot
        yield reaches


def lru_curve(reaches: Iterable[Iterable[Reach]]) -> Curve:
    """Add up the hits of LRU at every size."""
    reached: dict[int, int] = {}
    for request in reaches:
        for distance, weight in request:
            reached[distance] = reached.get(distance, 0) + 1
            reached[distance + weight] = reached.get(distance + weight, 0) - 1
    return Curve(reached)


def optimum_hits(references: References, sizes: Sequence[int], skip: int = 0) -> list[int]:
    """Count the hits of MIN with bypass, the best possible policy, which knows all later requests.

    After each request, the cache keeps the blocks whose next use is soonest, among its own blocks
    and those of the request, and drops blocks without a next use. No policy has more hits.

    Args:
        references: The trace.
        sizes: Sizes in blocks.
        skip: Number of first requests that fill the cache, and whose hits are not counted.

    Source: L. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM
    Systems Journal 5(2), 1966.
    """
    weights = references.weights()
    never = len(references.requests)
    upcoming: list[list[int]] = []  # for each use of a run, the request of its next use
    following = [never] * len(weights)
    for number in range(never - 1, -1, -1):
        runs = references.requests[number]
        upcoming.append([following[run] for run in runs])
        for run in runs:
            following[run] = number
    upcoming.reverse()
    return [_optimum(references, weights, upcoming, size, skip) for size in sizes]


def _optimum(
    references: References, weights: list[int], upcoming: list[list[int]], size: int, skip: int
) -> int:
    never = len(upcoming)
    kept = [0] * len(weights)  # blocks of each run, from its head on
    due = [0] * len(weights)
    # A heap with the latest next use first, then the deepest block.
    order: list[tuple[int, int, int]] = []
    hits = used = 0
    for number, (runs, dues) in enumerate(zip(references.requests, upcoming, strict=True)):
        for depth, (run, then) in enumerate(zip(runs, dues, strict=True)):
            hits += kept[run] * (number >= skip)
            used -= kept[run]
            kept[run] = 0
            if then < never:
                kept[run] = weights[run]
                used += weights[run]
                due[run] = then
                heappush(order, (-then, -depth, run))
        while used > size:
            then, _, run = order[0]
            surplus = used - size
            if due[run] == -then and kept[run] > surplus:
                kept[run] -= surplus
                used = size
            else:
                heappop(order)
                if due[run] == -then:
                    used -= kept[run]
                    kept[run] = 0
    return hits
