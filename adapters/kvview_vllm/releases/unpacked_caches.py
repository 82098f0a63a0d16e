"""The tensors of attention layers up to vLLM 0.31, whose shapes the backends determine.

Source: ``_reshape_kv_cache_tensors`` of vllm/v1/worker/gpu_model_runner.py, 0.11.0 to 0.31.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvview_vllm.releases.calls import known_arguments

if TYPE_CHECKING:
    import torch


def in_words(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's memory as the widest integers that its strides allow."""
    import torch

    for word in (torch.int32, torch.int16):
        try:
            return tensor.view(word)
        except RuntimeError:  # a size, a stride or the offset is not a multiple of the word
            continue
    return tensor.view(torch.int8)


def memory_of_layers(config: Any) -> dict[str, torch.Tensor]:
    """Allocate the memory of each layer up to 0.31; layers of several groups may share memory."""
    import torch

    return {
        name: memory
        for tensor in config.kv_cache_tensors
        for memory in [torch.zeros(tensor.size, dtype=torch.int8)]
        for name in tensor.shared_by
    }


def layer_shape(
    backend: Any, spec: Any, cache_dtype: str, num_blocks: int
) -> tuple[tuple[int, ...], tuple[int, int], tuple[int, ...]]:
    """Return the shape of a layer's tensor up to 0.31, and the order of its dimensions in memory.

    Args:
        backend: Backend class of the layer.
        spec: Its ``KVCacheSpec``.
        cache_dtype: Name of the dtype of the cache.
        num_blocks: Blocks of the pool.

    Returns:
        The shape, the dimensions of the blocks and of the tokens, and the order.

    Raises:
        ValueError: The backend does not keep tokens in a separate dimension.
    """
    sizes: dict[str, Any] = {"num_kv_heads": spec.num_kv_heads, "head_size": spec.head_size}
    sizes = known_arguments(backend.get_kv_cache_shape, sizes | {"cache_dtype_str": cache_dtype})
    shape = backend.get_kv_cache_shape(num_blocks, spec.block_size, **sizes)
    # Unlikely sizes show which dimensions are the blocks and the tokens.
    probe = backend.get_kv_cache_shape(1_234_577, 7919 * spec.block_size, **sizes)
    places = probe.index(1_234_577), probe.index(7919 * spec.block_size)
    return shape, places, _stride_order(backend, len(shape))


def layer_tensor(
    backend: Any, spec: Any, cache_dtype: str, num_blocks: int, memory: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer's tensor up to 0.31, in the shape of a model runner, and its slots."""
    shape, (blocks, tokens), order = layer_shape(backend, spec, cache_dtype, num_blocks)
    tensor = (
        memory.view(spec.dtype)
        .view([shape[i] for i in order])
        .permute(*(order.index(i) for i in range(len(order))))
    )
    rest = [i for i in range(len(shape)) if i not in (blocks, tokens)]
    return tensor, in_words(tensor).permute(blocks, tokens, *rest)


def _stride_order(backend: Any, num_dims: int) -> tuple[int, ...]:
    """Return the dimensions in the order of memory, by default the order of vLLM's NHD layout."""
    try:
        order: tuple[int, ...] = backend.get_kv_cache_stride_order()
    except (AttributeError, NotImplementedError, AssertionError):
        # It reads the current configuration; without one the result is the identity.
        order = tuple(range(num_dims))
    return order
