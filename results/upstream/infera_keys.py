"""Infera has one namespace for two revisions, dtypes, cache dtypes and memory layouts.

Infera 5890f7f. This script needs no GPU, no model, no server and no kvview; a clone of Infera must
be in ``PYTHONPATH``. ``python infera_keys.py`` makes the namespace of an engine and those of other
engines, and prints whether they differ. Expected: always.
"""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

connector: Any = import_module("infera.engine.vllm.kvd_connector").InferaKvdConnector

PLAIN: dict[str, Any] = {"revision": "a", "dtype": "float16", "cache_dtype": "auto", "ranks": 1}


def namespace(**differences: Any) -> str:
    """Return the namespace of the pages of an engine, next to the name of its model."""
    engine = SimpleNamespace(model="org/model", **(PLAIN | {"layout": "LBNHC"} | differences))
    config = SimpleNamespace(
        model_config=engine,
        cache_config=SimpleNamespace(cache_dtype=engine.cache_dtype),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=engine.ranks, pipeline_parallel_size=1
        ),
        attention_config=SimpleNamespace(kv_cache_layout=engine.layout),
    )
    found: str = connector._extract_compat_key(config)
    return found


DIFFERENCES: dict[str, dict[str, Any]] = {
    "another tensor-parallel size": {"ranks": 2},
    "another revision": {"revision": "b"},
    "another dtype": {"dtype": "bfloat16"},
    "a quantised cache": {"cache_dtype": "fp8"},
    "another memory layout": {"layout": "BLNHC"},
}
for name, differences in DIFFERENCES.items():
    same = namespace(**differences) == namespace()
    print(f"{name}: {'THE SAME NAMESPACE' if same else 'differ'}")
