"""vLLM's offloading managers as kvview managers, and kvview's managers inside vLLM."""

from kvview_vllm.offloading.manager import VLLMOffloadingManager

__all__ = ["VLLMOffloadingManager"]
