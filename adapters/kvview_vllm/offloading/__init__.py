"""vLLM's offloading managers as kvview ones, and kvview's inside vLLM."""

from kvview_vllm.offloading.manager import VLLMOffloadingManager

__all__ = ["VLLMOffloadingManager"]
