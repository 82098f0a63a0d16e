"""Any tier store as a ``dynamic`` storage backend of SGLang's HiCache, guarded."""

from kvview_sglang.tier import KVViewHiCache

__all__ = ["KVViewHiCache"]
