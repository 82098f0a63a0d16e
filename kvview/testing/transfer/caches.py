"""KV caches of many shapes, valid and invalid, and their layout in bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from kvview.testing.transfer.compute import GatedComputeStream
from kvview.testing.transfer.model import TensorLayout
from kvview.transfer import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

_PAGES = (1, 3, 16, 20, 48, 64, 500, 4096, 40_000)
_GAPS = (0, 0, 1, 16)
_TOO_MANY = 1 << 50


def draw_caches(seed: int) -> CanonicalKVCaches[Any]:
    """Make tensors of different sizes, with gaps, padding, shared tensors and shared storages."""
    import torch

    rng = Random(seed)
    num_blocks = rng.choice((1, 2, 8, 24, 70))
    tensors: list[Any] = []
    for _ in range(rng.randint(1, 4)):
        page, gap = rng.choice(_PAGES), rng.choice(_GAPS)
        number = num_blocks + rng.choice((0, 0, 3))
        start = rng.choice((0, 32))
        storage = torch.zeros(start + number * (page + gap) + 32, dtype=torch.int8)
        tensors.append(storage.as_strided((number, page), (page + gap, 1), start))
        if page % 2 == 0 and rng.random() < 0.3:  # keys and values side by side in one row
            whole = tensors.pop()
            tensors += [whole[:, : page // 2], whole[:, page // 2 :]]
    groups: list[list[CanonicalKVCacheRef]] = []
    for _ in range(rng.randint(1, 5)):
        used = rng.sample(range(len(tensors)), rng.randint(0 if groups else 1, len(tensors)))
        widths = [(number, tensors[number].shape[1]) for number in used]
        groups.append(
            [CanonicalKVCacheRef(t, rng.choice((w, rng.randint(1, w)))) for t, w in widths]
        )
        # A tensor that a group names twice counts once, with the wider page.
        if used and rng.random() < 0.2:
            groups[-1].append(CanonicalKVCacheRef(used[0], 1))
    caches = [CanonicalKVCacheTensor(tensor, tensor.shape[1]) for tensor in tensors]
    return CanonicalKVCaches(caches, groups, GatedComputeStream())


def layout_of(
    caches: CanonicalKVCaches[Any],
) -> tuple[list[TensorLayout], list[Any], list[dict[int, int]]]:
    """Return the place of each tensor, the storages, and the bytes of a page for each group."""
    storages: dict[int, Any] = {}
    tensors = []
    for cache in caches.tensors:
        tensor, storage = cache.tensor, cache.tensor.untyped_storage()
        storages.setdefault(storage.data_ptr(), storage)
        number = list(storages).index(storage.data_ptr())
        at = tensor.storage_offset(), tensor.stride(0) or cache.page_size_bytes
        tensors.append(TensorLayout(number, *at, cache.page_size_bytes, tensor.shape[0]))
    groups = []
    for refs in caches.group_data_refs:
        widths: dict[int, int] = {}
        for ref in refs:  # each page starts with its row, so the wider page includes the other
            widths[ref.tensor_idx] = max(ref.page_size_bytes, widths.get(ref.tensor_idx, 0))
        groups.append(widths)
    return tensors, list(storages.values()), groups


def wrong_caches(
    rng: Random, right: CanonicalKVCaches[Any]
) -> Iterator[tuple[str, CanonicalKVCaches[Any], int]]:
    """Yield a fault, caches with this fault, which must be refused (XFER-7), and a tier size."""
    import torch

    def zeros(*shape: int, dtype: Any = torch.int8) -> Any:
        return torch.zeros(shape, dtype=dtype)

    def other_tensor(tensor: Any, page: int | None = None) -> CanonicalKVCaches[Any]:
        page = tensor.shape[-1] if page is None else page
        refs = [[CanonicalKVCacheRef(0, min(page, 16) or 1)]]
        return CanonicalKVCaches([CanonicalKVCacheTensor(tensor, page)], refs)

    def other_ref(number: int, page: int) -> CanonicalKVCaches[Any]:
        group = rng.randrange(len(right.group_data_refs))
        refs: list[Sequence[CanonicalKVCacheRef]] = list(right.group_data_refs)
        refs[group] = [*refs[group], CanonicalKVCacheRef(number, page)]
        return replace(right, group_data_refs=refs)

    last = len(right.tensors) - 1
    wide = right.tensors[last].page_size_bytes + 1
    wrong = {
        "a reference after the last tensor": other_ref(last + 1, 1),
        "a reference to tensor -1": other_ref(-1, 1),
        "a page that is wider than its row": other_ref(last, wide),
        "a page of no bytes": other_ref(last, 0),
        "a page of fewer than no bytes": other_ref(last, -1),
        "a tensor without blocks": other_tensor(zeros(0, 16)),
        "a tensor without bytes": other_tensor(zeros(8, 0)),
        "rows that overlap": other_tensor(zeros(72).as_strided((8, 16), (8, 1))),
        "rows whose bytes lie apart": other_tensor(zeros(16, 8).T),
        "elements that are no bytes": other_tensor(zeros(8, 16, dtype=torch.int16)),
        "a tensor of three dimensions": other_tensor(zeros(8, 4, 16)),
        "rows of another length than is stated": other_tensor(zeros(8, 16), 8),
        "no tensor": CanonicalKVCaches([], [[]]),
        "no group": replace(right, group_data_refs=[]),
    }
    for what, caches in wrong.items():
        yield what, caches, 4
    yield "a tier of no pages", right, 0
    yield "a tier of fewer than no pages", right, -1
    if Path("/proc/meminfo").exists():  # only if the system reports the size of its memory
        yield "a tier larger than memory", right, _TOO_MANY
