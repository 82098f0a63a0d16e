"""LMCache's adapter starts no load before a full CUDA graph (LMCache 0.5.6, vLLM 0.33.0).

Model Runner V2 calls ``start_load_kv`` before it replays a full graph. No forward context exists
there, so ``ActiveKVConnector`` makes one without attention metadata, and passes the metadata as a
keyword argument. The adapter reads the context only.

This script needs no GPU, no model and no kvview. ``python lmcache_full_graphs.py`` starts a load of
one request in both ways, and prints how often the adapter reads its cache. Expected: once in each.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from lmcache.integration.vllm.vllm_v1_adapter import (
    LMCacheConnectorMetadata,
    LMCacheConnectorV1Impl,
)

METADATA = {"layer": object()}


def num_reads(in_context: object, **passed: Any) -> int:
    """Start the load of 16 tokens, and return how often the adapter reads its cache."""
    load = SimpleNamespace(can_load=True, vllm_cached_tokens=0, lmcache_cached_tokens=16)
    request = SimpleNamespace(
        load_spec=load,
        token_ids=list(range(16)),
        slot_mapping=torch.arange(16),
        req_id="request",
        request_configs=None,
    )
    metadata = LMCacheConnectorMetadata()
    metadata.requests.append(request)
    cache = MagicMock()
    cache.retrieve.return_value = torch.ones(16, dtype=torch.bool)
    adapter: Any = SimpleNamespace(  # LMCache's own needs a VllmConfig
        kv_caches={"layer": torch.zeros(1)},
        lmcache_engine=cache,
        device="cpu",
        use_layerwise=False,
        async_loading=False,
        _lmcache_chunk_size=16,
        _stats_monitor=MagicMock(),
        _parent=SimpleNamespace(_get_connector_metadata=lambda: metadata),
        _invalid_block_ids=set(),
        layerwise_retrievers=defaultdict(list),
    )
    context: Any = SimpleNamespace(attn_metadata=in_context)
    LMCacheConnectorV1Impl.start_load_kv(adapter, context, **passed)
    return int(cache.retrieve.call_count)


print("metadata in the forward context:", num_reads(METADATA))
print("metadata as a keyword argument:", num_reads(None, attn_metadata=METADATA))
