"""The tier ``fs`` has one path for two revisions and two memory layouts of a model (vLLM 0.33.0).

This script needs no GPU, no model and no kvview. ``python fs_tier_keys.py`` prints, for each
difference, whether it changes the path of a block. Expected: each difference does.
"""

from types import SimpleNamespace
from typing import Any

from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.kv_offload.file_mapper import FileMapper


def path(**differences: Any) -> str:
    model = {"name": "org/model", "revision": "a", "dtype": "bfloat16"}
    sizes = {"tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1, "rank": 0}
    rest = {"kv_cache_layout": "LBNHC", "canonical_layout": False, "replicated_layout": False}
    config = SimpleNamespace(
        groups=[],
        model=SimpleNamespace(**{k: differences.get(k, v) for k, v in model.items()}),
        parallel=SimpleNamespace(**{k: differences.get(k, v) for k, v in sizes.items()}),
        cache=SimpleNamespace(tokens_per_hash=16),
        **{k: differences.get(k, v) for k, v in rest.items()},
    )
    spec: Any = SimpleNamespace(config=config)
    mapper = FileMapper.from_offloading_spec("/kv", spec)
    return str(mapper.get_file_name(make_offload_key(b"hash", 0)))


changes: list[dict[str, Any]] = [
    {"name": "org/other"},
    {"revision": "b"},
    {"dtype": "float8_e4m3fn"},
    {"tp_size": 2},
    {"rank": 1},
    {"kv_cache_layout": "LBHNC"},
]
for change in changes:
    print(change, "another path" if path(**change) != path() else "THE SAME PATH")
