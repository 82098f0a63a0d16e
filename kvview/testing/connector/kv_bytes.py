"""KV bytes as a function of the block hash, so that a stale block is seen at once.

A real model writes keys and values; this one writes numbers that follow from
the hash of the prefix, the group and the layer. Whoever loads a block can say,
byte for byte, what must be in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvview import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    ConfigError,
    OffloadKey,
    get_offload_group_idx,
)

WORD_BYTES = 8
_POISON = -0x21524112  # even: every expected word is odd
_MIX = 0x1E3779B97F4A7C15  # odd, so that multiplying by it loses nothing mod 2**64


class KVBytes:
    """The KV cache of the reference engine: pages that all groups share.

    Args:
        num_blocks: Blocks of the pool.
        page_bytes: Bytes of one block in one layer, a multiple of 8.
        num_groups: KV-cache groups; each block belongs to one group at a time.
        num_layers: Tensors; a block has one page in each.
        device: Where the pages are.

    Raises:
        ConfigError: A size is not positive, or ``page_bytes`` no multiple of 8.
    """

    def __init__(
        self,
        num_blocks: int,
        page_bytes: int,
        *,
        num_groups: int = 1,
        num_layers: int = 1,
        device: str = "cpu",
    ) -> None:
        if page_bytes <= 0 or page_bytes % WORD_BYTES:
            raise ConfigError(
                f"a page must be a positive multiple of {WORD_BYTES} bytes, got {page_bytes}"
            )
        if type(num_blocks) is not int or num_blocks < 1:
            raise ConfigError(f"num_blocks must be a positive int, got {num_blocks!r}")
        self.page_bytes = page_bytes
        self.block_bytes = page_bytes * num_layers
        num_words = page_bytes // WORD_BYTES
        self._layers = [
            torch.zeros((num_blocks, num_words), dtype=torch.int64, device=device)
            for _ in range(num_layers)
        ]
        self._positions = torch.arange(num_words, dtype=torch.int64, device=device)
        refs = [CanonicalKVCacheRef(index, page_bytes) for index in range(num_layers)]
        self.caches = CanonicalKVCaches(
            tensors=[
                CanonicalKVCacheTensor(layer.view(torch.int8), page_bytes) for layer in self._layers
            ],
            group_data_refs=[refs] * num_groups,
        )

    def write(self, block_ids: Sequence[int], keys: Sequence[OffloadKey]) -> None:
        """Compute the KV of blocks: what their keys say."""
        rows = self._rows(block_ids)
        for layer, expected in zip(self._layers, self._expected(keys), strict=True):
            layer.index_copy_(0, rows, expected)

    def poison(self, block_ids: Sequence[int]) -> None:
        """Overwrite blocks with what no key stands for."""
        rows = self._rows(block_ids)
        for layer in self._layers:
            layer.index_fill_(0, rows, _POISON)

    def count_mismatches(self, block_ids: Sequence[int], keys: Sequence[OffloadKey]) -> int:
        """How many of the blocks differ in any byte from what their keys say."""
        rows = self._rows(block_ids)
        wrong = torch.zeros(len(block_ids), dtype=torch.bool, device=rows.device)
        for layer, expected in zip(self._layers, self._expected(keys), strict=True):
            wrong |= (layer.index_select(0, rows) != expected).any(dim=1)
        return int(wrong.sum())

    def _rows(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(block_ids, dtype=torch.int64, device=self._positions.device)

    def _expected(self, keys: Sequence[OffloadKey]) -> list[torch.Tensor]:
        seeds = torch.tensor(
            [
                int.from_bytes(key[:WORD_BYTES], "big", signed=True) ^ get_offload_group_idx(key)
                for key in keys
            ],
            dtype=torch.int64,
            device=self._positions.device,
        )
        return [
            ((seeds[:, None] + (self._positions + layer * 0x10001)) * _MIX) | 1
            for layer in range(len(self._layers))
        ]
