"""``OffloadingConnector`` transfers other blocks if keys come first in memory (vLLM 0.24.0).

No GPU, no model, no kvview: ``python offloading_keys_first.py``. Expected: all elements of page 1
are those of block 1, or an error.
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
)

NUM_BLOCKS = 4
spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
memory = torch.zeros(NUM_BLOCKS * spec.page_size_bytes, dtype=torch.int8)
# The shape of RocmAttentionBackend, in which the model runner views the memory.
cache = memory.view(torch.bfloat16).view(2, NUM_BLOCKS, 16, 2, 64)
place: Any = KVCacheTensor(size=len(memory), shared_by=["layer"])
config = KVCacheConfig(NUM_BLOCKS, [place], [KVCacheGroupSpec(["layer"], spec)])
pages: list[Any] = []
with patch.object(worker.OffloadingConnectorWorker, "_register_handlers", pages.append):
    side = worker.OffloadingConnectorWorker(SimpleNamespace(kv_cache_config=config))
    side.register_kv_caches({"layer": cache})
cache[:, 1] = 1  # keys and values of block 1
page = pages[0].tensors[0].tensor[1].view(torch.bfloat16)
print(f"{int((page == 1).sum())} of {page.numel()} elements of page 1 are those of block 1")
