"""Prompts of a scenario that share prefixes as recorded requests do.

A scenario has families of prompts: of two prompts of one family, one is a prefix of the other, and
two families share a number of blocks at their start. A tree of prefixes with several roots does not
fit; the smaller roots are then not shared, which :attr:`Prompts.num_approximated` counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvview_vllm.recorder.incident import RequestModel


class Prompts:
    """The families of recorded requests.

    Args:
        requests: The requests, in the order of their arrival.
    """

    def __init__(self, requests: Iterable[RequestModel]) -> None:
        self._families: list[list[RequestModel]] = []
        self._family_of: dict[int, int] = {}
        for request in requests:
            self._add(request)
        shared, self.num_approximated = _shares([self._longest(f) for f in self._families])
        self.places = {
            request: (number + 1, shared[number]) for request, number in self._family_of.items()
        }
        """Family of each request, and the blocks that the family shares with other families."""

    def _add(self, request: RequestModel) -> None:
        for number, family in enumerate(self._families):
            longest = self._longest(family)
            shared = num_shared(longest, request)
            if shared and shared >= min(_num_hashes(longest), _num_hashes(request)):
                family.append(request)
                self._family_of[request.request] = number
                return
        self._family_of[request.request] = len(self._families)
        self._families.append([request])

    @staticmethod
    def _longest(family: Sequence[RequestModel]) -> RequestModel:
        return max(family, key=_num_hashes)


def _num_hashes(request: RequestModel) -> int:
    """Return the number of full blocks of the prompt."""
    return request.positions[-1] + 1 if request.positions else 0


def num_shared(one: RequestModel, other: RequestModel) -> int:
    """Return the number of blocks of the longest known prefix that two requests share."""
    hashes = dict(zip(one.positions, one.hashes, strict=False))
    return max(
        (
            position + 1
            for position, number in zip(other.positions, other.hashes, strict=False)
            if hashes.get(position) == number
        ),
        default=0,
    )


def _shares(families: Sequence[RequestModel]) -> tuple[list[int], int]:
    """Return the shared blocks of each family, and the number of pairs that share others."""
    pairs = {
        (a, b): num_shared(families[a], families[b]) for a in range(len(families)) for b in range(a)
    }
    root = Counter(one.hashes[0] for one in families if one.hashes).most_common(1)
    shared = [0] * len(families)
    for (a, b), number in pairs.items():
        if number and families[a].hashes[0] == root[0][0]:
            shared[a], shared[b] = max(shared[a], number), max(shared[b], number)
    num_other = sum(min(shared[a], shared[b]) != number for (a, b), number in pairs.items())
    return shared, num_other
