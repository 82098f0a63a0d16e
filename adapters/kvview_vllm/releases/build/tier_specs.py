"""vLLM's own tiering spec, which is made without a model, for checks and trials of tiers.

Source: ``OffloadingConfig``, vllm/v1/kv_offload/config.py, 0.26.0 to 0.33.0; before that
``OffloadingSpec`` reads a ``VllmConfig``, vllm/v1/kv_offload/base.py.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from kvview.tier import Namespace
from kvview_vllm.releases.build.samples import make_attention_spec
from kvview_vllm.releases.compat.calls import make_known
from kvview_vllm.releases.compat.tiers import tier_seam
from kvview_vllm.releases.compat.versions import vllm

_TOKENS = 16
_HEADS, _HEAD_SIZE, _DTYPE_BYTES = 8, 128, 2
PAGE_BYTES = 2 * _TOKENS * _HEADS * _HEAD_SIZE * _DTYPE_BYTES
"""Bytes of a block in releases in which the layers of a model determine them (before 0.26)."""


def make_tiering_spec(
    extra: Mapping[str, Any],
    namespace: Namespace,
    page_bytes: int = PAGE_BYTES,
    *,
    publishes_events: bool = False,
) -> Any:
    """Make vLLM's tiering spec from a ``kv_connector_extra_config``.

    Args:
        extra: The user's configuration, with ``spec_name`` and ``cpu_bytes_to_use``.
        namespace: The model, and the other facts that vLLM passes to a tier.
        page_bytes: Bytes of a block; before 0.26 they must be :data:`PAGE_BYTES`.
        publishes_events: Whether the engine publishes KV events.
    """
    factory = vllm("v1.kv_offload.factory").OffloadingSpecFactory
    engine = uuid.uuid4().hex
    tensor, pipeline = namespace.tensor_parallel, namespace.pipeline_parallel
    parallel: dict[str, Any] = {
        **dict.fromkeys(("world_size", "pcp_size", "dcp_size", "data_parallel_size"), 1),
        **dict.fromkeys(("tp_size", "tensor_parallel_size"), tensor),
        **dict.fromkeys(("pp_size", "pipeline_parallel_size"), pipeline),
        **dict.fromkeys(("decode_context_parallel_size", "prefill_context_parallel_size"), 1),
        **dict.fromkeys(("data_parallel_index", "data_parallel_rank"), 0),
        "rank": namespace.rank,
        "data_parallel_rank_local": None,
        "is_parallelism_agnostic": False,
    }
    layer = namespace.layout or "layer"
    if tier_seam().config_objects:
        config = vllm("v1.kv_offload.config")
        tokens = namespace.block_size or _TOKENS
        group = {"tokens_per_block": tokens, "layer_names": (layer,), "group_id": 0}
        cache = {"tokens_per_hash": tokens, "blocks_per_chunk": 1}
        model = {"name": namespace.model, "dtype": namespace.kv_dtype}
        made = make_known(
            config.OffloadingConfig,
            groups=(make_known(config.OffloadingGroupConfig, **group),),
            worker_kv_bytes_per_block=page_bytes,
            enable_kv_cache_events=publishes_events,
            extra_config=dict(extra),
            engine_id=engine,
            model=make_known(config.OffloadingModelConfig, **model),
            cache=make_known(config.OffloadingCacheConfig, **cache),
            parallel=make_known(config.OffloadingParallelConfig, **parallel),
        )
        return factory.create_spec(made)
    import torch

    interface = vllm("v1.kv_cache_interface")
    spec = make_attention_spec(
        "FullAttentionSpec", _TOKENS, _HEADS, _HEAD_SIZE, dtype=torch.bfloat16
    )
    tensor = make_known(interface.KVCacheTensor, size=PAGE_BYTES * 4, shared_by=[layer])
    group = make_known(interface.KVCacheGroupSpec, layer_names=[layer], kv_cache_spec=spec)
    caches = make_known(
        interface.KVCacheConfig, num_blocks=4, kv_cache_tensors=[tensor], kv_cache_groups=[group]
    )
    made = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=dict(extra), engine_id=engine),
        kv_events_config=SimpleNamespace(enable_kv_cache_events=publishes_events),
        instance_id=engine,
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(
            block_size=_TOKENS,
            hash_block_size=None,
            cache_dtype="auto",
            enable_prefix_caching=True,
            prefix_match_unit=None,
        ),
        model_config=SimpleNamespace(model=namespace.model, dtype=torch.bfloat16),
    )
    return factory.create_spec(made, caches)
