"""``SimpleCPUOffloadConnector`` fails for a model without attention layers (vLLM 0.33.0).

The script ``python simple_offload_mamba.py`` needs no GPU, no model and no kvview. Expected: no
exception, or an error with a message.
"""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, MambaSpec
from vllm.v1.simple_kv_offload import manager

NUM_BLOCKS, LAYERS = 8, ["layers.0.mixer", "layers.1.mixer"]
SPEC = MambaSpec(block_size=16, shapes=((4, 16, 16),), dtypes=(torch.float32,))

page = SPEC.page_size_bytes
place = KVCacheTensor(page * NUM_BLOCKS * 2, LAYERS, layer_stride=page, block_stride=2 * page)
config = KVCacheConfig(NUM_BLOCKS, [place], [KVCacheGroupSpec(LAYERS, SPEC)])
parallel = SimpleNamespace(decode_context_parallel_size=1)
vllm_config: Any = SimpleNamespace(kv_events_config=None, parallel_config=parallel)
with patch.object(
    manager.SimpleCPUOffloadScheduler, "_derive_cpu_config", lambda self, given, *_: given
):
    manager.SimpleCPUOffloadScheduler(vllm_config, config, 1 << 20, 16, 16)
