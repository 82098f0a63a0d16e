"""KV bytes as a function of the block hash, so that a stale block is detected at once.

A real model writes keys and values. The simulated model writes numbers that are derived from the
hash of the prefix, the group and the layer, so each byte of a loaded block can be compared. One
block in four repeats a word in most of its page, so a connector that compresses pages has pages
that shrink and pages that do not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvview import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    ConfigError,
    OffloadKey,
    get_offload_group_idx,
)
from kvview.testing.connector.judge.invariants import short

WORD_BYTES = 8
_POISON = -0x21524112  # even, because every expected word is odd
_MIX = 0x1E3779B97F4A7C15  # odd, so that a multiplication mod 2**64 loses no information
_NUM_WORDS = 2**64
_UNMIX = pow(_MIX, -1, _NUM_WORDS)
_COMPRESSIBLE = 4  # one key in so many
_REMEMBERED_WRITES = 1000  # keys of the last steps, to describe wrong bytes


class KVBytes:
    """The KV cache of a simulated engine: each block has a page in every tensor.

    Args:
        num_blocks: Blocks of the pool.
        group_pages: For each group and tensor, the bytes of a page that the group uses, a multiple
            of 8, 0 for none. The pages of a tensor have the size that the largest group uses;
            smaller groups have padding. Each block belongs to one group at a time.
        device: Device of the pages.

    Raises:
        ConfigError: A size is not positive, or is not a multiple of 8.
    """

    def __init__(
        self,
        num_blocks: int,
        group_pages: Sequence[Sequence[int]],
        device: str = "cpu",
    ) -> None:
        pages = [max(used) for used in zip(*group_pages, strict=True)]
        for size in (*pages, *(sum(used) for used in group_pages)):
            if size <= 0 or size % WORD_BYTES:
                raise ConfigError(
                    f"a page must be a positive multiple of {WORD_BYTES} bytes, got {size}"
                )
        if type(num_blocks) is not int or num_blocks < 1:
            raise ConfigError(f"num_blocks must be a positive int, got {num_blocks!r}")
        self.block_bytes = sum(pages)
        self.group_bytes = tuple(map(sum, group_pages))  # bytes of one block, without padding
        self._layers = [
            torch.zeros((num_blocks, size // WORD_BYTES), dtype=torch.int64, device=device)
            for size in pages
        ]
        self.mismatch = ""
        """The first difference that the latest comparison found: its place, and its KV's key."""
        self.wrong_block: tuple[int, OffloadKey] | None = None
        """The block of this difference, and its key."""
        self._written: deque[Sequence[OffloadKey]] = deque(maxlen=_REMEMBERED_WRITES)
        self._device = device
        self._positions = [
            np.arange(size // WORD_BYTES) + index * 0x10001 for index, size in enumerate(pages)
        ]
        self._repeated = [  # the positions of pages that can be compressed
            np.minimum(positions, positions[len(positions) // 4]) for positions in self._positions
        ]
        self._refs = [
            [CanonicalKVCacheRef(index, size) for index, size in enumerate(used) if size]
            for used in group_pages
        ]
        self._of_groups = [self._places(refs) for refs in self._refs]
        self.caches = CanonicalKVCaches(
            tensors=[
                CanonicalKVCacheTensor(layer.view(torch.int8), size)
                for layer, size in zip(self._layers, pages, strict=True)
            ],
            group_data_refs=self._refs,
        )

    def _places(self, refs: Sequence[CanonicalKVCacheRef]) -> tuple[Any, list[int], Any, Any]:
        """Return the layers of a group, their sizes in words, and the positions of all words."""
        sizes = [ref.page_size_bytes // WORD_BYTES for ref in refs]
        layers = [self._layers[ref.tensor_idx] for ref in refs]
        positions, repeated = (
            np.concatenate([of[ref.tensor_idx][:n] for ref, n in zip(refs, sizes, strict=True)])
            for of in (self._positions, self._repeated)
        )
        return layers, sizes, positions, repeated

    def write(self, block_ids: Sequence[int], keys: Sequence[OffloadKey]) -> None:
        """Write into blocks the KV that is derived from their keys."""
        self._written.append(keys)
        for rows, pages in self._expected(block_ids, keys):
            for layer, expected in pages:
                # layer[rows, :n] = expected would wake all threads of torch, which takes 4 ms
                # instead of 10 us for 300 rows of 512 bytes on a busy machine.
                layer[:, : expected.shape[1]].index_copy_(0, rows, expected)

    def poison(self, block_ids: Sequence[int]) -> None:
        """Overwrite blocks with bytes that do not belong to any key."""
        rows = self._on_device(np.array(block_ids, np.int64))
        for layer in self._layers:
            layer.index_fill_(0, rows, _POISON)

    def count_not_poisoned(self, block_ids: Sequence[int]) -> int:
        """Count the blocks that were written since the last call of :meth:`poison`."""
        rows = self._on_device(np.array(block_ids, np.int64))
        wrong = torch.zeros(len(rows), dtype=torch.bool, device=self._device)
        for layer in self._layers:
            wrong |= (layer.index_select(0, rows) != _POISON).any(dim=1)
        return int(wrong.sum())

    def count_mismatches(self, block_ids: Sequence[int], keys: Sequence[OffloadKey]) -> int:
        """Count the blocks that differ in any byte from the KV of their keys."""
        num_wrong = 0
        for rows, pages in self._expected(block_ids, keys):
            wrong: torch.Tensor | None = None
            for layer, expected in pages:
                found = layer[:, : expected.shape[1]].index_select(0, rows)
                if not torch.equal(found, expected):  # rare, and a cheap test
                    differs = (found != expected).any(dim=1)
                    if not num_wrong and wrong is None:
                        row = int(differs.nonzero()[0])
                        block_id = int(rows[row])
                        key = keys[list(block_ids).index(block_id)]
                        self.wrong_block = block_id, key
                        self.mismatch = self._difference(
                            block_id, key, layer, found[row], expected[row]
                        )
                    wrong = differs if wrong is None else wrong | differs
            num_wrong += 0 if wrong is None else int(wrong.sum())
        return num_wrong

    def _difference(
        self,
        block_id: int,
        key: OffloadKey,
        layer: torch.Tensor,
        found: torch.Tensor,
        expected: torch.Tensor,
    ) -> str:
        """Describe the first difference in a page, and the key of the KV that was found."""
        at = (found != expected).nonzero().flatten().tolist()
        tensor = next(index for index, one in enumerate(self._layers) if one is layer)
        place = tensor, at[0]
        end = at[-1] * WORD_BYTES + WORD_BYTES - 1
        owner = self._owner(int(found[at[0]]), place)
        is_own = owner.startswith(f"the KV of key {short(key)},")
        other = "of another place, because a tensor, a rank or the size of a page was confused"
        return (
            f"bytes {at[0] * WORD_BYTES} to {end} of GPU block {block_id} in tensor {tensor} hold "
            f"{owner}, {other if is_own else f'not the KV of key {short(key)}'}"
        )

    def _owner(self, word: int, place: tuple[int, int]) -> str:
        """Describe the key of a word's KV, and the word's position in this KV if it differs."""
        if word == _POISON:
            return "no KV that was written since the block was allocated"
        keys = {_seed(key): key for written in self._written for key in written}
        for tensor, positions in enumerate(self._positions):
            for number, position in enumerate(positions.tolist()):
                for mixed in (word, word - 1):  # the last bit of every expected word is set
                    key = keys.get((mixed * _UNMIX - position) % _NUM_WORDS)
                    if key is not None:
                        at = f", from byte {number * WORD_BYTES} of tensor {tensor}"
                        shrinks = _word(key) % _COMPRESSIBLE == 0
                        own = (self._repeated if shrinks else self._positions)[tensor]
                        is_there = tensor == place[0] and position == own[place[1]]
                        return f"the KV of key {short(key)}{at * (not is_there)}"
        return "bytes that are not KV of the last steps"

    def _on_device(self, numbers: npt.NDArray[np.int64]) -> torch.Tensor:
        made = torch.from_numpy(numbers)
        return made if self._device == "cpu" else made.to(self._device, non_blocking=True)

    def _expected(
        self, block_ids: Sequence[int], keys: Sequence[OffloadKey]
    ) -> Iterator[tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]]:
        """Yield for each group the rows of its keys and the expected bytes of each layer.

        The bytes are computed in numpy, because torch takes four times as long for the blocks of a
        step.
        """
        named = np.array(block_ids, np.int64)
        heads = [key[:WORD_BYTES].rjust(WORD_BYTES, b"\0") for key in keys]
        words = np.frombuffer(b"".join(heads), ">i8").astype(np.int64)
        places: dict[int, Any] = {0: slice(None)}
        if len(self._refs) > 1:
            groups = np.array([get_offload_group_idx(key) for key in keys])
            places = {group: groups == group for group in sorted({*groups.tolist()})}
        for group, at in places.items():
            seeds = (words[at] ^ group)[:, None]
            can_shrink = (words[at] % _COMPRESSIBLE == 0)[:, None]
            layers, sizes, positions, repeated = self._of_groups[group]
            expected = seeds + np.where(can_shrink, repeated, positions)
            expected *= _MIX
            expected |= 1
            pages = self._on_device(expected).split_with_sizes(sizes, 1)
            yield self._on_device(named[at]), [*zip(layers, pages, strict=True)]


def _word(key: OffloadKey) -> int:
    return int.from_bytes(key[:WORD_BYTES].rjust(WORD_BYTES, b"\0"))


def _seed(key: OffloadKey) -> int:
    """Return the number from which the words of a key are derived."""
    return _word(key) ^ get_offload_group_idx(key)
