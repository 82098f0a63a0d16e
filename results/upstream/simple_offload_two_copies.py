"""``SimpleCPUOffloadConnector`` stores a block of two requests twice (vLLM 0.33.0).

Two requests that compute the same prompt in one step have a GPU block each. The connector refuses
to store a block that is in flight, but it compares the ids of the blocks, not their hashes. So host
memory has two copies, and KV events announce both. When the first copy is evicted, an event
removes the block, which the second copy still holds.

The script ``python simple_offload_two_copies.py`` needs no GPU, no model and no kvview. Expected:
``IN_FLIGHT``, and one event.
"""

from types import SimpleNamespace
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler

HASH = make_block_hash_with_group_id(BlockHash(b"a" * 32), 0)

gpu = BlockPool(4, enable_caching=True, hash_block_size=16)
cpu = BlockPool(4, enable_caching=True, hash_block_size=16, enable_kv_cache_events=True)
first, second = gpu.get_new_blocks(2)
for block in (first, second):
    gpu._insert_block_hash(HASH, block, num_tokens=None)

scheduler: Any = object.__new__(SimpleCPUOffloadScheduler)  # the constructor needs a VllmConfig
group = SimpleNamespace(kv_cache_spec=None)
scheduler.__dict__ |= {
    "_gpu_block_pool": gpu,
    "cpu_block_pool": cpu,
    "_in_flight_store_gpu_blocks": {first.block_id},
    "enable_kv_cache_events": True,
    "group_block_sizes": (16,),
    "cpu_kv_cache_config": SimpleNamespace(kv_cache_groups=[group]),
    "kv_event_medium": "CPU",
}
print(f"the same hash in flight: {scheduler._classify_store_candidate(second).name}")

copies = cpu.get_new_blocks(2)
scheduler._process_store_completion(
    [first.block_id, second.block_id], [copy.block_id for copy in copies]
)
print(*(type(event).__name__ for event in cpu.take_events()))
cpu.get_new_blocks(2)  # evicts one copy
is_stored = cpu.get_cached_block(HASH[:-4], [0]) is not None
print(*(type(event).__name__ for event in cpu.take_events()), "still stored:", is_stored)
