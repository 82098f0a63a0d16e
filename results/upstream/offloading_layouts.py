"""``OffloadingConnector`` passes other bytes than the KV cache in some layouts (vLLM 0.33.0).

This script needs no GPU, no model and no kvview. ``python offloading_layouts.py`` prints, for
attention and for Mamba states in each layout, the bytes of a block that the connector passes to its
spec. Expected: all bytes of the block in every layout.
"""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import worker
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    compute_layout_strides,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

NUM_BLOCKS, LAYERS = 8, ["layers.0", "layers.1"]
SPECS: dict[str, Any] = {
    "attention": FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16
    ),
    "Mamba": MambaSpec(block_size=16, shapes=((4, 16, 16),), dtypes=(torch.float32,)),
}


def marked_bytes(kv_spec: Any, layout: KVCacheLayout) -> int:
    """Mark block 3 through the pages of the connector, and count the marks in the KV cache."""
    strides = compute_layout_strides(kv_spec, NUM_BLOCKS, len(LAYERS), layout)
    size = kv_spec.page_size_bytes * NUM_BLOCKS * len(LAYERS)
    place = KVCacheTensor(size, LAYERS, layer_stride=strides[0], block_stride=strides[1])
    config = KVCacheConfig(NUM_BLOCKS, [place], [KVCacheGroupSpec(LAYERS, kv_spec)])
    kv_caches = allocate_kv_cache(config, torch.device("cpu"), layout)

    passed: list[Any] = []
    spec = SimpleNamespace(replicated_layout=False, get_worker=passed.append)
    with patch.object(worker, "derive_canonical_mappings", lambda *_: {}):
        worker.OffloadingConnectorWorker(spec, None, config).register_kv_caches(kv_caches)
    for page in passed[0].tensors:
        page.tensor[3] = 1
    return sum(int((kv[3].view(torch.int8) == 1).sum()) for kv in kv_caches.values())


for name, kv_spec in SPECS.items():
    expected = kv_spec.page_size_bytes * len(LAYERS)
    for layout in KVCacheLayout:
        marked = marked_bytes(kv_spec, layout)
        wrong = "" if marked == expected else "WRONG"
        print(f"{name}, {layout.name}: {marked} of {expected} bytes", wrong)
