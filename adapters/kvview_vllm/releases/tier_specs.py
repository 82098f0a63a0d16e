"""vLLM's own tiering spec, made without a model: for tiers that are tried, or judged.

Source: ``OffloadingConfig``, vllm/v1/kv_offload/config.py, 0.26.0 to 0.33.0; before that
``OffloadingSpec`` reads a ``VllmConfig``, vllm/v1/kv_offload/base.py.
"""

from __future__ import annotations

import types
import uuid
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from kvview.tier import Namespace
from kvview_vllm.releases.calls import make_known
from kvview_vllm.releases.tiers import tier_seam

_TOKENS = 16
_HEADS, _HEAD_SIZE, _DTYPE_BYTES = 8, 128, 2
PAGE_BYTES = 2 * _TOKENS * _HEADS * _HEAD_SIZE * _DTYPE_BYTES
"""Of a block, where a model's layers say it (before 0.26)."""


def make_tiering_spec(
    extra: Mapping[str, Any],
    namespace: Namespace,
    page_bytes: int = PAGE_BYTES,
    *,
    publishes_events: bool = False,
) -> Any:
    """What vLLM makes of ``kv_connector_extra_config``; its ``get_manager`` has the tiers.

    Args:
        extra: The user's, with ``spec_name`` and ``cpu_bytes_to_use``.
        namespace: The model, and what else vLLM tells a tier.
        page_bytes: Of a block; before 0.26 only :data:`PAGE_BYTES`.
        publishes_events: Whether the engine publishes KV events.
    """
    factory = import_module("vllm.v1.kv_offload.factory").OffloadingSpecFactory
    engine = uuid.uuid4().hex
    tensor, pipeline = namespace.tensor_parallel, namespace.pipeline_parallel
    parallel: dict[str, Any] = {
        **dict.fromkeys(("world_size", "pcp_size", "dcp_size"), 1),
        **dict.fromkeys(("tp_size", "tensor_parallel_size"), tensor),
        **dict.fromkeys(("pp_size", "pipeline_parallel_size"), pipeline),
        **dict.fromkeys(("decode_context_parallel_size", "prefill_context_parallel_size"), 1),
        **dict.fromkeys(("data_parallel_index", "data_parallel_rank"), 0),
        "rank": namespace.rank,
        "data_parallel_size": 1,
        "data_parallel_rank_local": None,
        "is_parallelism_agnostic": False,
    }
    tokens = namespace.block_size or _TOKENS
    layer = namespace.layout or "layer"
    if tier_seam().config_objects:
        config = import_module("vllm.v1.kv_offload.config")
        group = make_known(
            config.OffloadingGroupConfig,
            tokens_per_block=tokens,
            layer_names=(layer,),
            group_id=0,
        )
        cache = make_known(config.OffloadingCacheConfig, tokens_per_hash=tokens, blocks_per_chunk=1)
        model = make_known(
            config.OffloadingModelConfig, name=namespace.model, dtype=namespace.kv_dtype
        )
        made = make_known(
            config.OffloadingConfig,
            groups=(group,),
            worker_kv_bytes_per_block=page_bytes,
            enable_kv_cache_events=publishes_events,
            extra_config=dict(extra),
            engine_id=engine,
            model=model,
            cache=cache,
            parallel=make_known(config.OffloadingParallelConfig, **parallel),
        )
        return factory.create_spec(made)
    import torch

    interface = import_module("vllm.v1.kv_cache_interface")
    spec = make_known(
        interface.FullAttentionSpec,
        block_size=_TOKENS,
        num_kv_heads=_HEADS,
        head_size=_HEAD_SIZE,
        dtype=torch.bfloat16,
    )
    caches = interface.KVCacheConfig(
        num_blocks=4,
        kv_cache_tensors=[interface.KVCacheTensor(size=PAGE_BYTES * 4, shared_by=[layer])],
        kv_cache_groups=[interface.KVCacheGroupSpec([layer], spec)],
    )
    transfer = types.SimpleNamespace(kv_connector_extra_config=dict(extra), engine_id=engine)
    events = types.SimpleNamespace(enable_kv_cache_events=publishes_events)
    made = types.SimpleNamespace(
        kv_transfer_config=transfer,
        kv_events_config=events,
        instance_id=engine,
        parallel_config=types.SimpleNamespace(**parallel),
        cache_config=types.SimpleNamespace(
            block_size=_TOKENS,
            hash_block_size=None,
            cache_dtype="auto",
            enable_prefix_caching=True,
            prefix_match_unit=None,
        ),
        model_config=types.SimpleNamespace(model=namespace.model, dtype=torch.bfloat16),
    )
    return factory.create_spec(made, caches)
