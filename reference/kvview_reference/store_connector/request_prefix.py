"""The prefix of a request: its keys and blocks in all groups, and the limits of a client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from kvview.connector import RequestInfo
from kvview.geometry import CacheGeometry
from kvview.keys import OffloadKey


def longest_prefix(
    geometry: CacheGeometry,
    request: RequestInfo,
    num_computed_tokens: int,
    most_tokens: int,
    is_held: Callable[[OffloadKey], bool],
) -> int:
    """Return the tokens of the longest prefix that the GPU and the held keys cover together.

    The prefix has at most ``most_tokens``, unless the GPU has more. The last token is always
    computed, because the engine needs its logits.
    """

    def is_there(group: int, block: int) -> bool:
        if (block + 1) * geometry.groups[group].block_size <= num_computed_tokens:
            return True
        key = geometry.block_key(request.block_hashes, group, block)
        return key is not None and is_held(key)

    most_tokens = min(most_tokens, request.num_tokens - 1)
    return max(num_computed_tokens, geometry.longest_prefix(most_tokens, is_there))


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
