"""A storage backend of SGLang with the interface of a store, so that the kit can check it.

kvview check kvview_sglang.hicache_store:HiCacheFileStore --option root={tmp}
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

from kvview.tier import Namespace, Threaded


def storage_config(namespace: Namespace, extra: dict[str, Any] | None = None) -> Any:
    """SGLang's configuration of a backend, for one rank of a model."""
    return HiCacheStorageConfig(
        tp_rank=namespace.rank,
        tp_size=namespace.tensor_parallel,
        pp_rank=0,
        pp_size=namespace.pipeline_parallel,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name=namespace.model,
        extra_config=extra,
    )


class HiCacheStore(Threaded):
    """A :class:`~kvview.tier.TierStore` over a backend of SGLang, whose calls may block.

    Args:
        namespace: Namespace of the store.
        backend: A ``HiCacheStorage``.
        threads: Number of threads that call the backend.
    """

    verifies = True  # SGLang does not verify pages

    def __init__(self, namespace: Namespace, backend: Any, threads: int = 4) -> None:
        self._backend = backend
        super().__init__(namespace, threads=threads)

    def has(self, key: bytes, /) -> bool:
        """Whether the backend has a page."""
        return bool(self._backend.exists(key.hex()))

    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        """Load a page with ``get``."""
        return self._backend.get(key.hex(), torch.frombuffer(page, dtype=torch.uint8)) is not None

    def write(self, key: bytes, page: memoryview, /) -> bool:
        """Store a page with ``set``."""
        return bool(self._backend.set(key.hex(), torch.frombuffer(page, dtype=torch.uint8)))


class HiCacheFileStore(HiCacheStore):
    """SGLang's own file backend, ``HiCacheFile``, as a store.

    Args:
        namespace: Namespace of the store; SGLang's file names contain only the model and the ranks.
        root: Folder of the files.
        threads: Number of threads that call the backend.
    """

    def __init__(self, namespace: Namespace, root: str, threads: int = 4) -> None:
        super().__init__(namespace, HiCacheFile(storage_config(namespace), root), threads)
