"""The managers of a tier, of equal pages and of pages of any size, and their cache policies."""

from kvview_reference.offloading.byte_budget import ByteBudgetManager as ByteBudgetManager
from kvview_reference.offloading.manager import CPUOffloadingManager as CPUOffloadingManager
from kvview_reference.offloading.policies import (
    CachePolicy as CachePolicy,
    PolicyFactory as PolicyFactory,
    register_policy as register_policy,
)
