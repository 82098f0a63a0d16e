"""``kvview doctor --tier``: SGLang's own factory makes the backend; a page is stored and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from kvview.tier import Namespace
from kvview.tier.trial import try_store
from kvview_sglang.hicache_store import HiCacheStore, storage_config


def try_tier(given: Mapping[str, Any]) -> str:
    """Try a user's ``--hicache-storage-backend-extra-config`` of SGLang.

    Returns:
        A description of the problem; empty without a problem.
    """
    namespace = Namespace("kvview doctor", "any")
    config = storage_config(namespace, dict(given))
    backend: Any = StorageBackendFactory.create_backend("dynamic", config, SimpleNamespace())
    try:
        store = HiCacheStore(namespace, backend, threads=1)
        try:
            return try_store(store)
        finally:
            store.close()
    finally:
        backend.close()
