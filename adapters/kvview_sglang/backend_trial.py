"""``kvview doctor --tier``: SGLang's own factory makes the backend, and a page goes through it."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

_NUM_FLOATS = 16_384


def try_tier(given: Mapping[str, Any]) -> str:
    """Try what a user gives SGLang as ``--hicache-storage-backend-extra-config``.

    Returns:
        What does not work; empty if all does.
    """
    config: Any = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name="kvview doctor",
        extra_config=dict(given),
    )
    backend: Any = StorageBackendFactory.create_backend("dynamic", config, SimpleNamespace())
    page, key = torch.rand(_NUM_FLOATS), torch.rand(1).numpy().tobytes().hex()
    try:
        if not backend.set(key, page):
            return "a page could not be stored"
        if not backend.exists(key):
            return "a page that was stored is not found"
        back = backend.get(key, torch.zeros(_NUM_FLOATS))
        if back is None or not torch.equal(back, page):
            return "a page that was stored cannot be loaded"
    finally:
        backend.close()
    return ""
