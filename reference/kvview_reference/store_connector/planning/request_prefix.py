"""The prefix of a request: its keys and blocks in all groups, and the limits of a client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from typing_extensions import override

from kvview.connector import RequestInfo
from kvview.geometry import CacheGeometry
from kvview.keys import OffloadKey
from kvview.prefix_search import CachedBlocks

NumLeadingHits = Callable[[Sequence[OffloadKey]], int]
"""Returns the number of leading keys that can be loaded."""
_FIRST_KEYS, _MORE_KEYS = 2, 64  # looked up at once, because most searches end at the first block


class _HeldBlocks(CachedBlocks):
    """The blocks of one group of a request that the GPU has or that can be loaded.

    Args:
        geometry: Geometry of the engine.
        request: The request.
        group: Index of the group.
        num_on_gpu: Number of leading blocks that the GPU has.
        num_leading_hits: Looks keys up.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        request: RequestInfo,
        group: int,
        num_on_gpu: int,
        num_leading_hits: NumLeadingHits,
    ) -> None:
        super().__init__(lambda block: block < num_on_gpu or self._num_held(block, block + 1) > 0)
        self._keys_of = partial(geometry.block_keys, request.block_hashes, group)
        self._num_on_gpu = num_on_gpu
        self._num_leading_hits = num_leading_hits

    def _num_held(self, start: int, stop: int) -> int:
        return self._num_leading_hits(self._keys_of(range(start, stop)))

    @override
    def first_missing(self, stop: int) -> int:
        if self._num_leading is None:
            block, num_keys = self._num_on_gpu, _FIRST_KEYS
            while block < stop:
                end = min(stop, block + num_keys)
                if (found := self._num_held(block, end)) < end - block:
                    stop = block + found
                block += found
                num_keys = _MORE_KEYS
            self._num_leading = block
        return min(stop, self._num_leading)


def longest_prefix(
    geometry: CacheGeometry,
    request: RequestInfo,
    num_computed_tokens: int,
    most_tokens: int,
    num_leading_hits: NumLeadingHits,
) -> int:
    """Return the tokens of the longest prefix that the GPU and the held keys cover together.

    The prefix has at most ``most_tokens``, unless the GPU has more. The last token is always
    computed, because the engine needs its logits.
    """
    blocks = [
        _HeldBlocks(
            geometry, request, index, num_computed_tokens // group.block_size, num_leading_hits
        )
        for index, group in enumerate(geometry.groups)
    ]
    most_tokens = min(most_tokens, request.num_tokens - 1)
    return max(num_computed_tokens, geometry.search_prefix(most_tokens, blocks))


def keys_beyond(
    geometry: CacheGeometry, request: RequestInfo, num_computed_tokens: int
) -> Iterator[OffloadKey]:
    """Yield the keys of all blocks that a longer prefix than the GPU's may need."""
    for index, group in enumerate(geometry.groups):
        size = group.block_size
        blocks = range(num_computed_tokens // size, (request.num_tokens - 1) // size)
        yield from geometry.block_keys(request.block_hashes, index, blocks)


def blocks_to_load(
    geometry: CacheGeometry, request: RequestInfo, num_computed_tokens: int, num_tokens: int
) -> tuple[list[range], list[OffloadKey]]:
    """Return per group the blocks that a prefix needs and the GPU lacks, and all their keys."""
    needed: list[range] = []
    keys: list[OffloadKey] = []
    for index, group in enumerate(geometry.groups):
        required = group.required_blocks(num_tokens)
        first = max(required.start, num_computed_tokens // group.block_size)
        needed.append(range(min(first, required.stop), required.stop))
        keys += geometry.block_keys(request.block_hashes, index, needed[-1])
    return needed, keys


_NO_LIMIT = 1 << 62
_MEDIA = (None, "CPU", "STORAGE")
_LOCALITIES = (None, "LOCAL", "REMOTE")


class RequestLimits(NamedTuple):
    """Limits of one request."""

    max_load_tokens: int = _NO_LIMIT
    """Maximum of tokens that are loaded."""
    max_offload_tokens: int = _NO_LIMIT
    """Leading tokens whose blocks may be stored."""
    uses_store: bool = True
    """Whether pages are also loaded from the store, not only from memory."""

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> RequestLimits:
        """Read the limits of a request; an invalid value sets no limit, as in vLLM.

        Args:
            params: The request's ``kv_transfer_params``, as the client sent them.

        Source: ``RequestOffloadState`` and ``_parse_tier_filter`` in
        ``vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py`` (0.33.0), and
        ``TieringOffloadingManager.lookup``, which reads host memory for every list of tiers.
        """
        if not params:
            return NO_LIMITS
        return cls(
            _tokens(params.get("max_load_tokens")),
            _tokens(params.get("max_offload_tokens")),
            _allow_storage(params.get("kv_load_tiers")),
        )


NO_LIMITS = RequestLimits()


def _tokens(value: object) -> int:
    return value if type(value) is int and value >= 0 else _NO_LIMIT


def _allow_storage(tiers: object) -> bool:
    """Whether a list of tiers includes storage; an entry without a medium means every medium."""
    if not isinstance(tiers, list):
        return True
    entries = [
        (_upper(tier.get("medium")), _upper(tier.get("locality")))
        for tier in tiers
        if isinstance(tier, dict)
    ]
    media = [medium for medium, place in entries if medium in _MEDIA and place in _LOCALITIES]
    return None in media or "STORAGE" in media or bool(tiers and not media)


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value
