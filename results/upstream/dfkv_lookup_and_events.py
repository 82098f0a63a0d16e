"""dfkv's lookup fails in vLLM 0.33, and its KV events name the wrong parent.

dfkv 413263f (release 1.38.0). This script needs no GPU, no model, no server and no kvview;
``integration/vllm/src`` of a clone of dfkv must be in ``PYTHONPATH``, and vLLM 0.23.0, for which
dfkv is made, or 0.33.0. ``python dfkv_lookup_and_events.py`` looks up two stored blocks, and
then stores a prompt of three blocks of which the store has the first. Expected: 32 tokens, and
events in which block 1 follows block 0 and block 2 follows block 1.
"""

import threading
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec

coord: Any = import_module("dfkv_vllm.coordinator")
data: Any = import_module("dfkv_vllm.data")
worker: Any = import_module("dfkv_vllm.worker")

BLOCK = 16
HASHES = [BlockHash(bytes([n]) * 32) for n in range(3)]

spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
coordinator = coord.DfkvStoreCoordinator([KVCacheGroupSpec(["layer"], spec)], BLOCK, BLOCK)
pool = coord.ExternalCachedBlockPool({(0, bytes(each)) for each in HASHES[:2]})
try:
    _, found = coordinator.find_longest_cache_hit(HASHES, len(HASHES) * BLOCK, pool)
    print(f"a lookup of two stored blocks: {found} tokens")
except AttributeError as error:
    print(f"a lookup of two stored blocks: AttributeError: {error}")

metadata = data.KeyMetadata(
    model_name="model", tp_rank=0, pcp_rank=0, dcp_rank=0, pp_rank=0, group_id=0
)
database = data.ChunkedTokenDatabase(metadata, BLOCK)
database.set_kv_caches_base_addr([0])
database.set_block_len([1024])
client: Any = SimpleNamespace(
    batch_exist=lambda keys: [1, 0, 0],  # the store has block 0
    batch_put_sg=lambda keys, addresses, sizes: [0] * len(keys),
)
thread = worker.KVCacheStoreSendingThread(
    client, coordinator, [database], BLOCK, 0, 1, "kv_both", threading.Event(), True
)
thread.add_stored_request("request")
request = data.ReqMeta("request", 3 * BLOCK, ([1, 2, 3],), HASHES, token_ids=list(range(3 * BLOCK)))
thread.add_request(request)
thread._handle_request(request)
numbers: dict[Any, int] = {maybe_convert_block_hash(each): n for n, each in enumerate(HASHES)}
for event in thread.get_kv_events():
    block, parent = event.block_hashes[0], event.parent_block_hash
    print(f"block {numbers[block]} is stored, its parent is {numbers.get(parent)}")
