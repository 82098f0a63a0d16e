"""The keys and blocks of a request's prefix, over all KV-cache groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
