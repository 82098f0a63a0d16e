"""The layouts in which vLLM registers KV caches, release by release, seen as pages.

Real torch tensors of each, in the memory order that vLLM gives them; the shapes are those
of `get_kv_cache_shape` in vllm/v1/attention/backends of the releases named.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvview import UnsupportedEngineError
from kvview_vllm.transfer import canonical_kv_caches

N, BLOCK, HEADS, DIM = 6, 4, 2, 8

# name: shape, axis of the blocks, memory order of the axes (None: as they stand)
LAYOUTS: dict[str, tuple[tuple[int, ...], int, tuple[int, ...] | None]] = {
    "CPU 0.11.1 - 0.22.1": ((2, N, HEADS, BLOCK, DIM), 1, None),
    "CPU 0.23+": ((N, HEADS, BLOCK, 2 * DIM), 0, None),
    "FlashAttention to 0.22.1": ((2, N, BLOCK, HEADS, DIM), 1, None),
    "FlashAttention to 0.22.1, HND": ((2, N, BLOCK, HEADS, DIM), 1, (0, 1, 3, 2, 4)),
    "FlashAttention 0.23 - 0.25.1": ((N, 2, BLOCK, HEADS, DIM), 0, None),
    "FlashAttention 0.23 - 0.25.1, HND": ((N, 2, BLOCK, HEADS, DIM), 0, (0, 1, 3, 2, 4)),
    "FlashAttention 0.26 - 0.28": ((N, HEADS, BLOCK, 2 * DIM), 0, None),
    "FlashInfer to 0.25.1, HND": ((N, 2, BLOCK, HEADS, DIM), 0, (0, 1, 3, 2, 4)),
    "MLA": ((N, BLOCK, 9 * DIM), 0, None),
    "kernel blocks of half the size": ((2, 2 * N, BLOCK // 2, HEADS, DIM), 1, None),
    "kernel blocks of half the size, blocks first": ((2 * N, 2, BLOCK // 2, HEADS, DIM), 0, None),
}


def make(shape: tuple[int, ...], order: tuple[int, ...] | None) -> torch.Tensor:
    """A tensor of that shape with its axes in that order in memory, and distinct elements."""
    order = order or tuple(range(len(shape)))
    stored = torch.arange(torch.Size(shape).numel(), dtype=torch.float32)
    stored = stored.reshape([shape[axis] for axis in order])
    return stored.permute([order.index(axis) for axis in range(len(shape))])


def config(*groups: Sequence[str]) -> Any:
    """The attributes of a `KVCacheConfig` that are read."""
    names = [SimpleNamespace(layer_names=list(group)) for group in groups]
    return SimpleNamespace(num_blocks=N, kv_cache_groups=names)


def block(tensor: torch.Tensor, axis: int, number: int) -> torch.Tensor:
    """A manager's block, of one kernel block or of several."""
    per_block = tensor.shape[axis] // N
    return tensor.narrow(axis, number * per_block, per_block)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_page_is_a_block(name: str) -> None:
    shape, axis, order = LAYOUTS[name]
    tensor = make(shape, order)
    caches = canonical_kv_caches({"layer": tensor}, config(["layer"]))
    pages = [cache.tensor for cache in caches.tensors]
    assert sum(page[0].nbytes for page in pages) == block(tensor, axis, 0).nbytes
    assert len(caches.group_data_refs[0]) == len(pages)
    for number in range(N):
        before = tensor.clone()
        for page in pages:
            page[number] = 0
        changed = tensor != before
        expected = torch.zeros_like(changed)
        block(expected, axis, number).fill_(True)
        expected &= before != 0
        assert torch.equal(changed, expected)
        tensor.copy_(before)


def test_groups_that_share_memory_share_a_tensor() -> None:
    # PAGE-2
    shared, own = torch.zeros(N, 16), torch.zeros(N, 16)
    layers = {"full.0": shared, "window.0": shared, "full.1": own}
    caches = canonical_kv_caches(layers, config(["full.0", "full.1"], ["window.0"]))
    assert len(caches.tensors) == 2
    assert [[ref.tensor_idx for ref in refs] for refs in caches.group_data_refs] == [[0, 1], [0]]


def test_states_of_mamba_are_tensors_of_their_own() -> None:
    states = [torch.zeros(N, 3, 5), torch.zeros(N, 7, dtype=torch.bfloat16)]
    caches = canonical_kv_caches({"layer": states}, config(["layer"]))
    assert [cache.page_size_bytes for cache in caches.tensors] == [60, 14]


def test_a_layer_of_another_pipeline_stage_is_passed_over() -> None:
    caches = canonical_kv_caches({"here": torch.zeros(N, 4)}, config(["here", "elsewhere"]))
    assert len(caches.tensors) == 1


def test_0_11_0_gives_no_config() -> None:
    caches = canonical_kv_caches({"layer": torch.zeros(2, N, BLOCK, HEADS, DIM)}, None)
    assert [tuple(cache.tensor.shape) for cache in caches.tensors] == [(N, 256), (N, 256)]


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(3, N + 1, 4), "with 6 blocks in the first dimension"),
        (torch.zeros(N, 8)[:, ::2], "no two elements of a block"),
    ],
    ids=["no blocks", "padding inside"],
)
def test_tensors_without_pages_are_refused(tensor: torch.Tensor, message: str) -> None:
    # PAGE-1
    with pytest.raises(UnsupportedEngineError, match=message):
        canonical_kv_caches({"layer": tensor}, config(["layer"]))
