"""StrataCache serves KV to requests for which the model computes other KV (vLLM 0.13.0).

StrataCache 4bf3a7a hashes the tokens of a prompt only. This script needs no GPU, no model and no
kvview; ``src`` of a clone of StrataCache must be in ``PYTHONPATH``. ``python stratacache_keys.py``
looks up a plain request and other requests, and prints whether the keys differ. Expected: always.
"""

from collections import defaultdict
from importlib import import_module
from types import SimpleNamespace
from typing import Any

module: Any = import_module("stratacache.adapters.vllm.connector_v1")

PLAIN = {
    "prompt_token_ids": list(range(64)),
    "mm_features": [],
    "lora_request": None,
    "cache_salt": None,
}


def looked_up(**differences: Any) -> list[str]:
    """Return the keys that the connector looks up for a request."""
    found: list[str] = []

    def contains(key: Any) -> Any:
        found.append(str(key))
        return SimpleNamespace(hit_tier=0)

    connector: Any = object.__new__(module._StrataConnectorImpl)  # its own needs a VllmConfig
    connector.__dict__ |= {
        "_vllm_config": SimpleNamespace(model_config=SimpleNamespace(model="model")),
        "_engine": SimpleNamespace(contains=contains),
        "_debug": False,
        "_chunk_size": 16,
        "_save_partial_chunks": False,
        "_bundle_layers": True,
        "_match_state_by_req": {},
        "_stats": defaultdict(int),
        "_tier_names": ["cpu"],
        "_io_by_tier": {"cpu": defaultdict(int)},
    }
    connector.get_num_new_matched_tokens(SimpleNamespace(**(PLAIN | differences)), 0)
    return found


cases: dict[str, dict[str, Any]] = {
    "another token": {"prompt_token_ids": [7, *range(1, 64)]},
    "a multimodal item": {"mm_features": [SimpleNamespace(identifier="picture")]},
    "a LoRA adapter": {"lora_request": "adapter"},
    "a cache salt": {"cache_salt": "tenant"},
}
for name, differences in cases.items():
    print(f"{name}: {'differ' if looked_up(**differences) != looked_up() else 'THE SAME KEYS'}")
