"""``ExampleConnector`` serves KV to requests for which the model computes other KV (vLLM 0.33.0).

This script needs no GPU, no model and no kvview. ``python example_connector_keys.py`` stores the KV
of a plain request, and prints the number of tokens that the connector promises to a second request.
Expected: 48 for the same request, and 0 for all other requests. The script then shows three other
defects.
"""

import tempfile
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.v1.core.sched.output import CachedRequestData

PLAIN = {"prompt_token_ids": list(range(64)), "mm_features": [], "lora_request": None}
NUM_STORED = 48  # the prompt without its last token, in whole blocks

connector = object.__new__(ExampleConnector)  # the constructor needs a whole VllmConfig
connector._storage_path, connector._block_size = tempfile.mkdtemp(), 16
for stored in (torch.arange(64)[:NUM_STORED], torch.tensor([])):  # tokens, or an embedding
    connector._generate_foldername_debug(stored, [], create_folder=True)

differences: dict[str, dict[str, Any]] = {
    "the same request": {},
    "another cache salt": {"cache_salt": "tenant-b"},
    "a LoRA adapter": {"lora_request": "adapter-b"},
    "another prompt embedding": {"prompt_token_ids": None},
}
for name, difference in differences.items():
    request: Any = SimpleNamespace(**(PLAIN | difference))
    print(f"{name}: {connector.get_num_new_matched_tokens(request, 0)[0]} tokens")

chunk: Any = SimpleNamespace(
    scheduled_new_reqs=[SimpleNamespace(**PLAIN, req_id="long", block_ids=([1, 2],))],
    scheduled_cached_reqs=CachedRequestData.make_empty(),
    num_scheduled_tokens={"long": 32},
)
connector._requests_need_load = {}
connector._storage_path = tempfile.mkdtemp()
meta = connector.build_connector_meta(chunk)
print(f"a chunk of 32 of 64 tokens: stored as a prompt of {len(meta.requests[0].token_ids)} tokens")

connector._connector_metadata = meta
states: Any = torch.zeros(8, 1, 4, 8)  # four states a block of 16 tokens, as in compressed MLA
try:
    connector.save_kv_layer("layer", states, None)
except IndexError as error:
    print(f"a layer with four states a block: IndexError: {error}")

long: Any = SimpleNamespace(**(PLAIN | {"prompt_token_ids": list(range(81))}))
connector._generate_foldername_debug(torch.arange(64), [], create_folder=True)
promised = connector.get_num_new_matched_tokens(long, 80)[0]
print(f"80 of 81 tokens computed: {promised} tokens")
