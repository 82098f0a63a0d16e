"""Coordinators and the KV-cache manager: the geometry contract, kept over the block pool."""

from kvview_reference.geometry.coordinator import KVCacheCoordinator, make_coordinator
from kvview_reference.geometry.kv_cache_manager import KVCacheManager

__all__ = ["KVCacheCoordinator", "KVCacheManager", "make_coordinator"]
