"""The managers of a tier, of equal pages and of pages of any size, and their cache policies."""

from kvview_reference.offloading.byte_budget import ByteBudgetManager
from kvview_reference.offloading.manager import CPUOffloadingManager
from kvview_reference.offloading.policies import CachePolicy, PolicyFactory, register_policy

__all__ = [
    "ByteBudgetManager",
    "CPUOffloadingManager",
    "CachePolicy",
    "PolicyFactory",
    "register_policy",
]
