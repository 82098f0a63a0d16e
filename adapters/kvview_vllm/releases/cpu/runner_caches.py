"""The KV cache of a worker up to vLLM 0.28, which the model runner allocates.

The methods of ``GPUModelRunner`` run, on an object that has only the attributes that they read. If
the connector prefers blocks of all layers (0.12), they allocate such blocks.

Source: ``initialize_kv_cache_tensors`` of vllm/v1/worker/gpu_model_runner.py, 0.11.0 to 0.28.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvview_vllm.releases.compat.calls import known_arguments, make_known
from kvview_vllm.releases.compat.versions import vllm

if TYPE_CHECKING:
    import torch


def in_words(tensor: torch.Tensor) -> torch.Tensor:
    """View the same memory as the widest integers that its strides allow."""
    import torch

    for word in (torch.int32, torch.int16):
        try:
            return tensor.view(word)
        except RuntimeError:  # a size, a stride or the offset is not a multiple of the word
            continue
    return tensor.view(torch.int8)


def run_allocation(
    vllm_config: Any, config: Any, named: Mapping[str, tuple[Any, Any]], cache_dtype: str
) -> Any:
    """Let the release allocate the tensors of all layers, and bind them to the layers.

    Args:
        vllm_config: The worker's ``VllmConfig``, which has the layers and is the current one.
        config: The ``KVCacheConfig``.
        named: Backend and spec by layer name.
        cache_dtype: Name of the dtype of the cache.

    Returns:
        The model runner. Its attribute ``layer_tensors`` has the tensors by layer name;
        ``cross_layers_kv_cache`` is the one tensor of all layers, or None.
    """
    import torch

    runner = object.__new__(vllm("v1.worker.gpu_model_runner").GPUModelRunner)
    runner.__dict__.update(
        model_config=vllm_config.model_config,
        compilation_config=vllm_config.compilation_config,
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        device=torch.device("cpu"),
        kv_cache_config=config,
        attn_groups=[
            [*_attention_groups(number, group, named)]
            for number, group in enumerate(config.kv_cache_groups)
        ],
        runner_only_attn_layers=set(),
        shared_kv_cache_layers={},
        kv_caches=[],
        cross_layers_kv_cache=None,
    )
    values = {
        "kv_cache_config": config,
        "kernel_block_sizes": [group.kv_cache_spec.block_size for group in config.kv_cache_groups],
    }
    allocate = runner.initialize_kv_cache_tensors
    runner.layer_tensors = allocate(**known_arguments(allocate, values))
    return runner


def _attention_groups(
    number: int, group: Any, named: Mapping[str, tuple[Any, Any]]
) -> Iterator[Any]:
    """Yield an ``AttentionGroup`` for each backend and spec in a KV-cache group."""
    of_layers = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    members: dict[Any, list[str]] = {}
    for name in group.layer_names:
        spec = of_layers.get(name, group.kv_cache_spec)
        members.setdefault((named[name][0], spec), []).append(name)
    for (backend, spec), names in members.items():
        if hasattr(spec, "indexes_kv_by_block_stride"):  # 0.24: the runner copies it to the spec
            indexes = backend.indexes_kv_by_block_stride()
            spec = replace(spec, indexes_kv_by_block_stride=indexes)
        yield make_known(
            vllm("v1.worker.utils").AttentionGroup,
            backend=backend,
            layer_names=names,
            kv_cache_spec=spec,
            kv_cache_group_id=number,
            metadata_builders=[],
        )


def layer_shape(
    backend: Any, spec: Any, cache_dtype: str, num_blocks: int
) -> tuple[tuple[int, ...], tuple[int, int], tuple[int, ...]]:
    """Return the shape of a layer's tensor up to 0.28, and the order of its dimensions in memory.

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


def layer_slots(cache: Any, backend: Any, spec: Any, cache_dtype: str) -> torch.Tensor:
    """Return the view ``(blocks, states of a block, ...)`` of a layer's tensor or Mamba states."""
    if hasattr(spec, "mamba_type"):
        return in_words(_pages_of_states(cache, spec)).unsqueeze(1)
    _, (blocks, tokens), _ = layer_shape(backend, spec, cache_dtype, 1)
    rest = [dim for dim in range(cache.dim()) if dim not in (blocks, tokens)]
    return in_words(cache).permute(blocks, tokens, *rest)


def _pages_of_states(cache: Any, spec: Any) -> torch.Tensor:
    """View the states of Mamba as bytes: a list of adjacent tensors, or a tensor (0.27)."""
    import torch

    first = cache[0] if isinstance(cache, list) else cache
    item = first.element_size()
    return torch.empty(0, dtype=torch.int8).set_(
        first.untyped_storage(),
        first.storage_offset() * item,
        (len(first), replace(spec, page_size_padded=None).page_size_bytes),
        (first.stride(0) * item, 1),
    )


def _stride_order(backend: Any, num_dims: int) -> tuple[int, ...]:
    """Return the dimensions in the order of memory, by default that of vLLM's NHD layout."""
    try:
        order: tuple[int, ...] = backend.get_kv_cache_stride_order()
    except (AttributeError, NotImplementedError, AssertionError):
        # It reads the current configuration; without one the result is the identity.
        order = tuple(range(num_dims))
    return order
