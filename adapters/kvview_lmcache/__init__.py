"""Any tier store as an L2 adapter of LMCache, guarded."""

from kvview_lmcache.tier import KVViewL2Adapter, LMCacheTierOptions

__all__ = ["KVViewL2Adapter", "LMCacheTierOptions"]
