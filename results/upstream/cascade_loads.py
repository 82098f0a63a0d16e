"""Cascade promises tokens that it does not load, and has keys of tokens only (vLLM 0.21.0).

A load has the length of the whole prompt instead of the promised tokens. If the stored chunk is
shorter, the copy raises; ``_load_layer_chunks`` logs a warning, and the request reads KV that was
never written.

This script needs no GPU, no model, no kvview and no daemon. ``python cascade_loads.py`` (with the
repository in ``PYTHONPATH``) prints the tokens that a request is promised and those that its load
copies (expected: the same), what the copy does, and the key of two requests (expected: another).
"""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

connector_class: Any = import_module("adapter.vllm.connector_v21").DiskCacheConnector
prefix_key = import_module("adapter.vllm.hashing").prefix_key
inject_kv_into_layer = import_module("adapter.vllm.tensor_ops").inject_kv_into_layer

connector = connector_class.__new__(connector_class)
connector._block_size = 16
connector._requests_need_load = {}
connector._go_match = lambda tokens, items: {"matched_tokens": 16}  # one block is stored

tokens = list(range(36))
request: Any = SimpleNamespace(request_id="r", prompt_token_ids=tokens, mm_features=[])
promised, _ = connector.get_num_new_matched_tokens(request, 0)
connector.update_state_after_alloc(request, None, promised)
new: Any = SimpleNamespace(
    req_id="r", prompt_token_ids=tokens, mm_features=[], block_ids=([1, 2, 3],)
)
cached: Any = SimpleNamespace(req_ids=[])
step: Any = SimpleNamespace(scheduled_new_reqs=[new], scheduled_cached_reqs=cached)
(load,) = (item for item in connector.build_connector_meta(step).requests if not item.is_store)
print(f"promised: {promised} tokens, loaded: {load.num_tokens} tokens")

stored = torch.ones(2, 16, 8)
layer = torch.zeros(2, 4, 16, 8)  # keys and values, blocks, tokens, content
try:
    inject_kv_into_layer(layer, stored, connector._build_slot_mapping(load), None, 16)
    print("the copy ends")
except RuntimeError as error:
    print(f"the copy raises, and the request continues: {error}")

later = [*tokens[:16], *range(100, 120)]
print(f"files of another prompt: {prefix_key(tokens, 16) == prefix_key(later, 16) and 'THE SAME'}")
print("files of another model, revision, dtype, adapter or salt: THE SAME (prefix_key has tokens)")
