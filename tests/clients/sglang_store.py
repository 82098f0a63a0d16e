"""Targets for checks of SGLang's storage, from its sources, because its package needs a GPU.

kvview partition tests/clients/sglang_store.py:HiCacheFileStore --option root={tmp}
kvview partition tests/clients/sglang_store.py:BridgeStore --option root={tmp}
"""

from types import SimpleNamespace

from kvview.tier import Namespace
from tests.clients.sglang_sources import make_importable

make_importable()

from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402

from kvview_sglang.hicache_store import (  # noqa: E402
    HiCacheFileStore,
    HiCacheStore,
    storage_config,
)

__all__ = ["BridgeStore", "HiCacheFileStore"]


class BridgeStore(HiCacheStore):
    """kvview's bridge to SGLang over a store of files, as SGLang's factory makes it.

    Args:
        namespace: Namespace of the store.
        root: Folder of the files.
    """

    def __init__(self, namespace: Namespace, root: str) -> None:
        extra = {
            "backend_name": "kvview",
            "module_path": "kvview_sglang",
            "class_name": "KVViewHiCache",
            "tier": {
                "weights": namespace.weights,
                "store": "examples/folder_store.py:FolderStore",
                "options": {"root": root},
            },
        }
        config = storage_config(namespace, extra)
        self._bridge = StorageBackendFactory.create_backend("dynamic", config, SimpleNamespace())
        super().__init__(namespace, self._bridge)

    def close(self) -> None:
        """Close the store, and then the bridge."""
        super().close()
        self._bridge.close()
