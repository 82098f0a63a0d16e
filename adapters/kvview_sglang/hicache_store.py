"""The other way round: SGLang's own file backend seen as a store, so that the kit judges it.

kvview check kvview_sglang.hicache_store:HiCacheFileStore --option root={tmp}
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

from kvview.tier import Namespace, Threaded


class HiCacheFileStore(Threaded):
    """A :class:`~kvview.tier.TierStore` over ``HiCacheFile``, which blocks as SGLang lets it.

    Args:
        namespace: Of it SGLang's file names hold the model and the ranks, and nothing else.
        root: Its folder.
        threads: That call it.
    """

    verifies = True  # nothing stands in front of it in SGLang

    def __init__(self, namespace: Namespace, root: str, threads: int = 4) -> None:
        config: Any = HiCacheStorageConfig(
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
        )
        self._backend: Any = HiCacheFile(config, root)
        super().__init__(namespace, threads=threads)

    def has(self, key: bytes, /) -> bool:
        """What ``exists`` says."""
        return bool(self._backend.exists(key.hex()))

    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        """What ``get`` gives."""
        return self._backend.get(key.hex(), torch.frombuffer(page, dtype=torch.uint8)) is not None

    def write(self, key: bytes, page: memoryview, /) -> bool:
        """What ``set`` says."""
        return bool(self._backend.set(key.hex(), torch.frombuffer(page, dtype=torch.uint8)))
