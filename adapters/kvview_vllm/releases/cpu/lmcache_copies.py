"""LMCache's GPU connector on a CPU; the rest of LMCache runs unmodified.

1. Pages of five dimensions (vLLM up to 0.25) are copied by LMCache's own connector, with its own
   detection of the format and its own torch operators. Only the CUDA streams are replaced.
2. Packed pages of four dimensions are copied by a stand-in, because LMCache's torch operators
   corrupt them (LMCache #4463).

Source: lmcache/v1/gpu_connector/gpu_connectors.py and
lmcache/integration/vllm/vllm_service_factory.py, LMCache 0.5.6.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    import torch

_REPLACED = "LMCache's GPU connector, for packed pages"
_OWN_DIMENSIONS = 5


def replace_gpu_connector(note: Callable[[str], None], stack: ExitStack) -> None:
    """Make LMCache copy by the CPU until the stack is closed.

    Args:
        note: Called with the name of a replaced part if the stand-in is used.
        stack: Undoes the replacement.
    """
    try:
        connectors = importlib.import_module("lmcache.v1.gpu_connector")
    except ImportError:  # because importing LMCache's adapter will report it
        return

    def create(
        config: Any, metadata: Any, engine: Any = None, layout_hints: Any = None, **_: Any
    ) -> Any:
        # The tensors are those of CUDA (VSIM-4); the hint is that of vLLM's CPU attention.
        hints = (layout_hints or {}) | {"kv_layout": "NHD"}
        return _on_cpu(note).from_metadata(metadata, layout_hints=hints)

    stack.enter_context(patch.object(connectors, "CreateGPUConnector", create))
    end_engines()


def end_engines() -> None:
    """End the engines that LMCache keeps in a class, so that the next run finds no older page.

    vLLM's connector leaves these engines running at its shutdown, because its process then ends.
    """
    try:
        builder = importlib.import_module("lmcache.v1.cache_engine").LMCacheEngineBuilder
    except ImportError:
        return
    for name in list(builder._instances):
        builder.destroy(name)


def _on_cpu(note: Callable[[str], None]) -> Any:
    module: Any = importlib.import_module("lmcache.v1.gpu_connector.gpu_connectors")
    connector = module.VLLMPagedMemGPUConnectorV2

    def initialize_pointers(self: Any, kv_caches: list[torch.Tensor]) -> torch.Tensor:
        """Run LMCache's method without its check that the device is CUDA."""
        self.device = kv_caches[0].device
        self.engine_kv_format, caches = module.normalize_kv_and_discover_format(
            kv_caches, module.EngineType.VLLM, layout_hints=self.layout_hints
        )
        self.num_blocks = module.get_num_blocks(caches, self.engine_kv_format)
        self.block_size = module.get_block_size(caches, self.engine_kv_format)
        self.page_buffer_size = self.num_blocks * self.block_size
        self.head_size = module.get_head_size(caches, self.engine_kv_format)
        self.block_stride_elems = 0
        self.kv_cache_pointers.numpy()[:] = [cache.data_ptr() for cache in caches]
        pointers: torch.Tensor = self.kv_cache_pointers
        return pointers

    def moved(own: Callable[..., None], stand_in: Callable[..., None]) -> Callable[..., None]:
        def move(self: Any, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
            self.initialize_kvcaches_ptr(**kwargs)
            if self.kvcaches[0].dim() == _OWN_DIMENSIONS:
                own(self, memory_obj, start, end, **kwargs)
            else:
                note(_REPLACED)
                stand_in(self, memory_obj, start, end, **kwargs)

        return move

    methods = {
        "_initialize_pointers": initialize_pointers,
        "to_gpu": moved(connector.to_gpu, _to_gpu),
        "from_gpu": moved(connector.from_gpu, _from_gpu),
    }
    return type("ConnectorOnCPU", (connector,), methods)


def _to_gpu(connector: Any, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
    skipped = min(end - start, max(0, kwargs.get("vllm_cached_tokens", 0) - start))
    slots = kwargs["slot_mapping"][start + skipped : end].long()
    for layer, pages in enumerate(_pages(connector)):
        at = slots // pages.shape[1], slots % pages.shape[1]
        data = memory_obj.tensor[:, layer, skipped:].transpose(0, 1)
        pages[at] = data.reshape(len(slots), *pages.shape[2:])


def _from_gpu(connector: Any, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
    slots = kwargs["slot_mapping"][start:end].long()
    for layer, pages in enumerate(_pages(connector)):
        data = pages[slots // pages.shape[1], slots % pages.shape[1]]
        memory_obj.tensor[:, layer] = data.reshape(len(slots), 2, -1).transpose(0, 1)


def _pages(connector: Any) -> list[torch.Tensor]:
    """Return one tensor per layer, with the dimensions blocks, tokens of a block, and the rest.

    LMCache sorts dimensions by their strides, so heads may come before or after tokens.
    """
    shape = connector.kvcaches[0].shape
    num_heads = 2 * connector.hidden_dim_size // shape[-1]
    tokens = 2 if shape[1] == num_heads else 1
    return [cache.movedim((0, tokens), (0, 1)) for cache in connector.kvcaches]
