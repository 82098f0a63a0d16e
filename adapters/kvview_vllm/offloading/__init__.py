"""vLLM's offloading managers as kvview managers, and kvview's managers inside vLLM."""

from kvview_vllm.offloading.translated import TranslatedManager

__all__ = ["TranslatedManager"]
