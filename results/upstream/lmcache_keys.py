"""LMCache's lookups lack properties that change the KV (LMCache 0.5.6, vLLM 0.33.0).

This script needs no GPU, no model and no kvview. ``python lmcache_keys.py`` looks up a plain
request and other requests with LMCache's adapter for vLLM, and prints whether the lookups differ.
Expected: they always differ. The script then prints the fields of a key of the multiprocess mode,
and passes a prompt of embeddings.
"""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl, RequestTracker
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

PLAIN = {
    "request_id": "request",
    "all_token_ids": list(range(64)),
    "prompt_token_ids": list(range(64)),
    "num_tokens": 64,
    "mm_features": [],
    "sampling_params": SimpleNamespace(extra_args=None),
    "lora_request": None,
    "cache_salt": None,
}


def lookup(**differences: Any) -> Any:
    """Return the arguments with which the adapter calls its lookup client."""
    calls: list[Any] = []

    def record(*args: Any, **kwargs: Any) -> None:
        calls.append((args, kwargs))

    client = SimpleNamespace(lookup_cache=lambda lookup_id: -1, lookup=record)
    adapter: Any = SimpleNamespace(  # LMCache's own needs a VllmConfig
        kv_role="kv_both", skip_last_n_tokens=0, _requests_priority={}, lookup_client=client
    )
    request: Any = SimpleNamespace(**(PLAIN | differences))
    LMCacheConnectorV1Impl.get_num_new_matched_tokens(adapter, request, 0)
    return calls


item = SimpleNamespace(
    identifier="picture", mm_hash="picture", mm_position=SimpleNamespace(offset=4, length=8)
)
cases: dict[str, dict[str, Any]] = {
    "another token": {"all_token_ids": [7, *range(1, 64)]},
    "a multimodal item": {"mm_features": [item]},
    "a LoRA adapter": {"lora_request": "adapter"},
    "a cache salt": {"cache_salt": "tenant"},
}
for name, differences in cases.items():
    print(f"{name}: {'differs' if lookup(**differences) != lookup() else 'THE SAME LOOKUP'}")

print("key of the multiprocess mode:", ", ".join(each.name for each in fields(IPCCacheServerKey)))

embedded: Any = SimpleNamespace(
    **(PLAIN | {"prompt_token_ids": None}), req_id="embedded", block_ids=([1, 2, 3, 4],)
)
config: Any = None
try:
    RequestTracker.from_new_request(config, embedded, 64, 0, False)
except TypeError as error:
    print(f"a prompt of embeddings: TypeError: {error}")
