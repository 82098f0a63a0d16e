"""sglang-kvblockd cannot start with SGLang 0.5.23, and never finds the pages that ``set`` stores.

This script needs no GPU, no model, no server and no kvview, but sglang-kvblockd 0.1.0 and the
sources of SGLang. ``python sglang_kvblockd_keys.py`` makes the keys of a page from SGLang's default
configuration, and then with ``tp_lcm_size=0``. Expected: no error, and keys that agree.
"""

from importlib import import_module
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

keymap: Any = import_module("sglang_kvblockd.keymap")

RANKS = {"tp_rank": 0, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
FLAGS = dict.fromkeys(("is_mla_model", "enable_storage_metrics", "is_page_first_layout"), False)

config: Any = HiCacheStorageConfig(**RANKS, **FLAGS, tp_size=1, model_name="org/model")
try:
    keymap.scheme_from_config(config)
except TypeError as error:
    print(f"tp_lcm_size={config.tp_lcm_size}: TypeError: {error}")

config.tp_lcm_size = 0
scheme = keymap.scheme_from_config(config)
print(f"set stores a key with {keymap.page_suffix(scheme)}")
print(f"exists asks for keys with {', '.join(keymap.physical_suffixes(scheme))}")
