"""Infera promises every token of a prompt, so no token is left to compute.

Infera 5890f7f. vLLM needs the result of the last token of a prompt, so a connector may promise all
tokens except one at most. If loads are synchronous, which is Infera's default, the scheduler of
vLLM 0.33.0 fails at ``assert num_new_tokens > 0`` and the engine ends.

This script needs no GPU, no model, no server and no kvview; a clone of Infera must be in
``PYTHONPATH``. ``python infera_whole_prompt.py`` looks up prompts of which all whole chunks of 512
tokens are stored. Expected: fewer tokens than the prompt has, in each line.
"""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

module: Any = import_module("infera.engine.vllm.kvd_connector")

BLOCK, CHUNK = 16, 512

connector: Any = object.__new__(module.InferaKvdConnector)  # the constructor needs a server
connector.__dict__ |= {
    "_async_load": False,
    "_chunk_tokens": CHUNK,
    "_client": SimpleNamespace(exists=lambda keys, **_: [True] * len(keys)),
    "_compat_key": "",
    "_group_kv_spec": {0: {}},
    "_has_non_paged_groups": False,
    "_hipfile_roots": [],
    "_model": "model",
    "_pending_block_hashes": {},
    "_pending_external_blocks": {},
    "_run_async": lambda answer: answer,
    "_stat_inc": lambda *_: None,
    "_block_size_now": lambda _: BLOCK,
}
for length in (2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1):
    request = SimpleNamespace(
        request_id="request",
        prompt_token_ids=list(range(length)),
        num_tokens=length,
        block_hashes=[n.to_bytes(32, "big") for n in range(length // BLOCK)],
    )
    promised, is_async = connector.get_num_new_matched_tokens(request, 0)
    print(f"a prompt of {length} tokens: {promised} promised, asynchronous: {is_async}")
