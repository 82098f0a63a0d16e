"""The coordinator and the KV-cache manager: the geometry contract over the block pool."""

from kvview_reference.geometry.coordinator import KVCacheCoordinator
from kvview_reference.geometry.kv_cache_manager import KVCacheManager

__all__ = ["KVCacheCoordinator", "KVCacheManager"]
