"""The digests that blocks had when they were computed, and the comparison with loaded blocks.

- CANARY-4 A loaded block is wrong if its digest differs from all digests that blocks of its hash
  had when they were computed. A hash may have several digests, because a computation in another
  batch has other rounding errors.
- CANARY-5 If no block of the hash was computed, the digest of the first load is kept, and a later
  load with another digest is only counted, because another process may have stored the block again.
- CANARY-8 After a reset of the caches, a load **must not** bring KV of before the reset.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from kvview_vllm.canary.wrapper.canary_messages import SampledBlock

Digest = tuple[int, ...]
_Key = tuple[bytes, int]  # hash and group
_MOST_OF_ONE_HASH = 16


@dataclass(frozen=True)
class WrongLoad:
    """A loaded block with wrong KV.

    Args:
        law: Number of the law.
        message: The difference, in words.
        layers: Tensors of the block's group whose bytes differ.
    """

    law: str
    message: str
    layers: Collection[int]


class KnownDigests:
    """The digests of one worker.

    Args:
        counts: Counters of the metrics.
        limit: Most blocks; the oldest are dropped first.
    """

    def __init__(self, counts: Counter[str], limit: int = 100_000) -> None:
        self._counts = counts
        self._limit = limit
        self._computed: OrderedDict[_Key, list[Digest]] = OrderedDict()
        self._learnt: OrderedDict[_Key, Digest] = OrderedDict()
        self._before_reset: OrderedDict[_Key, list[Digest]] = OrderedDict()

    def add(self, place: SampledBlock, digest: Digest) -> None:
        """Note the digest of a block that was computed."""
        key = place.block_hash, place.group
        known = self._computed.setdefault(key, [])
        self._computed.move_to_end(key)
        if digest not in known:
            known.append(digest)
        if len(self._computed) > self._limit:
            self._computed.popitem(last=False)

    def compare(self, place: SampledBlock, digest: Digest) -> WrongLoad | None:
        """Compare the digest of a loaded block; None unless the block is wrong."""
        key = place.block_hash, place.group
        known = self._computed.get(key, [])
        is_stale = digest not in known and digest in self._before_reset.get(key, ())
        if not known and not is_stale:
            self._learn(key, digest)
            return None
        self._counts["canary_compared"] += 1
        if is_stale:
            message = "the block holds the KV of before a reset of the caches"
            return WrongLoad("CONN-11", message, range(len(digest)))
        if digest in known or len(known) > _MOST_OF_ONE_HASH:
            return None
        closest = min(known, key=lambda one: len(_differing(one, digest)))
        layers = _differing(closest, digest)
        message = f"{len(layers)} of {len(digest)} tensors differ; the block holds"
        return WrongLoad("XFER-1", f"{message} {self._holder_of(digest)}", layers)

    def _learn(self, key: _Key, digest: Digest) -> None:
        learnt = self._learnt.get(key)
        if learnt != digest:
            self._counts["canary_learnt" if learnt is None else "canary_changed"] += 1
            self._learnt[key] = digest
            if len(self._learnt) > self._limit:
                self._learnt.popitem(last=False)

    def _holder_of(self, digest: Digest) -> str:
        """Name the block that has a digest; this search only runs at a difference."""
        for block_hash, group in (key for key, known in self._computed.items() if digest in known):
            return f"the KV of block hash {block_hash.hex()[:16]} of group {group}"
        return "bytes of no sampled block" if any(digest) else "zeros"

    def reset(self) -> None:
        """Keep the digests apart, because no KV of before a reset may be loaded (CANARY-8)."""
        for key, known in self._computed.items():
            older = self._before_reset.pop(key, [])
            self._before_reset[key] = [*known, *older][: _MOST_OF_ONE_HASH + 1]
        while len(self._before_reset) > self._limit:
            self._before_reset.popitem(last=False)
        self._computed.clear()
        self._learnt.clear()


def _differing(first: Digest, second: Digest) -> list[int]:
    pairs = zip(first, second, strict=True)
    return [number for number, (one, other) in enumerate(pairs) if one != other]
