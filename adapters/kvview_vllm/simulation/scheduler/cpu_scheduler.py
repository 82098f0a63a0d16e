"""A real vLLM ``Scheduler`` without a model, which runs on any machine.

The scheduler, its pool and the connectors are vLLM's. The configuration names a model that is never
built, and the outputs of a model runner are simulated.

No part of vLLM is patched, and vLLM itself chooses the platform. Calls receive only the arguments
that the installed release has (:mod:`kvview_vllm.releases.compat.calls`).

Source: vllm/config and vllm/v1/core/sched/scheduler.py, 0.11.0 to 0.33.0.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvview import (
    CacheGroup,
    ChunkedLocalAttention,
    FullAttention,
    Mamba,
    SlidingWindow,
    UnsupportedEngineError,
)
from kvview_vllm.releases import installed
from kvview_vllm.releases.build import samples
from kvview_vllm.releases.compat.calls import (
    complete_torch,
    known_arguments,
    make_known,
    set_concurrent_batches,
    set_prefix_match_unit,
)
from kvview_vllm.releases.compat.versions import vllm

if TYPE_CHECKING:
    from kvview.testing.connector.scenario.scenario import Scenario

MAX_TOKENS = 512
"""Tokens of the longest request, prompt and output together."""

END_TOKEN = 2
"""Token that ends a request before it has all of its tokens."""

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V1": "1",
}
_HEADS, _HEAD_SIZE = 2, 32
_LAYERS, _KV_HEADS = "num_hidden_layers", "num_key_value_heads"
_WIDTHS = ("hidden_size", "num_attention_heads", _KV_HEADS)  # divided among ranks
_MODEL: dict[str, Any] = {
    "architectures": ["KVViewTestModel"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    _LAYERS: 2,
    "num_attention_heads": 4,
    _KV_HEADS: _HEADS,
    "head_dim": _HEAD_SIZE,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": END_TOKEN,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
_SPECS: dict[type[CacheGroup], str] = {
    FullAttention: "FullAttentionSpec",
    SlidingWindow: "SlidingWindowSpec",
    ChunkedLocalAttention: "ChunkedLocalAttentionSpec",
    Mamba: "MambaSpec",
}
_RECOMPUTE = {"kv_load_failure_policy": "recompute"}


def prepare() -> None:
    """Set the environment variables that vLLM reads; call this before an import of vLLM."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    complete_torch()
    for name in ("vllm", "torch._library.triton"):  # late releases of vLLM configure no level
        logging.getLogger(name).setLevel(logging.ERROR)


def connector_config(target: str, **options: Any) -> dict[str, Any]:
    """Make the ``kv_transfer_config`` of a kvview connector."""
    return {
        "kv_connector": "KVViewConnector",
        "kv_connector_module_path": "kvview_vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connector": target, "options": options},
    }


def multi_config(*children: dict[str, Any]) -> dict[str, Any]:
    """Make the ``kv_transfer_config`` of vLLM's ``MultiConnector`` over some children."""
    policy = known_arguments(vllm("config").KVTransferConfig, _RECOMPUTE)
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [policy | child for child in children]},
    }


# --- configuration ---


def make_vllm_config(
    folder: Path,
    transfer_config: dict[str, Any] | None,
    *,
    block_size: int,
    num_groups: int,
    num_blocks: int,
    has_states: bool = False,
    prefix_match_unit: int | None = None,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = MAX_TOKENS,
    steps_in_flight: int = 1,
    num_drafts: int = 0,
    has_lookahead: bool = False,
    ranks: tuple[int, int] = (1, 1),
    publishes_events: bool = False,
) -> Any:
    """Make a ``VllmConfig`` for the CPU.

    Args:
        folder: Folder for the model's configuration.
        transfer_config: Arguments of ``KVTransferConfig``; None for no connector. The
            policy for failed loads is ``recompute``.
        block_size: Tokens of a block.
        num_groups: KV-cache groups.
        num_blocks: Blocks of the pool.
        has_states: Whether the model has Mamba groups, whose states are then cached.
        prefix_match_unit: Number of tokens of a hash, if users may choose it (0.32.0); by default
            as few as the sizes of the groups allow.
        max_num_seqs: Requests that may run together.
        max_num_batched_tokens: Token budget of one step.
        steps_in_flight: Number of steps that may be launched before the output of the first one is
            processed; with several steps, scheduling is asynchronous.
        num_drafts: Maximum number of draft tokens in a step; 0 for no speculative decoding.
        has_lookahead: Whether a step also allocates slots for the next step's draft tokens, as for
            a draft model.
        ranks: Tensor-parallel and pipeline-parallel size; the model has as many heads and layers as
            all ranks need together.
        publishes_events: Whether the engine makes KV events, which nothing receives.
    """
    folder.mkdir(parents=True, exist_ok=True)
    widths = {name: _MODEL[name] * ranks[0] for name in _WIDTHS}
    model_of_ranks = _MODEL | widths | {_LAYERS: _MODEL[_LAYERS] * ranks[1]}
    (folder / "config.json").write_text(json.dumps(model_of_ranks))
    config = vllm("config")
    _register_model()
    model = make_known(
        config.ModelConfig,
        model=str(folder),
        tokenizer=str(folder),
        dtype="float32",
        seed=0,
        max_model_len=MAX_TOKENS,
        skip_tokenizer_init=True,
        enforce_eager=True,
    )
    scheduler = make_known(
        config.SchedulerConfig,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_batched_tokens, max_num_seqs),
        max_model_len=MAX_TOKENS,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=False,
        scheduler_cls="kvview_vllm.scheduler.ViewScheduler",
    )
    cache = make_known(
        config.CacheConfig,
        block_size=16,
        gpu_memory_utilization=0.5,
        swap_space=0,
        cache_dtype="auto",
        enable_prefix_caching=True,
        mamba_cache_mode="align" if has_states else "none",
    )
    vllm_config = config.VllmConfig(
        model_config=model,
        scheduler_config=scheduler,
        cache_config=cache,
        device_config=config.DeviceConfig("cpu"),
        kv_transfer_config=transfer_config
        and make_known(config.KVTransferConfig, **_RECOMPUTE | transfer_config),
    )
    # Set after the construction, because vLLM compares the number of ranks with the GPUs of the
    # machine, and old releases only accept some sizes of blocks.
    parallel = vllm_config.parallel_config
    parallel.tensor_parallel_size, parallel.pipeline_parallel_size = ranks
    parallel.world_size = ranks[0] * ranks[1]
    vllm_config.cache_config.block_size = block_size
    vllm_config.cache_config.num_gpu_blocks = num_blocks
    set_prefix_match_unit(vllm_config, prefix_match_unit)
    if publishes_events:
        vllm_config.kv_events_config = config.KVEventsConfig(
            enable_kv_cache_events=True, publisher="null"
        )
    # Set after the construction, because the CPU platform switches it off.
    vllm_config.scheduler_config.async_scheduling = steps_in_flight > 1
    if steps_in_flight > 1:
        set_concurrent_batches(vllm_config, steps_in_flight)
    if num_drafts:
        vllm_config.speculative_config = _make_speculative_config(
            vllm_config, num_drafts, has_lookahead
        )
    if num_groups > 1:
        vllm_config.scheduler_config.disable_hybrid_kv_cache_manager = False
    return vllm_config


def sizes_of(scenario: Scenario) -> dict[str, Any]:
    """Return the arguments of :func:`make_vllm_config` for a scenario."""
    return {
        "num_blocks": scenario.num_gpu_blocks,
        "max_num_seqs": scenario.max_running,
        "max_num_batched_tokens": scenario.max_tokens_per_step,
        "steps_in_flight": scenario.steps_in_flight,
        "num_drafts": scenario.most_drafts,
        "has_lookahead": scenario.lookahead_tokens > 0,
    }


def _make_speculative_config(vllm_config: Any, num_drafts: int, has_lookahead: bool) -> Any:
    config = make_known(
        vllm("config").SpeculativeConfig,
        method="ngram",
        num_speculative_tokens=num_drafts,
        prompt_lookup_min=1,
        prompt_lookup_max=2,
        target_model_config=vllm_config.model_config,
        target_parallel_config=vllm_config.parallel_config,
    )
    if has_lookahead:
        config.method = "draft_model"  # set afterwards, because no such model exists
    return config


def make_kv_cache_config(
    groups: Sequence[CacheGroup],
    num_blocks: int,
    layers_per_group: int = 1,
    stage: range | None = None,
) -> Any:
    """Make a ``KVCacheConfig`` whose groups share the memory of their layers.

    Args:
        groups: The KV-cache groups.
        num_blocks: Blocks of the pool.
        layers_per_group: Layers of each group.
        stage: The layers of a stage of pipeline parallelism; None for all layers.

    Raises:
        UnsupportedEngineError: The simulation cannot make a spec for this kind of group.
    """
    import torch

    interface = vllm("v1.kv_cache_interface")
    specs: list[Any] = []
    page = 2 * _HEADS * _HEAD_SIZE * 4 * groups[0].block_size  # of keys and values
    for group in groups:
        if type(group) not in _SPECS:
            raise UnsupportedEngineError(
                f"the simulation cannot make a vLLM KV-cache spec for {type(group).__name__}"
            )
        values = {"attention_chunk_size": None, **vars(group)}
        values |= {"shapes": ((page // 4,),), "dtypes": (torch.float32,)}
        del values["block_size"]
        specs.append(
            samples.make_attention_spec(
                _SPECS[type(group)],
                group.block_size,
                _HEADS,
                _HEAD_SIZE,
                mamba_cache_mode="align",
                **values,
            )
        )
    stage = range(layers_per_group) if stage is None else stage
    names = [
        [f"model.layers.{first + layer}.self_attn.attn" for layer in stage]
        for first in range(0, len(specs) * layers_per_group, layers_per_group)
    ]
    page = specs[0].page_size_bytes
    tensors = [
        make_known(
            interface.KVCacheTensor,
            size=page * num_blocks,
            shared_by=[group_names[layer] for group_names in names],
            layers=[names[0][layer]],
            layer_stride=page,
            block_stride=page,
        )
        for layer in range(len(stage))
    ]
    return make_known(
        interface.KVCacheConfig,
        num_blocks=num_blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=[
            make_known(interface.KVCacheGroupSpec, layer_names=layers, kv_cache_spec=spec)
            for layers, spec in zip(names, specs, strict=True)
        ],
    )


def make_scheduler(
    vllm_config: Any, kv_cache_config: Any, geometry: Any, *, plain: bool = False
) -> Any:
    """Make a scheduler and its connector; the configuration decides whether it is asynchronous.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        kv_cache_config: vLLM's ``KVCacheConfig``.
        geometry: Result of :func:`~kvview_vllm.geometry.read_geometry` for both configurations.
        plain: Whether to make vLLM's own class instead of the ``ViewScheduler`` derived from it.
    """
    from kvview_vllm.scheduler import AsyncViewScheduler, ViewScheduler

    is_async = vllm_config.scheduler_config.async_scheduling
    kind: Any = AsyncViewScheduler if is_async else ViewScheduler
    return samples.build_scheduler(
        kind.__base__ if plain else kind,
        vllm_config,
        kv_cache_config,
        geometry.scheduler_block_size,
        geometry.hash_block_size,
        log_stats=True,
    )


def reset_caches(scheduler: Any, *, running_too: bool = False) -> bool:
    """Reset the prefix cache, and the connector if the release can; return False if refused.

    Args:
        scheduler: The scheduler.
        running_too: Whether to preempt running requests, if the release can (0.12.0) and drops
            their outputs in flight (0.27.0). In older releases such an output may end a request
            that computes its prompt again.

    Raises:
        RuntimeError: A block is in use although no request runs.
    """
    running_too &= installed().connector.stale_outputs
    arguments = {"reset_running_requests": running_too, "reset_connector": True}
    return bool(make_known(scheduler.reset_prefix_cache, **arguments))


def make_worker_connector(vllm_config: Any, kv_cache_config: Any, rank: int = 0) -> Any:
    """Make the worker's side of the configured connector, on a rank."""
    vllm_config.parallel_config.rank = rank
    return make_known(
        vllm("distributed.kv_transfer.kv_connector.factory").KVConnectorFactory.create_connector,
        config=vllm_config,
        role=vllm("distributed.kv_transfer.kv_connector.v1.base").KVConnectorRole.WORKER,
        kv_cache_config=kv_cache_config,
    )


def _register_model() -> None:
    """Register a model that never runs, because vLLM imports a real model in another process."""
    import torch

    class KVViewTestModel(torch.nn.Module):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__()

        def embed_input_ids(self, input_ids: Any) -> Any: ...

        get_input_embeddings = embed_input_ids  # its name up to 0.11

        def forward(self, input_ids: Any, positions: Any) -> Any: ...

        def compute_logits(self, hidden_states: Any, *args: Any) -> Any: ...

    vllm("model_executor.models").ModelRegistry.register_model("KVViewTestModel", KVViewTestModel)
