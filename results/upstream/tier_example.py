"""The tier ``example`` reports loads as successful but copies no bytes (vLLM 0.33.0).

This script needs no GPU, no model and no kvview. ``python tier_example.py`` stores a chunk,
overwrites the chunk in host memory, loads it, and prints its first byte. Expected: 1.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager

host = np.ones((4, 64), np.uint8)
tier = ExampleSecondaryTierManager(SimpleNamespace(), memoryview(host.data), "example")
request: Any = None
tier.submit_store(TransferJob(1, [b"key"], np.array([0]), False, request))
host[0] = 0  # the chunk is evicted from host memory, and other KV takes its place
tier.submit_load(TransferJob(2, [b"key"], np.array([0]), True, request))
print(f"lookup: {tier.lookup(b'key', request)}")
print(f"loads: {[job.success for job in tier.get_finished_jobs()][1:]}")
print(f"first byte: {host[0, 0]}")
