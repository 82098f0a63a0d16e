"""The KV cache of a raw connector's worker: configuration, tensors and layers of the release.

- VSIM-4 Tensors **must** have the shapes and strides that the release allocates for
  FlashAttention, by its own functions where it has them.

Source: ``initialize_kv_cache_tensors`` of vllm/v1/worker/gpu_model_runner.py, 0.12.0 to
0.33.0; ``allocate_kv_cache`` of vllm/v1/worker/utils.py since 0.32.0.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvview import CacheGroup, FullAttention, SlidingWindow
from kvview_vllm.releases.calls import known_arguments
from kvview_vllm.releases.samples import make_attention_spec
from kvview_vllm.releases.versions import refusal, vllm

if TYPE_CHECKING:
    import torch

_SPECS: dict[type[CacheGroup], str] = {
    FullAttention: "FullAttentionSpec",
    SlidingWindow: "SlidingWindowSpec",
}

BLOCK_SIZE = 16
"""Tokens of a block: the smallest that the GPU backends of every release support."""

NUM_LAYERS = 2
_NUM_HEADS, _HEAD_SIZE = 2, 32
_MEMORY = 1 << 32  # bytes for the planner; the number of blocks is overridden
_PLANNERS = ("v1.core.kv_cache_planning", "v1.core.kv_cache_utils")
_LAYERS = (
    "model_executor.layers.attention.attention",
    "model_executor.layers.attention",
    "attention.layer",
)


@dataclass(frozen=True)
class RealCaches:
    """The tensors that a worker registers, and the simulation's view of them.

    Args:
        config: vLLM's ``KVCacheConfig``.
        tensors: By layer name, as the release registers them.
        slots: A view ``(blocks, tokens of a block, ...)`` of the same memory for each layer in
            order, in 32-bit words: the words of one token.
    """

    config: Any
    tensors: dict[str, torch.Tensor]
    slots: list[torch.Tensor]


def layouts() -> tuple[str, ...]:
    """Names of the memory layouts of the release, the default first."""
    try:
        names = [layout.name for layout in vllm("v1.kv_cache_layout").KVCacheLayout]
    except ImportError:
        return ("NHD", "HND")
    return tuple(sorted(names, key="LBNHC".__ne__))


def use_layout(vllm_config: Any, name: str) -> None:
    """Choose a memory layout for the caches that are made from a configuration.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        name: One of :func:`layouts`. Up to 0.31 it holds for the whole process.
    """
    if hasattr(vllm_config.cache_config, "get_resolved_kv_cache_layout"):
        vllm_config.cache_config.kv_cache_layout = name
    else:
        vllm("v1.attention.backends.utils").set_kv_cache_layout(name)


def make_config(vllm_config: Any, groups: Sequence[CacheGroup], num_blocks: int) -> Any:
    """The ``KVCacheConfig`` that the release plans for layers of these kinds.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        groups: Kinds of the layers; the release decides how it groups them.
        num_blocks: Blocks of the pool.
    """
    specs = {}
    for index in range(NUM_LAYERS):
        group = groups[index % len(groups)]
        specs[f"model.layers.{index}.self_attn.attn"] = make_attention_spec(
            _SPECS[type(group)],
            group.block_size,
            _NUM_HEADS,
            _HEAD_SIZE,
            sliding_window=group.sliding_window if isinstance(group, SlidingWindow) else None,
        )
    cache_config = vllm_config.cache_config
    cache_config.num_gpu_blocks_override = num_blocks
    # vLLM refuses to start unless the longest request fits.
    are_one = vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
    share = 1 if are_one else len(groups)  # a window takes one more block
    longest = min(vllm_config.model_config.max_model_len, (num_blocks // share - 1) * BLOCK_SIZE)
    vllm_config.model_config.max_model_len = longest
    vllm_config.scheduler_config.max_model_len = longest
    if hasattr(cache_config, "get_resolved_kv_cache_layout"):
        # The default of FlashAttention, unless use_layout has chosen another one.
        cache_config.kv_cache_layout = cache_config.kv_cache_layout or "LBNHC"
    planner = _find(_PLANNERS, "get_kv_cache_configs")
    arguments: list[Any] = [vllm_config, [specs], [_MEMORY]]
    if "global_kv_cache_groups" in inspect.signature(planner.get_kv_cache_configs).parameters:
        arguments.append(planner.get_kv_cache_groups(vllm_config, specs))
    config = planner.get_kv_cache_configs(*arguments)[0]
    if config.num_blocks != num_blocks:
        found = f"{config.num_blocks} blocks"
        raise refusal("configuration", found, f"{num_blocks}, by num_gpu_blocks_override")
    return config


def allocate(vllm_config: Any, config: Any) -> RealCaches:
    """Allocate the tensors of a worker and bind them to its layers.

    Args:
        vllm_config: The worker's ``VllmConfig``; its layers are added to it.
        config: A result of :func:`make_config`.
    """
    import torch

    utils = vllm("v1.worker.utils")
    backend = vllm("v1.attention.backends.flash_attn").FlashAttentionBackend
    specs = {name: g.kv_cache_spec for g in config.kv_cache_groups for name in g.layer_names}
    if hasattr(utils, "allocate_kv_cache"):
        layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
        tensors = utils.allocate_kv_cache(config, torch.device("cpu"), layout)
        slots = [tensors[name].view(torch.int32).permute(0, 2, 1, 3) for name in specs]
    else:
        memory = _memory(config)
        made = {name: _tensor(backend, config, memory[name]) for name in specs}
        tensors = {name: tensor for name, (tensor, _) in made.items()}
        slots = [view for _, view in made.values()]
    layers = vllm_config.compilation_config.static_forward_context
    layer_class = _layer_class()
    for name, spec in specs.items():
        layers[name] = layer_class(backend, spec)
    values = {
        "kv_caches": tensors,
        "forward_context": layers,
        "runner_kv_caches": [],
        "num_attn_module": 1,
        "kv_cache_groups": config.kv_cache_groups,
        "layer_kv_caches": tensors,
    }
    utils.bind_kv_cache(**known_arguments(utils.bind_kv_cache, values))
    return RealCaches(config, tensors, slots)


def _memory(config: Any) -> dict[str, torch.Tensor]:
    """The memory of each layer up to 0.31; layers of several groups share it."""
    import torch

    return {
        name: memory
        for tensor in config.kv_cache_tensors
        for memory in [torch.zeros(tensor.size, dtype=torch.int8).view(torch.float32)]
        for name in tensor.shared_by
    }


def _tensor(backend: Any, config: Any, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's tensor up to 0.31, as a model runner shapes it, and its slots."""
    import torch

    block_size = config.kv_cache_groups[0].kv_cache_spec.block_size
    sizes = _NUM_HEADS, _HEAD_SIZE
    shape = backend.get_kv_cache_shape(config.num_blocks, block_size, *sizes)
    # Unlikely sizes show which dimensions are the blocks and the tokens.
    probe = backend.get_kv_cache_shape(1_234_577, 7919 * block_size, *sizes)
    blocks, tokens = probe.index(1_234_577), probe.index(7919 * block_size)
    order = _stride_order(backend, len(shape))
    tensor = memory.view([shape[i] for i in order]).permute(
        *(order.index(i) for i in range(len(order)))
    )
    rest = [i for i in range(len(shape)) if i not in (blocks, tokens)]
    return tensor, tensor.view(torch.int32).permute(blocks, tokens, *rest)


def _stride_order(backend: Any, num_dims: int) -> tuple[int, ...]:
    """The dimensions in the order of memory: those of the NHD layout, vLLM's default."""
    try:
        order: tuple[int, ...] = backend.get_kv_cache_stride_order()
    except (AttributeError, NotImplementedError, AssertionError):
        # It reads the current configuration; without one the result is the identity.
        order = tuple(range(num_dims))
    return order


def _layer_class() -> type:
    """A class of attention layers without weights, which connectors ask for backend and cache."""
    attention: Any = _find(_LAYERS, "Attention").Attention

    class Layer(attention):  # type: ignore[misc]
        def __init__(self, backend: Any, spec: Any) -> None:
            self.__dict__.update(_backend=backend, _spec=spec, kv_cache=None)

        def __setattr__(self, name: str, value: object) -> None:
            self.__dict__[name] = value

        def get_attn_backend(self) -> Any:
            return self._backend

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            return self._spec

    return Layer


def _find(names: tuple[str, ...], attribute: str) -> Any:
    for name in names:
        try:
            module = vllm(name)
        except ImportError:
            continue
        if hasattr(module, attribute):
            return module
    wanted = " or ".join(f"vllm.{name}" for name in names)
    raise refusal("configuration", f"no {attribute}", f"one in {wanted}")


# --- connectors ---


def supports_several_groups(connector_class: type, vllm_config: Any) -> bool:
    """Whether a connector takes a hybrid cache; since 0.24 the factory checks children too."""
    factory = vllm("distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    if hasattr(factory, "supports_hma_config"):
        return bool(factory.supports_hma_config(vllm_config.kv_transfer_config))
    base = vllm("distributed.kv_transfer.kv_connector.v1.base")
    return hasattr(base, "supports_hma") and bool(base.supports_hma(connector_class))


def has_pending_work(connector: Any) -> bool:
    """Whether a connector needs steps without requests, where the release queries that."""
    query = getattr(connector, "has_pending_push_work", None)
    return query is not None and bool(query())


def is_hook(name: str) -> bool:
    """Whether ``KVConnectorBase_V1`` has a public method of a name."""
    base = vllm("distributed.kv_transfer.kv_connector.v1.base").KVConnectorBase_V1
    return not name.startswith("_") and hasattr(base, name)


def overridden(connector_class: type) -> set[str]:
    """Methods of a connector that are not those of ``KVConnectorBase_V1``."""
    base = vllm("distributed.kv_transfer.kv_connector.v1.base").KVConnectorBase_V1
    return {
        name
        for name in dir(connector_class)
        if getattr(connector_class, name, None) is not getattr(base, name, None)
    }
