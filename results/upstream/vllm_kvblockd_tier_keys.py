"""The tier of vllm-kvblockd has one key for two revisions and two memory layouts.

vllm-kvblockd 0.1.0 with vLLM 0.25.1. This script needs no GPU, no model, no server and no kvview.
``python vllm_kvblockd_tier_keys.py`` makes the key of a block in an engine and in other engines,
and prints whether they differ. Expected: always.
"""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

config: Any = import_module("vllm_kvblockd.config")

PLAIN = {"model": "org/model", "revision": "a", "dtype": "torch.float16", "layout": "NHD"}


def key(**differences: str) -> bytes:
    """Return the key of a block in an engine."""
    engine = SimpleNamespace(**(PLAIN | differences))
    cache = SimpleNamespace(cache_dtype="auto", block_size=16)
    vllm_config = SimpleNamespace(model_config=engine, cache_config=cache)
    spec = SimpleNamespace(vllm_config=vllm_config, hash_block_size=16, block_size_factor=1)
    print_of_engine = config.fingerprint(config.tier_fingerprint_fields(spec))
    found: bytes = config.tier_wire_key(print_of_engine, b"h" * 32)
    return found


for name, differences in {
    "another model": {"model": "org/other"},
    "another dtype": {"dtype": "torch.bfloat16"},
    "another revision": {"revision": "b"},
    "another memory layout": {"layout": "HND"},
}.items():
    print(f"{name}: {'differ' if key(**differences) != key() else 'THE SAME KEY'}")
