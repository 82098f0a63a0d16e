"""Any tier store as an L2 adapter of LMCache, behind kvview's guard."""

from kvview_lmcache.tier import (
    KVViewL2Adapter as KVViewL2Adapter,
    LMCacheTierOptions as LMCacheTierOptions,
)
