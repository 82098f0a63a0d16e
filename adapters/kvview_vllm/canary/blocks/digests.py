"""Digests of the blocks of a worker, computed on the tensors' own device.

A digest has one number for each tensor of the block's group: the sum of its words, each multiplied
with an odd number that depends on its place, so that words that change or swap change the digest.

- CANARY-10 At the start, a changed scratch copy of a block **must** have another digest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvview import ConnectorError
from kvview_vllm.canary.wrapper.canary_messages import SampledBlock
from kvview_vllm.transfer import canonical_kv_caches

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed number of 64 bits
_LOW = (1 << 35) - 1
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.int8))


def digest(pages: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """Return a digest of the page of each block, without waiting for the device.

    Args:
        pages: The pages of all blocks, as rows of bytes.
        block_ids: The blocks, on the same device.
    """
    rows = pages.index_select(0, block_ids)
    kind = next(kind for size, kind in _WORDS if rows.shape[1] % size == 0)
    words = rows.view(kind).to(torch.int64)
    places = torch.arange(1, 2 * words.shape[1], 2, dtype=torch.int64, device=words.device)
    # High bits reach low bits of the sum; otherwise two changes of highest bits would cancel out.
    mixed = words ^ ((words >> 29) & _LOW)
    return (mixed * (places * _ODD)).sum(1)


class PendingDigests:
    """Digests that the device may still compute.

    Args:
        places: The blocks.
        rows: For each group, the digests of its blocks, in the order of ``places``.
    """

    def __init__(self, places: Sequence[SampledBlock], rows: Mapping[int, torch.Tensor]) -> None:
        self.places = places
        self._rows = {group: one.to("cpu", non_blocking=True) for group, one in rows.items()}
        self._event: Any = None
        if any(one.is_cuda for one in rows.values()):
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def is_ready(self) -> bool:
        """Whether the digests can be read without waiting."""
        return self._event is None or bool(self._event.query())

    def read(self) -> list[tuple[int, ...]]:
        """Wait for the digests, and return them in the order of the places."""
        if self._event is not None:
            self._event.synchronize()
        rows = {group: iter(values.tolist()) for group, values in self._rows.items()}
        return [tuple(next(rows[place.group])) for place in self.places]


class Digests:
    """Digests the blocks of one worker.

    Args:
        kv_caches: The tensors by layer name, as vLLM registers them.
        kv_cache_config: vLLM's ``KVCacheConfig``; None in 0.11.0.

    Raises:
        UnsupportedEngineError: A layer has no pages.
        ConnectorError: A changed block has the same digest as before.
    """

    def __init__(self, kv_caches: Any, kv_cache_config: Any) -> None:
        caches = canonical_kv_caches(kv_caches, kv_cache_config)
        self._pages = [
            [caches.tensors[ref.tensor_idx].tensor for ref in refs]
            for refs in caches.group_data_refs
        ]
        for pages in self._pages:
            for tensor in pages:
                self._test(tensor)

    def _test(self, pages: torch.Tensor) -> None:
        """Change a scratch copy of a block, at its ends and in between, and look for the change."""
        scratch = pages[:1].clone()
        first = torch.zeros(1, dtype=torch.int64, device=pages.device)
        before = digest(scratch, first)
        for place in (0, scratch.shape[1] // 2, scratch.shape[1] - 1):
            scratch[0, place] ^= 1
            if bool((digest(scratch, first) == before).all()):
                raise ConnectorError(
                    f"CANARY-10: self-test failed: a changed byte {place} of a page of "
                    f"{scratch.shape[1]} bytes has the same digest; report this with the device "
                    f"{pages.device} and remove the canary"
                )
            scratch[0, place] ^= 1

    def start(self, places: Sequence[SampledBlock]) -> PendingDigests:
        """Start to digest blocks."""
        rows: dict[int, torch.Tensor] = {}
        for group in {place.group for place in places}:
            ids = [place.block_id for place in places if place.group == group]
            device = self._pages[group][0].device
            block_ids = torch.tensor(ids, dtype=torch.int64).to(device, non_blocking=True)
            rows[group] = torch.stack(
                [digest(pages, block_ids) for pages in self._pages[group]], dim=1
            )
        return PendingDigests(places, rows)
