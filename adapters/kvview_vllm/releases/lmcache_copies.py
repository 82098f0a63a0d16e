"""Stands in for LMCache's GPU connector, which needs CUDA; all else of LMCache stays its own.

Its engine, host memory, lookups over ZMQ and its adapter run as they are. A group of one rank
stands in for vLLM's process groups, which LMCache asks for.

Source: lmcache/v1/gpu_connector/__init__.py and lmcache/integration/vllm/vllm_service_factory.py,
LMCache 0.5.6.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    import torch

_STANDS_IN = "for LMCache's GPU connector, copies at once"
_TOKEN_DIM = 2  # of all layouts of FlashAttention and of the CPU backend


def replace_gpu_connector(make_queue: Callable[[str], Any], stack: ExitStack) -> None:
    """Have LMCache copy on the CPU, as long as the stack is open.

    Args:
        make_queue: Names what stands in; copies are not late, LMCache waits for them.
        stack: Undoes it.
    """
    try:
        connectors = importlib.import_module("lmcache.v1.gpu_connector")
        builder = importlib.import_module("lmcache.v1.cache_engine").LMCacheEngineBuilder
    except ImportError:  # then its adapter does not import either, and says so
        return
    make_queue(_STANDS_IN)
    state = importlib.import_module("vllm.distributed.parallel_state")
    alone = SimpleNamespace(
        rank_in_group=0,
        world_size=1,
        is_first_rank=True,
        is_last_rank=True,
        broadcast=lambda tensor, src: tensor,
        broadcast_object=lambda value, src: value,
    )
    for name in ("get_tp_group", "get_pp_group"):
        stack.enter_context(patch.object(state, name, lambda: alone))
    stack.enter_context(patch.object(state, "get_tensor_model_parallel_rank", lambda: 0))

    def create(config: Any, metadata: Any, *args: Any, **kwargs: Any) -> Any:
        return _copier(connectors.GPUConnectorInterface, metadata)

    stack.enter_context(patch.object(connectors, "CreateGPUConnector", create))
    # It keeps its engines in a class: what one run has stored is not the next one's.
    for name in list(builder._instances):
        builder.destroy(name)


def _copier(interface: type, metadata: Any) -> Any:
    num_layers, _, _, num_heads, head_size = metadata.kv_shape
    width = num_heads * head_size
    size = importlib.import_module("torch").Size

    def get_shape(self: Any, num_tokens: int) -> torch.Size:
        shape: torch.Size = size([2, num_layers, num_tokens, width])
        return shape

    def to_gpu(self: Any, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        skipped = min(end - start, max(0, kwargs.get("vllm_cached_tokens", 0) - start))
        slots = kwargs["slot_mapping"][start + skipped : end].long()
        for layer, pages in enumerate(_pages(self, kwargs)):
            at = slots // pages.shape[1], slots % pages.shape[1]
            data = memory_obj.tensor[:, layer, skipped:].transpose(0, 1)
            pages[at] = data.reshape(len(slots), *pages.shape[2:])

    def from_gpu(self: Any, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        slots = kwargs["slot_mapping"][start:end].long()
        for layer, pages in enumerate(_pages(self, kwargs)):
            at = slots // pages.shape[1], slots % pages.shape[1]
            memory_obj.tensor[:, layer] = pages[at].reshape(len(slots), 2, width).transpose(0, 1)

    def batched(one: Callable[..., None]) -> Callable[..., None]:
        def copy(self: Any, objects: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
            for memory_obj, start, end in zip(objects, starts, ends, strict=True):
                one(self, memory_obj, start, end, **kwargs)

        return copy

    methods = {
        "get_shape": get_shape,
        "to_gpu": to_gpu,
        "from_gpu": from_gpu,
        "batched_to_gpu": batched(to_gpu),
        "batched_from_gpu": batched(from_gpu),
    }
    return type("CopiesOnCPU", (interface,), methods)()


def _pages(connector: Any, kwargs: Any) -> list[torch.Tensor]:
    """A tensor a layer: blocks, tokens of a block, and the rest."""
    if "kvcaches" in kwargs:
        connector.kvcaches = list(kwargs["kvcaches"])
    found = []
    for cache in connector.kvcaches:
        is_split = cache.dim() == 5 and cache.shape[0] == 2 and cache.shape[1] != 2  # K, then V
        found.append(cache.movedim((int(is_split), _TOKEN_DIM), (0, 1)))
    return found
