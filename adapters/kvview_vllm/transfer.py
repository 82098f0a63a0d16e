"""The KV-cache tensors of a vLLM worker, seen as pages (XFER).

- PAGE-1 A page **must** be one run of bytes. A block of several runs, for example one for each
  head, has one page for each run, each in a separate tensor. A block whose elements are not
  adjacent is refused with :class:`~kvview.UnsupportedEngineError`.
- PAGE-2 Layers of several groups that share memory **must** share a tensor.
- PAGE-3 Pages that vLLM passes to an offloading spec **must** hold all bytes of a block and no
  bytes of another block. In 0.33.0 vLLM's connector passes only one head in the layout ``LHBNC``,
  and Mamba states at wrong places in layouts that start with blocks; both are refused.

``compute_stream`` stays None, because vLLM calls its workers on the thread and under the current
stream of the forward pass, so the copies of a worker run after that stream (XFER-6).

A layer may have these shapes: blocks first (CPU and FlashAttention of late releases), keys and
values first ``(2, blocks, ...)`` (up to 0.22), kernel blocks smaller than the
manager's ``(k * blocks, ...)``, and lists of state tensors (Mamba).

Source: ``register_kv_caches`` callers in vllm/v1/worker/gpu_model_runner.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch

from kvview import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    UnsupportedEngineError,
)
from kvview_vllm.releases.compat.calls import offloaded_block_bytes


def canonical_kv_caches(
    kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], kv_cache_config: Any | None
) -> CanonicalKVCaches[torch.Tensor]:
    """Convert the tensors of all layers to pages, group by group.

    Args:
        kv_caches: Tensors by layer name, as vLLM registers them.
        kv_cache_config: vLLM's ``KVCacheConfig``; None in 0.11.0, which has one group.

    Raises:
        UnsupportedEngineError: A layer has a layout without pages (PAGE-1).
    """
    if kv_cache_config is None:
        groups = [list(kv_caches)]
        num_blocks = _num_blocks_of_single_group(kv_caches)
    else:
        groups = [group.layer_names for group in kv_cache_config.kv_cache_groups]
        num_blocks = kv_cache_config.num_blocks
        if not any(layer in kv_caches for layers in groups for layer in layers):
            groups = [list(kv_caches)]  # one tensor of all layers (0.12 to 0.18), or none
    tensors: list[CanonicalKVCacheTensor[torch.Tensor]] = []
    index_of: dict[tuple[int, int], int] = {}  # address and page size -> index in tensors
    refs: list[list[CanonicalKVCacheRef]] = []
    for layers in groups:
        group_refs: dict[int, CanonicalKVCacheRef] = {}
        for layer in layers:
            if layer not in kv_caches:  # because another pipeline stage has it
                continue
            for pages in _pages(layer, kv_caches[layer], num_blocks):
                page_bytes = pages.shape[1]
                index = index_of.setdefault((pages.data_ptr(), page_bytes), len(tensors))
                if index == len(tensors):
                    tensors.append(CanonicalKVCacheTensor(pages, page_bytes))
                group_refs[index] = CanonicalKVCacheRef(index, page_bytes)
        refs.append(list(group_refs.values()))
    return CanonicalKVCaches(tensors, refs)


def check_whole_blocks(spec: Any, kv_caches: Any) -> None:
    """Check that the pages of each block hold all of its bytes and no others (PAGE-3).

    Args:
        spec: vLLM's ``OffloadingSpec``, which states the bytes of a block in 0.26 and later.
        kv_caches: vLLM's ``CanonicalKVCaches``.

    Raises:
        UnsupportedEngineError: The caches do not hold all bytes of a block, or two pages share
            bytes.
    """
    tensors = sorted((one.tensor for one in kv_caches.tensors), key=torch.Tensor.data_ptr)
    if any(_share_bytes(*pair) for pair in combinations(tensors, 2)):
        raise UnsupportedEngineError(
            "vLLM's OffloadingConnector passes pages that hold bytes of other blocks to its spec, "
            "so loads would bring wrong KV; choose another memory layout, for example "
            "VLLM_KV_CACHE_LAYOUT=LBNHC"
        )
    needed = offloaded_block_bytes(spec)
    moved = max(
        sum(kv_caches.tensors[index].page_size_bytes for index in {ref.tensor_idx for ref in refs})
        for refs in kv_caches.group_data_refs
    )
    if moved < needed:
        raise UnsupportedEngineError(
            f"vLLM's OffloadingConnector passes {moved} of the {needed} bytes of a block to its "
            f"spec, so loads would bring wrong KV; choose another memory layout, for example "
            f"VLLM_KV_CACHE_LAYOUT=LBHNC"
        )


def _share_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether a page shares bytes with another block of a second tensor at a higher address.

    Layers of several groups may share pages, if each block has the same address in both.
    """
    distance = second.data_ptr() - first.data_ptr()
    stride, page_bytes = first.stride(0), first.shape[1]
    if distance >= (len(first) - 1) * stride + page_bytes:
        return False
    return stride != second.stride(0) or (distance > 0 and distance % stride < page_bytes)


def _pages(
    layer: str, kv_cache: torch.Tensor | Sequence[torch.Tensor], num_blocks: int
) -> Iterator[torch.Tensor]:
    states = [kv_cache] if isinstance(kv_cache, torch.Tensor) else kv_cache
    for state in states:
        for blocks in _blocks_first(layer, state, num_blocks):
            for part in _runs(layer, blocks):
                item = part.element_size()
                page_bytes = part[0].numel() * item
                yield torch.empty(0, dtype=torch.int8, device=part.device).set_(
                    part.untyped_storage(),
                    part.storage_offset() * item,
                    (num_blocks, page_bytes),
                    (part.stride(0) * item, 1),
                )


def _runs(layer: str, blocks: torch.Tensor) -> Iterator[torch.Tensor]:
    """Split blocks along the dimensions with the largest strides, until each part is one run."""
    sizes, strides = blocks.shape[1:], blocks.stride()[1:]
    if _is_dense(sizes, strides):
        yield blocks
        return
    if 1 not in strides:
        raise UnsupportedEngineError(
            f"layer {layer!r}: no two elements of a block of shape {tuple(sizes)} with strides "
            f"{strides} are adjacent; no cache was registered"
        )
    outer = 1 + max(range(len(sizes)), key=lambda dim: (sizes[dim] > 1, strides[dim]))
    for index in range(blocks.shape[outer]):
        yield from _runs(layer, blocks.select(outer, index))


def _blocks_first(layer: str, state: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
    shape = state.shape
    if shape[0] != 2 and shape[0] % num_blocks == 0:
        parts = [state]
    elif len(shape) > 1 and shape[0] == 2 and shape[1] % num_blocks == 0:
        parts = [state[0], state[1]]  # up to 0.22: keys, then values
    else:
        raise UnsupportedEngineError(
            f"layer {layer!r}: expected a shape with {num_blocks} blocks in the first dimension, "
            f"or in the second after 2 for keys and values, got {tuple(shape)}; no cache was "
            f"registered"
        )
    # Kernel blocks may be a fraction of the manager's blocks, so that k of them make a page.
    return [part.view(num_blocks, -1, *part.shape[1:]) for part in parts]


def _is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _num_blocks_of_single_group(kv_caches: Mapping[str, Any]) -> int:
    # 0.11.0 gives the worker no KVCacheConfig; keys and values come first there.
    shape = next(iter(kv_caches.values())).shape
    return int(shape[1] if shape[0] == 2 else shape[0])
