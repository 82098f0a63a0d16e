"""The keys and blocks of a request's prefix, over all KV-cache groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from kvview.connector import RequestInfo
from kvview.geometry import CacheGeometry
from kvview.keys import OffloadKey


class Prefixes:
    """Answers what a prefix needs that the GPU does not have.

    Args:
        geometry: Of the engine.
    """

    def __init__(self, geometry: CacheGeometry) -> None:
        self._geometry = geometry

    def keys_between(self, request: RequestInfo, start: int, end: int) -> list[OffloadKey]:
        """The keys of all blocks from one token to another."""
        return [
            key
            for index, group in enumerate(self._geometry.groups)
            for key in self._geometry.block_keys(
                request.block_hashes,
                index,
                range(start // group.block_size, end // group.block_size),
            )
        ]

    def to_load(
        self, request: RequestInfo, num_computed_tokens: int, num_tokens: int
    ) -> tuple[list[range], list[OffloadKey]]:
        """Per group the blocks that a prefix needs and the GPU lacks, and all their keys."""
        needed: list[range] = []
        keys: list[OffloadKey] = []
        for index, group in enumerate(self._geometry.groups):
            required = group.required_blocks(num_tokens)
            first = max(required.start, num_computed_tokens // group.block_size)
            needed.append(range(min(first, required.stop), required.stop))
            keys += self._geometry.block_keys(request.block_hashes, index, needed[-1])
        return needed, keys

    def longest(
        self,
        request: RequestInfo,
        num_computed_tokens: int,
        is_held: Callable[[OffloadKey], bool],
    ) -> int:
        """Tokens of the longest prefix that the GPU and the held keys make together.

        The last token is always computed, because the engine needs its logits.
        """
        geometry = self._geometry

        def is_there(group: int, block: int) -> bool:
            if (block + 1) * geometry.groups[group].block_size <= num_computed_tokens:
                return True
            key = geometry.block_key(request.block_hashes, group, block)
            return key is not None and is_held(key)

        return max(num_computed_tokens, geometry.longest_prefix(request.num_tokens - 1, is_there))

    def longest_known(
        self,
        request: RequestInfo,
        num_computed_tokens: int,
        is_held: Callable[[OffloadKey], bool],
        found: Mapping[OffloadKey, bool | None],
    ) -> int | None:
        """The same, with answers that come first; None while a missing one matters."""

        def is_found(if_unknown: bool, key: OffloadKey) -> bool:
            if key not in found:
                return is_held(key)
            flag = found[key]
            return if_unknown if flag is None else flag

        least, most = (
            self.longest(request, num_computed_tokens, partial(is_found, if_unknown))
            for if_unknown in (False, True)
        )
        return least if least == most else None
