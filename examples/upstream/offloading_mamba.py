"""``OffloadingConnector`` addresses other bytes than the states of a Mamba model (vLLM 0.33.0).

No GPU, no model, no kvview: ``python offloading_mamba.py`` prints, for each layout, the bytes of a
block's states that lie in the page which the connector passes to its spec. Expected: all of them.
"""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import worker
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    compute_layout_strides,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

NUM_BLOCKS, LAYERS = 8, ["layers.0.mixer", "layers.1.mixer"]
SPEC = MambaSpec(block_size=16, shapes=((4, 16, 16),), dtypes=(torch.float32,))

for layout in KVCacheLayout:
    strides = compute_layout_strides(SPEC, NUM_BLOCKS, len(LAYERS), layout)
    size = SPEC.page_size_bytes * NUM_BLOCKS * len(LAYERS)
    place = KVCacheTensor(size, LAYERS, layer_stride=strides[0], block_stride=strides[1])
    config = KVCacheConfig(NUM_BLOCKS, [place], [KVCacheGroupSpec(LAYERS, SPEC)])
    kv_caches = allocate_kv_cache(config, torch.device("cpu"), layout)

    passed: list[Any] = []
    spec = SimpleNamespace(replicated_layout=False, get_worker=passed.append)
    with patch.object(worker, "derive_canonical_mappings", lambda *_: {}):
        connector = worker.OffloadingConnectorWorker(spec, None, config)
        connector.register_kv_caches(kv_caches)

    # Mark block 3 through the pages of the connector, and count the marks in the states.
    for page in passed[0].tensors:
        page.tensor[3] = 1
    marked = sum(int((kv[3].view(torch.int8) == 1).sum()) for kv in kv_caches.values())
    expected = SPEC.page_size_bytes * len(LAYERS)
    print(f"{layout.name}: {marked} of {expected} bytes", "" if marked == expected else "WRONG")
