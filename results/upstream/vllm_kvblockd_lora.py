"""vllm-kvblockd serves KV of an adapter that was loaded again from another path.

vllm-kvblockd 0.1.0 with vLLM 0.33.0, whose own block hash has the name and the path of an adapter.
This script needs no GPU, no model, no server and no kvview. ``python vllm_kvblockd_lora.py``
prints whether the keys of a prompt differ. Expected: always.
"""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

from vllm.lora.request import LoRARequest

config: Any = import_module("vllm_kvblockd.config")
connector: Any = import_module("vllm_kvblockd.connector").KvblockdConnector


def keys(lora: LoRARequest) -> list[bytes]:
    """Return the keys of a prompt of two blocks."""
    name = connector._lora_name(SimpleNamespace(lora_request=lora))
    seed = config.chain_seed(bytes(32), None, [], name)
    found: list[bytes] = config.block_chain_keys(seed, list(range(32)), 16)
    return found


plain = keys(LoRARequest("a", 1, "/adapters/one"))
for what, other in {
    "another adapter": LoRARequest("b", 2, "/adapters/one"),
    "another path of the adapter": LoRARequest("a", 1, "/adapters/two"),
}.items():
    print(f"{what}: {'differ' if keys(other) != plain else 'THE SAME KEYS'}")
