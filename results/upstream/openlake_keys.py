"""OpenLake has one key for two revisions, dtypes, cache dtypes and memory layouts.

openlake-vllm 0.8.1 with vLLM 0.33.0. This script needs no GPU, no model, no server and no kvview.
``python openlake_keys.py`` makes the key of a block in an engine and in other engines, and prints
whether they differ. Expected: always.
"""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

adapter: Any = import_module("openlake_client.openlake_adapter")

PLAIN = {"model": "org/model", "revision": "a", "dtype": torch.float16, "cache_dtype": "auto"}


def key(**differences: Any) -> bytes:
    """Return the key of a block in an engine."""
    engine = SimpleNamespace(**(PLAIN | {"layout": "LBNHC"} | differences))
    size = torch.float8_e4m3fn if engine.cache_dtype == "fp8" else engine.dtype
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=size)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"])
    config = SimpleNamespace(
        model_config=engine,
        cache_config=SimpleNamespace(
            block_size=16,
            hash_block_size=None,
            prefix_match_unit=None,
            cache_dtype=engine.cache_dtype,
            enable_prefix_caching=True,
            mamba_cache_mode="none",
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        speculative_config=None,
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}, kv_connector=None),
    )
    caches = SimpleNamespace(kv_cache_groups=[group])
    _, [keys], *_ = adapter._group_key_spaces(config, caches)
    found: bytes = keys.key_for(b"h" * 32, (0, 0, 0, 0))
    return found


cases: dict[str, dict[str, Any]] = {
    "another model": {"model": "org/other"},
    "another revision": {"revision": "b"},
    "another dtype": {"dtype": torch.bfloat16},
    "a quantised cache": {"cache_dtype": "fp8"},
    "another memory layout": {"layout": "BLNHC"},
}
for name, differences in cases.items():
    print(f"{name}: {'differ' if key(**differences) != key() else 'THE SAME KEY'}")
