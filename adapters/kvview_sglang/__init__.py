"""Any tier store as a ``dynamic`` storage backend of SGLang's HiCache, behind kvview's guard."""

from kvview_sglang.tier import KVViewHiCache as KVViewHiCache
