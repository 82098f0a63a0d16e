"""The KV cache of a raw connector's worker: configuration, tensors and layers of the release.

- VSIM-4 Tensors **must** have the shapes and strides that the release allocates for
  FlashAttention, by its own functions where it has them.

Source: ``initialize_kv_cache_tensors`` of vllm/v1/worker/gpu_model_runner.py, 0.12.0 to
0.33.0; ``allocate_kv_cache`` of vllm/v1/worker/utils.py since 0.32.0.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvview import CacheGroup, FullAttention, SlidingWindow
from kvview_vllm.releases.calls import known_arguments, make_known
from kvview_vllm.releases.versions import refusal

if TYPE_CHECKING:
    import torch

_SPECS: dict[type[CacheGroup], str] = {
    FullAttention: "FullAttentionSpec",
    SlidingWindow: "SlidingWindowSpec",
}

BLOCK_SIZE = 16
"""Tokens of a block: the smallest that the GPU backends of every release serve."""

NUM_LAYERS = 2
_NUM_HEADS, _HEAD_SIZE = 2, 32
_MEMORY = 1 << 32  # bytes that there are; the number of blocks is overridden
_PLANNERS = ("vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_utils")
_LAYERS = (
    "vllm.model_executor.layers.attention.attention",
    "vllm.model_executor.layers.attention",
    "vllm.attention.layer",
)


@dataclass(frozen=True)
class RealCaches:
    """What a worker registers, and how the simulation looks at it.

    Args:
        config: vLLM's ``KVCacheConfig``.
        tensors: By layer name, as the release registers them.
        slots: Of the same memory, per layer in order, a view ``(blocks, tokens of a block,
            ...)`` of 32-bit words: what belongs to one token.
    """

    config: Any
    tensors: dict[str, torch.Tensor]
    slots: list[torch.Tensor]


def layouts() -> tuple[str, ...]:
    """Names of the memory layouts of the release, the default first."""
    module = _import("vllm.v1.kv_cache_layout")
    if module is None:
        return ("NHD", "HND")
    names = [layout.name for layout in module.KVCacheLayout]
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
        importlib.import_module("vllm.v1.attention.backends.utils").set_kv_cache_layout(name)


def make_config(vllm_config: Any, groups: Sequence[CacheGroup], num_blocks: int) -> Any:
    """The ``KVCacheConfig`` that the release plans for layers of these kinds.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        groups: Kinds of the layers; what becomes of them the release says.
        num_blocks: Blocks of the pool.
    """
    import torch

    interface: Any = importlib.import_module("vllm.v1.kv_cache_interface")
    specs = {
        f"model.layers.{index}.self_attn.attn": make_known(
            getattr(interface, _SPECS[type(groups[index % len(groups)])]),
            **{"sliding_window": None, **vars(groups[index % len(groups)])},
            num_kv_heads=_NUM_HEADS,
            head_size=_HEAD_SIZE,
            dtype=torch.float32,
            use_mla=False,
        )
        for index in range(NUM_LAYERS)
    }
    cache_config = vllm_config.cache_config
    cache_config.num_gpu_blocks_override = num_blocks
    # No more than fits: vLLM refuses to start otherwise.
    are_one = vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
    share = 1 if are_one else len(groups)  # a window takes a block more
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
    """Allocate the tensors of a worker, and bind them to its layers.

    Args:
        vllm_config: The worker's ``VllmConfig``: its layers are made known to it.
        config: As :func:`make_config` makes it.
    """
    import torch

    utils: Any = importlib.import_module("vllm.v1.worker.utils")
    backend: Any = importlib.import_module(
        "vllm.v1.attention.backends.flash_attn"
    ).FlashAttentionBackend
    names = [name for group in config.kv_cache_groups for name in group.layer_names]
    if hasattr(utils, "allocate_kv_cache"):
        layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
        tensors = utils.allocate_kv_cache(config, torch.device("cpu"), layout)
        slots = [tensors[name].view(torch.int32).permute(0, 2, 1, 3) for name in names]
    else:
        memory = _memory(config)
        made = {name: _tensor(backend, config, memory[name]) for name in names}
        tensors = {name: tensor for name, (tensor, _) in made.items()}
        slots = [view for _, view in made.values()]
    layers = vllm_config.compilation_config.static_forward_context
    layer_class = _layer_class()
    specs = {name: g.kv_cache_spec for g in config.kv_cache_groups for name in g.layer_names}
    for name in names:
        layers[name] = layer_class(backend, specs[name])
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
    """Up to 0.31, the memory of each layer; layers of several groups share it."""
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
    shape = _shape(backend, config.num_blocks, block_size)
    probe = _shape(backend, 1_234_577, 7919 * block_size)
    blocks, tokens = probe.index(1_234_577), probe.index(7919 * block_size)
    order = _stride_order(backend, len(shape))
    tensor = memory.view([shape[i] for i in order]).permute(
        *(order.index(i) for i in range(len(order)))
    )
    rest = [i for i in range(len(shape)) if i not in (blocks, tokens)]
    return tensor, tensor.view(torch.int32).permute(blocks, tokens, *rest)


def _shape(backend: Any, num_blocks: int, block_size: int) -> tuple[int, ...]:
    shape: tuple[int, ...] = backend.get_kv_cache_shape(
        num_blocks, block_size, _NUM_HEADS, _HEAD_SIZE
    )
    return shape


def _stride_order(backend: Any, num_dims: int) -> tuple[int, ...]:
    """Dimensions in the order of memory: those of the NHD layout, vLLM's default."""
    try:
        order: tuple[int, ...] = backend.get_kv_cache_stride_order()
    except (AttributeError, NotImplementedError, AssertionError):
        # It asks the current configuration; what it answers without one is the identity.
        order = tuple(range(num_dims))
    return order


def _layer_class() -> type:
    """Attention layers without weights: a connector asks them for their backend and cache."""
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
        module = _import(name)
        if module is not None and hasattr(module, attribute):
            return module
    raise refusal("configuration", f"no {attribute}", f"one in {' or '.join(names)}")


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


# --- connectors ---


def supports_several_groups(connector_class: type, vllm_config: Any) -> bool:
    """Whether a connector takes a hybrid cache; since 0.24 the factory says so of children too."""
    module: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory")
    factory = module.KVConnectorFactory
    if hasattr(factory, "supports_hma_config"):
        return bool(factory.supports_hma_config(vllm_config.kv_transfer_config))
    base: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
    return hasattr(base, "supports_hma") and bool(base.supports_hma(connector_class))


def has_pending_work(connector: Any) -> bool:
    """Whether a connector wants steps without requests, where it is asked."""
    ask = getattr(connector, "has_pending_push_work", None)
    return ask is not None and bool(ask())


def overridden(connector_class: type, base: type) -> set[str]:
    """Methods of a connector that are not those of its base."""
    return {
        name
        for name in dir(connector_class)
        if getattr(connector_class, name, None) is not getattr(base, name, None)
    }
