"""KV bytes as a function of the block hash, so that a stale block is seen at once.

A real model writes keys and values; this one writes numbers that follow from
the hash of the prefix, the group and the layer. Whoever loads a block can say,
byte for byte, what must be in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    """The KV cache of a simulated engine: each block has a page in every tensor.

    Args:
        num_blocks: Blocks of the pool.
        page_bytes: Bytes of one block in one layer, a multiple of 8.
        num_groups: KV-cache groups; each block belongs to one group at a time.
        num_layers: Tensors; a block has one page in each.
        device: Where the pages are.
        group_pages: Instead of equal pages for all: per group, the bytes that it uses of
            a page of each tensor, 0 when it keeps nothing there. A tensor's pages are as
            large as what the greediest group uses; the rest is padding to the others.

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
        group_pages: Sequence[Sequence[int]] = (),
    ) -> None:
        group_pages = group_pages or [[page_bytes] * num_layers] * num_groups
        pages = [max(used) for used in zip(*group_pages, strict=True)]
        for size in (*pages, *(sum(used) for used in group_pages)):
            if size <= 0 or size % WORD_BYTES:
                raise ConfigError(
                    f"a page must be a positive multiple of {WORD_BYTES} bytes, got {size}"
                )
        if type(num_blocks) is not int or num_blocks < 1:
            raise ConfigError(f"num_blocks must be a positive int, got {num_blocks!r}")
        self.block_bytes = sum(pages)
        self.group_bytes = tuple(map(sum, group_pages))  # of one block, without padding
        self._layers = [
            torch.zeros((num_blocks, size // WORD_BYTES), dtype=torch.int64, device=device)
            for size in pages
        ]
        self._positions = torch.arange(max(pages) // WORD_BYTES, device=device)
        self._refs = [
            [CanonicalKVCacheRef(index, size) for index, size in enumerate(used) if size]
            for used in group_pages
        ]
        self.caches = CanonicalKVCaches(
            tensors=[
                CanonicalKVCacheTensor(layer.view(torch.int8), size)
                for layer, size in zip(self._layers, pages, strict=True)
            ],
            group_data_refs=self._refs,
        )

    def write(self, block_ids: Sequence[int], keys: Sequence[OffloadKey]) -> None:
        """Compute the KV of blocks: what their keys say."""
        for _, rows, pages in self._expected(block_ids, keys):
            for layer, expected in pages:
                # Not layer[rows, :n] = expected, which wakes all of torch's threads: 4 ms
                # instead of 10 us for 300 rows of 512 bytes where another wants a core.
                layer[:, : expected.shape[1]].index_copy_(0, rows, expected)

    def poison(self, block_ids: Sequence[int]) -> None:
        """Overwrite blocks with what no key stands for."""
        rows = self._rows(block_ids)
        for layer in self._layers:
            layer.index_fill_(0, rows, _POISON)

    def count_mismatches(self, block_ids: Sequence[int], keys: Sequence[OffloadKey]) -> int:
        """How many of the blocks differ in any byte from what their keys say."""
        wrong = torch.zeros(len(block_ids), dtype=torch.bool, device=self._positions.device)
        for at, rows, pages in self._expected(block_ids, keys):
            for layer, expected in pages:
                found = layer[:, : expected.shape[1]].index_select(0, rows)
                wrong[at] |= (found != expected).any(dim=1)
        return int(wrong.sum())

    def _rows(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(block_ids, dtype=torch.int64, device=self._positions.device)

    def _expected(
        self, block_ids: Sequence[int], keys: Sequence[OffloadKey]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]]:
        """Per group: which of the keys are its own, their rows, and what is in each layer."""
        groups = [get_offload_group_idx(key) for key in keys]
        for group in sorted(set(groups)):
            at = [index for index, of in enumerate(groups) if of == group]
            words = [int.from_bytes(keys[i][:WORD_BYTES], "big", signed=True) ^ group for i in at]
            seeds = self._rows(words)[:, None]
            pages = []
            for ref in self._refs[group]:
                index = ref.tensor_idx
                positions = self._positions[: ref.page_size_bytes // WORD_BYTES]
                expected = ((seeds + (positions + index * 0x10001)) * _MIX) | 1
                pages.append((self._layers[index], expected))
            yield self._rows(at), self._rows([block_ids[i] for i in at]), pages
