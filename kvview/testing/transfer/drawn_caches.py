"""KV caches of many shapes, valid and invalid."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from kvview.testing.transfer.model import TensorLayout
from kvview.transfer import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    ComputeStream,
)

Layout = tuple[Sequence[tuple[int, int, int, int, int]], Sequence[Sequence[tuple[int, int]]]]
"""The fields of the :class:`TensorLayout` of each tensor, and the references of each group.

A reference is the index of a tensor, and the number of bytes of a page.
"""

_PAGES = (16, 64, 1, 3, 20, 48, 500, 4096, 150_000)
_TAIL = 32  # bytes after the last block of a storage
_TOO_MANY = 1 << 50


@st.composite
def layouts(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Layout:
    """Draw tensors of different sizes, with gaps, padding, shared tensors and shared storages."""
    num_blocks = draw(st.sampled_from((8, 24, 70, 2, 1)))
    tensors = []
    for storage in range(draw(st.integers(1, 4))):
        page, gap = draw(st.sampled_from(_PAGES)), draw(st.sampled_from((0, 16, 1)))
        number, start = num_blocks + draw(st.sampled_from((0, 3))), draw(st.sampled_from((0, 32)))
        # Keys and values may be side by side in one row.
        parts = 2 if page % 2 == 0 and draw(st.booleans()) else 1
        for at in range(start, start + page, page // parts):
            tensors.append((storage, at, page + gap, page // parts, number))
    groups: list[list[tuple[int, int]]] = []
    for _ in range(draw(st.integers(1, 4))):
        used = draw(st.lists(st.integers(0, len(tensors) - 1), min_size=not groups, max_size=4))
        pages = [tensors[number][3] for number in used]
        widths = [draw(st.just(page) | st.integers(1, page)) for page in pages]
        groups.append([*zip(used, widths, strict=True)])
    return tensors, groups


def tensors_of(layout: Layout) -> list[TensorLayout]:
    """Return the byte positions of each tensor."""
    return [TensorLayout(*tensor) for tensor in layout[0]]


def pages_of(layout: Layout) -> list[dict[int, int]]:
    """Return the bytes of a page of each group in each tensor that the group uses."""
    groups = []
    for refs in layout[1]:
        widths: dict[int, int] = {}
        for tensor, width in refs:  # a page starts with its row, so the wider page has the other
            widths[tensor] = max(width, widths.get(tensor, 0))
        groups.append(widths)
    return groups


def make_caches(
    layout: Layout, device: str, compute_stream: ComputeStream | None
) -> tuple[CanonicalKVCaches[Any], list[Any]]:
    """Make KV caches; returns the caches and the bytes of each storage, as tensors."""
    import torch  # imported here, because only a check of a worker needs it

    tensors = tensors_of(layout)
    ends: dict[int, int] = {}
    for one in tensors:
        end = one.start + one.num_blocks * one.stride + _TAIL
        ends[one.storage] = max(end, ends.get(one.storage, 0))
    storages = [torch.zeros(end, dtype=torch.int8, device=device) for end in ends.values()]
    caches = []
    for one in tensors:
        shape, strides = (one.num_blocks, one.page_bytes), (one.stride, 1)
        tensor = storages[one.storage].as_strided(shape, strides, one.start)
        caches.append(CanonicalKVCacheTensor(tensor, one.page_bytes))
    refs = [[CanonicalKVCacheRef(*ref) for ref in group] for group in layout[1]]
    kv_caches = CanonicalKVCaches(caches, refs, compute_stream)
    return kv_caches, [storage.view(torch.uint8) for storage in storages]


def wrong_caches(
    right: CanonicalKVCaches[Any], group: int
) -> Iterator[tuple[str, CanonicalKVCaches[Any], int]]:
    """Yield a fault, caches with this fault, which must be refused (XFER-7), and a tier size.

    Args:
        right: Caches that must be accepted.
        group: The group whose references have faults.
    """
    import torch

    def zeros(*shape: int, dtype: Any = torch.int8) -> Any:
        return torch.zeros(shape, dtype=dtype, device=right.tensors[0].tensor.device)

    def other_tensor(tensor: Any, page: int | None = None) -> CanonicalKVCaches[Any]:
        page = tensor.shape[-1] if page is None else page
        refs = [[CanonicalKVCacheRef(0, min(page, 16) or 1)]]
        return CanonicalKVCaches([CanonicalKVCacheTensor(tensor, page)], refs)

    def other_ref(number: int, page: int) -> CanonicalKVCaches[Any]:
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
