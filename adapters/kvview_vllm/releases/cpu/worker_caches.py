"""The KV cache of a raw connector's worker: configuration, tensors and layers of the release.

- VSIM-4 Tensors **must** have the shapes and strides that the release allocates for the attention
  backend, made by the release's own functions if it has them.

Source: ``initialize_kv_cache_tensors`` of vllm/v1/worker/gpu_model_runner.py, 0.12.0 to
0.28.0; ``allocate_kv_cache`` of vllm/v1/worker/utils.py since 0.29.0.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_args

from kvview import CacheGroup, ChunkedLocalAttention, FullAttention, Mamba, SlidingWindow
from kvview_vllm.releases.build.samples import make_attention_spec
from kvview_vllm.releases.compat.calls import known_arguments, make_known
from kvview_vllm.releases.compat.versions import refusal, vllm
from kvview_vllm.releases.cpu.runner_caches import in_words, layer_slots, run_allocation

if TYPE_CHECKING:
    import torch

_SPECS: dict[type[CacheGroup], str] = {
    FullAttention: "FullAttentionSpec",
    SlidingWindow: "SlidingWindowSpec",
    ChunkedLocalAttention: "ChunkedLocalAttentionSpec",
}

BLOCK_SIZE = 16
"""Tokens of a block: the smallest that the GPU backends of every release support."""

NUM_LAYERS = 2
_NUM_HEADS, _HEAD_SIZE = 2, 32
BLOCK_BYTES = NUM_LAYERS * BLOCK_SIZE * 2 * _NUM_HEADS * _HEAD_SIZE * 4
"""Bytes of a block in all layers: keys and values in float32."""

_MEMORY = 1 << 32  # bytes for the planner; the number of blocks is overridden
_PLANNERS = ("v1.core.kv_cache_planning", "v1.core.kv_cache_utils")
_MLA_LAYERS = ("model_executor.layers.attention.mla_attention", "attention.layer")
_LAYERS = (
    "model_executor.layers.attention.attention",
    "model_executor.layers.attention",
    "attention.layer",
)


@dataclass(frozen=True)
class CacheKind:
    """A kind of KV cache: the attention backend and the ``KVCacheSpec`` of each layer.

    Args:
        name: Name in reports.
        layers: Backend class and spec, by layer number.
        cache_dtype: Name of the dtype of the cache, which determines shapes up to 0.28.
        first: Number of the first layer in the model.
        num_draft_layers: Number of the last layers that a draft model has.
    """

    name: str
    layers: tuple[tuple[Any, Any], ...]
    cache_dtype: str = "auto"
    first: int = 0
    num_draft_layers: int = 0

    def named_layers(self) -> dict[str, tuple[Any, Any]]:
        """Backend and spec by layer name."""
        return {
            f"model.layers.{number}.self_attn.attn": one
            for number, one in enumerate(self.layers, self.first)
        }

    def draft_layers(self) -> set[str]:
        """Return the names of the layers of a draft model."""
        names = [*self.named_layers()]
        return {*names[len(names) - self.num_draft_layers :]}

    @property
    def has_states(self) -> bool:
        """Whether a layer has Mamba states."""
        return any(hasattr(spec, "mamba_type") for _, spec in self.layers)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class RealCaches:
    """The tensors that a worker registers, and views of them for the simulation.

    Args:
        config: vLLM's ``KVCacheConfig``.
        tensors: The tensors by layer name, as the release registers them.
        slots: A view of each layer's memory, in the order of layers: ``(blocks, states of a block,
            ...)``, in words as wide as the layer allows. Most caches have one state per token.
        of_all_layers: The one tensor of all layers and its backend, which the release registers
            instead (0.12 to 0.28); None without such a tensor.
    """

    config: Any
    tensors: dict[str, torch.Tensor]
    slots: list[torch.Tensor]
    of_all_layers: tuple[torch.Tensor, Any] | None = None

    def register(self, connector: Any) -> None:
        """Register the tensors with the worker's side of a connector, as a model runner does."""
        if self.of_all_layers is None:
            connector.register_kv_caches(self.tensors)
        else:
            connector.register_cross_layers_kv_cache(*self.of_all_layers)


def layouts() -> tuple[str, ...]:
    """Return the names of the memory layouts of the release, the default first."""
    try:
        names = [layout.name for layout in vllm("v1.kv_cache_layout").KVCacheLayout]
    except ImportError:
        return ("NHD", "HND")
    return tuple(sorted(names, key="LBNHC".__ne__))


def use_layout(vllm_config: Any, name: str) -> None:
    """Choose a memory layout for the caches that are made from a configuration.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        name: One of :func:`layouts`. Up to 0.28 the choice holds for the whole process.
    """
    if hasattr(vllm_config.cache_config, "get_resolved_kv_cache_layout"):
        vllm_config.cache_config.kv_cache_layout = name
    else:
        vllm("v1.attention.backends.utils").set_kv_cache_layout(name)


def resolve_layout(vllm_config: Any, name: str, specs: Sequence[Any]) -> None:
    """Choose a memory layout like :func:`use_layout`, if layers of these specs support it.

    Args:
        vllm_config: vLLM's ``VllmConfig``, without a layout.
        name: One of :func:`layouts`.
        specs: The ``KVCacheSpec`` of each layer.

    Raises:
        ValueError: The layers do not support this layout.
    """
    utils = vllm("v1.attention.backends.utils")
    if hasattr(utils, "resolve_kv_cache_layout"):
        utils.resolve_kv_cache_layout(vllm_config, [[name]], specs)
    else:
        use_layout(vllm_config, name)


def metadata_class(backend: Any) -> type:
    """Return the class of a step's metadata, which the builder of an attention backend names.

    Connectors branch on this class, as vLLM's ``ExampleConnector`` does.
    """
    try:
        kinds = backend.get_builder_cls().__mro__
    except Exception:  # the builder needs a GPU or a package
        return SimpleNamespace
    bases = [base for kind in kinds for base in vars(kind).get("__orig_bases__", ())]
    for argument in (one for base in bases for one in get_args(base)):
        found = getattr(argument, "__bound__", argument)
        if isinstance(found, type):
            return found
    return SimpleNamespace


def make_layers(
    groups: Sequence[CacheGroup], stage: int = 0, num_draft_layers: int = 0
) -> CacheKind:
    """Make layers of these groups in turn: FlashAttention in float32, or Mamba states.

    Args:
        groups: Full attention, windows, chunks or Mamba.
        stage: Number of the pipeline-parallel stage.
        num_draft_layers: Number of further layers, of a draft model.
    """
    number = max(NUM_LAYERS, len(groups)) + num_draft_layers
    layers = [_make_layer(groups[index % len(groups)]) for index in range(number)]
    first = stage * (number - num_draft_layers)
    return CacheKind("FlashAttention", tuple(layers), "auto", first, num_draft_layers)


def _make_layer(group: CacheGroup) -> tuple[Any, Any]:
    attention = make_attention_spec(
        _SPECS.get(type(group), "FullAttentionSpec"),
        group.block_size,
        _NUM_HEADS,
        _HEAD_SIZE,
        sliding_window=group.sliding_window if isinstance(group, SlidingWindow) else None,
        attention_chunk_size=(
            group.attention_chunk_size if isinstance(group, ChunkedLocalAttention) else None
        ),
    )
    if not isinstance(group, Mamba):
        return vllm("v1.attention.backends.flash_attn").FlashAttentionBackend, attention
    return make_states(group.block_size, attention.page_size_bytes)


def make_states(block_size: int, page_bytes: int | None) -> tuple[Any, Any]:
    """Make the backend and the spec of a Mamba layer.

    Args:
        block_size: Tokens of a block.
        page_bytes: Bytes of a page with its padding; None for no padding.
    """
    import torch

    spec = make_known(
        vllm("v1.kv_cache_interface").MambaSpec,
        block_size=block_size,
        shapes=((3, 64), (4, 16, 16)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=page_bytes,  # as vLLM's platforms pad it
        mamba_cache_mode="align",
    )
    return vllm("v1.attention.backends.mamba2_attn").Mamba2AttentionBackend, spec


def can_allocate_states() -> bool:
    """Whether the release allocates all layers by a separate function (0.29.0)."""
    return hasattr(vllm("v1.worker.utils"), "allocate_kv_cache")


def make_config(vllm_config: Any, kind: CacheKind, num_blocks: int) -> Any:
    """Make the ``KVCacheConfig`` of one stage; see :func:`make_configs`."""
    return make_configs(vllm_config, [kind], num_blocks)[0]


def make_configs(vllm_config: Any, stages: Sequence[CacheKind], num_blocks: int) -> list[Any]:
    """Make the ``KVCacheConfig`` of each stage, as the release chooses it for these layers.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        stages: The layers of each stage, which the release itself divides into groups.
        num_blocks: Blocks of the pool.
    """
    of_stages = [{name: spec for name, (_, spec) in kind.named_layers().items()} for kind in stages]
    specs = {name: spec for one in of_stages for name, spec in one.items()}
    cache_config = vllm_config.cache_config
    cache_config.num_gpu_blocks_override = num_blocks
    # vLLM refuses to start unless the longest request fits.
    are_one = vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
    share = 1 if are_one else len({*specs.values()})  # a window takes one more block
    longest = min(vllm_config.model_config.max_model_len, (num_blocks // share - 1) * BLOCK_SIZE)
    vllm_config.model_config.max_model_len = longest
    vllm_config.scheduler_config.max_model_len = longest
    if hasattr(cache_config, "get_resolved_kv_cache_layout"):
        # The default of FlashAttention, unless use_layout has chosen another one.
        cache_config.kv_cache_layout = cache_config.kv_cache_layout or "LBNHC"
    planner = _find(_PLANNERS, "get_kv_cache_configs")
    arguments: list[Any] = [vllm_config, of_stages, [_MEMORY] * len(stages)]
    if "global_kv_cache_groups" in inspect.signature(planner.get_kv_cache_configs).parameters:
        arguments.append(planner.get_kv_cache_groups(vllm_config, specs))
    configs: list[Any] = planner.get_kv_cache_configs(*arguments)
    for config in configs:
        if config.num_blocks != num_blocks:
            found = f"{config.num_blocks} blocks"
            expected = f"{num_blocks} blocks, as set by num_gpu_blocks_override"
            raise refusal("configuration", found, expected)
    return configs


def config_of_scheduler(configs: list[Any]) -> Any:
    """Let the release make the scheduler's ``KVCacheConfig`` from those of the stages."""
    make = getattr(vllm("v1.core.kv_cache_utils"), "generate_scheduler_kv_cache_config", None)
    return make(configs) if make else copy.deepcopy(configs[0])


def add_layers(vllm_config: Any, kind: CacheKind) -> None:
    """Add layers to a worker's ``VllmConfig``, as a model does that is loaded."""
    layer_class = _layer_class()
    for name, backend_and_spec in kind.named_layers().items():
        vllm_config.compilation_config.static_forward_context[name] = layer_class(*backend_and_spec)


def allocate(vllm_config: Any, config: Any, kind: CacheKind) -> RealCaches:
    """Allocate the tensors of a worker and bind them to its layers.

    Args:
        vllm_config: The worker's ``VllmConfig``, which has the layers (:func:`add_layers`).
        config: A result of :func:`make_config`.
        kind: Its layers.
    """
    import torch

    named = kind.named_layers()
    order = [name for group in config.kv_cache_groups for name in group.layer_names]
    if not can_allocate_states():
        runner = run_allocation(vllm_config, config, named, kind.cache_dtype)
        tensors = runner.layer_tensors
        slots = [layer_slots(tensors[name], *named[name], kind.cache_dtype) for name in order]
        if runner.cross_layers_kv_cache is None:
            return RealCaches(config, tensors, slots)
        of_all = runner.cross_layers_kv_cache, runner.cross_layers_attn_backend
        return RealCaches(config, tensors, slots, of_all)
    utils = vllm("v1.worker.utils")
    layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
    tensors = utils.allocate_kv_cache(config, torch.device("cpu"), layout)
    slots = [in_words(tensors[name]).permute(0, 2, 1, 3) for name in order]
    values = {
        "kv_caches": tensors,
        "forward_context": vllm_config.compilation_config.static_forward_context,
        "runner_kv_caches": [],
        "num_attn_module": 1,
        "kv_cache_groups": config.kv_cache_groups,
        "layer_kv_caches": tensors,
    }
    utils.bind_kv_cache(**known_arguments(utils.bind_kv_cache, values))
    return RealCaches(config, tensors, slots)


def layer_class_of(is_mla: bool) -> Any:
    """Return vLLM's class of attention layers.

    Args:
        is_mla: Whether the layers have one latent vector for each token.
    """
    name = "MLAAttention" if is_mla else "Attention"
    return getattr(_find(_MLA_LAYERS if is_mla else _LAYERS, name), name)


def _layer_class() -> type:
    """Make a class of layers that have no weights, only the backend and the cache of attention."""
    attention: Any = layer_class_of(is_mla=False)

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
    """Whether a connector accepts a hybrid cache; since 0.24 the factory also checks children."""
    factory = vllm("distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    if hasattr(factory, "supports_hma_config"):
        return bool(factory.supports_hma_config(vllm_config.kv_transfer_config))
    base = vllm("distributed.kv_transfer.kv_connector.v1.base")
    return hasattr(base, "supports_hma") and bool(base.supports_hma(connector_class))


def has_pending_work(connector: Any) -> bool:
    """Whether a connector needs steps without requests; False if the release does not query it."""
    query = getattr(connector, "has_pending_push_work", None)
    return query is not None and bool(query())


def is_hook(name: str) -> bool:
    """Whether ``KVConnectorBase_V1`` has a public method with this name."""
    base = vllm("distributed.kv_transfer.kv_connector.v1.base").KVConnectorBase_V1
    return not name.startswith("_") and hasattr(base, name)


def overridden(connector_class: type) -> set[str]:
    """Return the names that a connector overrides in ``KVConnectorBase_V1`` or adds to it."""
    base = vllm("distributed.kv_transfer.kv_connector.v1.base").KVConnectorBase_V1
    return {
        name
        for name in dir(connector_class)
        if getattr(connector_class, name, None) is not getattr(base, name, None)
    }
