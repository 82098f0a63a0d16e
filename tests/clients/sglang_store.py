"""SGLang's file backend as a target, from its sources, because its package needs a GPU.

kvview partition tests/clients/sglang_store.py:HiCacheFileStore --option root={tmp}
"""

from tests.clients.sglang_sources import make_importable

make_importable()

from kvview_sglang.hicache_store import HiCacheFileStore  # noqa: E402

__all__ = ["HiCacheFileStore"]
