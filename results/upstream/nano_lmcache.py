"""nano-LMcache loads too little, and stores tokens that were not computed.

nano-LMcache ece79a8 with vLLM 0.33.0. This script needs no GPU, no model and no kvview; a clone of
nano-LMcache must be in ``PYTHONPATH``. ``python nano_lmcache.py`` stores a prompt of 32 tokens, of
which the first chunk of 16 is computed, and prints how many of the stored tokens were computed.
Expected: all of them. It then loads them with the attention metadata in the forward context and as
a keyword argument, as before a full CUDA graph, and for a request that Model Runner V1 resumes
after a preemption. Expected: one load each time. At last it looks up a request whose prompt and
answer are on the GPU. Expected: no promised tokens.
"""

import os
import tempfile
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

os.environ["NANO_KV_QUIET"] = "1"
module: Any = import_module("vllm_connector.nano_kv_connector")

BLOCK = 16
PROMPT = list(range(2 * BLOCK + 1))  # the last token is never stored
METADATA = {"layer": object()}

connector: Any = object.__new__(module.NanoKVConnector)  # the constructor needs a whole VllmConfig
connector.__dict__ |= {
    "_block": BLOCK,
    "_need_load": {},
    "_mem": False,
    "_root": tempfile.mkdtemp(),
}
connector._get_connector_metadata = lambda: connector.meta


def plan(first_chunk: int) -> None:
    """Plan a step that computes the first tokens of the prompt, in blocks 1 and 2."""
    new = SimpleNamespace(req_id="request", prompt_token_ids=PROMPT, block_ids=([1, 2],))
    step: Any = SimpleNamespace(
        scheduled_new_reqs=[new], num_scheduled_tokens={"request": first_chunk}
    )
    connector.meta = connector.build_connector_meta(step)


plan(first_chunk=BLOCK)
pages = torch.zeros(3, 2, BLOCK, 1)  # blocks, keys and values, slots of a block
pages[1] = 1  # only the first chunk was computed
connector.save_kv_layer("layer", pages, METADATA)
stored = pages[connector.meta.requests[0].slot_mapping // BLOCK, 0, 0, 0]
print(
    f"a chunk of {BLOCK} tokens: {int(stored.sum())} of {len(stored)} stored tokens were computed"
)

connector._need_load = {"request": object()}
plan(first_chunk=1)
for name, in_context in {"in the forward context": METADATA, "as a keyword argument": None}.items():
    layer = SimpleNamespace(kv_cache=torch.zeros(3, 2, BLOCK, 1))
    context: Any = SimpleNamespace(attn_metadata=in_context, no_compile_layers={"layer": layer})
    connector.start_load_kv(context, attn_metadata=METADATA)
    print(f"metadata {name}: {int(layer.kv_cache.any())} loads")

connector._need_load = {"request": object()}
cached = SimpleNamespace(
    req_ids=["request"],
    resumed_req_ids={"request"},
    new_block_ids=[([1, 2],)],
    num_computed_tokens=[32],
)
resumed: Any = SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=cached)
print(f"a resumed request: {len(connector.build_connector_meta(resumed).requests)} loads")

os.makedirs(connector._dir(PROMPT), exist_ok=True)
answered: Any = SimpleNamespace(request_id="request", prompt_token_ids=PROMPT)
promised, _ = connector.get_num_new_matched_tokens(answered, 3 * BLOCK)
print(f"a resumed request with 48 tokens on the GPU, 33 of its prompt: {promised} promised tokens")
