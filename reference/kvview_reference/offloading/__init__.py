"""The CPU offloading manager and its cache policies."""

from kvview_reference.offloading.lru_or_arc import LRUOrARCPolicy
from kvview_reference.offloading.manager import CPUOffloadingManager
from kvview_reference.offloading.policies import CachePolicy, register_policy
from kvview_reference.offloading.vllm_arc import VLLMARCPolicy

__all__ = ["CPUOffloadingManager", "CachePolicy", "register_policy"]

register_policy("lru-or-arc", LRUOrARCPolicy)
register_policy("vllm-arc", VLLMARCPolicy)
