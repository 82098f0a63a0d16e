"""The copies of vLLM's own ``CPUOffloadingSpec`` on a CPU.

1. From 0.25 on vLLM's own worker runs, and computes every address. Only CUDA is replaced
   (:mod:`kvview_vllm.releases.cpu.cuda_on_cpu`).
2. Up to 0.24 a stand-in with the interface of the spec's handlers makes the copies. Managers, specs
   and the bookkeeping of jobs are unmodified code of vLLM.

Source: vllm/v1/kv_offload, 0.12.0 to 0.33.0: ``get_worker`` of the spec from 0.25 on,
``get_handlers`` up to 0.24.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from kvview_vllm.releases.compat.calls import blocks_per_chunk, cache_config_of, make_known
from kvview_vllm.releases.compat.shapes import find_class
from kvview_vllm.releases.compat.versions import vllm

MakeQueue = Callable[[str], Any]
_REPLACED = "the copies of vLLM's CPUOffloadingSpec"


def replace_worker(make_queue: MakeQueue, stack: ExitStack, _: type) -> None:
    """Let vLLM's CPU spec copy without CUDA until the stack is closed.

    Args:
        make_queue: Makes the queue of copies of one direction, which may be late.
        stack: Undoes the replacement.
    """
    from kvview_vllm.transfer import canonical_kv_caches

    try:
        module = vllm("v1.kv_offload.cpu.spec")
    except ImportError:
        module = vllm("v1.kv_offload.cpu")
    spec = getattr(module, "CPUOffloadingSpec", None)
    if spec is None:
        return

    if hasattr(spec, "get_worker"):
        _replace_cuda(spec, make_queue, stack)
        return

    def get_handlers(self: Any, kv_caches: Any, *_: Any) -> Iterator[tuple[Any, Any, Any]]:
        if isinstance(kv_caches, dict):  # up to 0.18: tensors of layers
            kv_caches = canonical_kv_caches(kv_caches, cache_config_of(self))
        handler = LateWorker(make_queue, self, kv_caches)
        gpu, cpu = module.GPULoadStoreSpec, module.CPULoadStoreSpec
        yield gpu, cpu, handler
        yield cpu, gpu, handler

    stack.enter_context(patch.object(spec, "get_handlers", get_handlers))


def _replace_cuda(spec: Any, make_queue: MakeQueue, stack: ExitStack) -> None:
    from kvview_vllm.releases.cpu.cuda_on_cpu import Device, Torch, as_gpu_tensor

    def get_worker(self: Any, kv_caches: Any) -> Any:
        if self._worker is None:
            tensors = [replace(one, tensor=as_gpu_tensor(one.tensor)) for one in kv_caches.tensors]
            self._worker = self.create_worker(replace(kv_caches, tensors=tensors))
        return self._worker

    worker = vllm("v1.kv_offload.cpu.gpu_worker")
    device = Device(lambda: make_queue(""))
    replacements: list[tuple[Any, str, Any]] = [
        (spec, "get_worker", get_worker),
        (worker, "current_platform", device),
        (worker, "_select_swap_blocks_fn", device.make_copy),
        (worker, "torch", Torch()),
    ]
    for owner, name, value in replacements:
        stack.enter_context(patch.object(owner, name, value))


class LateWorker:
    """Copies between GPU blocks and chunks of the host, some steps late.

    Args:
        make_queue: Makes the queue of copies of one direction, which may be late.
        spec: vLLM's ``CPUOffloadingSpec``.
        kv_caches: Canonical KV caches of vLLM or of kvview.
    """

    def __init__(self, make_queue: MakeQueue, spec: Any, kv_caches: Any) -> None:
        self._caches = kv_caches
        self._per_chunk = blocks_per_chunk(spec)
        self._num_chunks = _first(spec, "num_chunks", "num_blocks", "num_cpu_blocks")
        self._region = _shared_region(spec, self._num_chunks)
        self._host = [self._host_pages(cache.page_size_bytes) for cache in kv_caches.tensors]
        self._stores = make_queue(_REPLACED)
        self._loads = make_queue(_REPLACED)

    def transfer_async(self, job_id: int, spec: Any) -> bool:
        """Start a store or a load; the classes of the specs decide which."""
        source, target = spec
        if type(source).__name__.startswith("GPU"):
            self._stores.put(job_id, lambda: self._copy(source, target, True))
        else:
            self._loads.put(job_id, lambda: self._copy(target, source, False))
        return True

    def get_finished(self) -> list[Any]:
        """Return the jobs that have ended since the last call."""
        done = []
        for queue, direction in ((self._stores, ("GPU", "CPU")), (self._loads, ("CPU", "GPU"))):
            done += [_result(job_id, direction) for job_id in queue.done]
            queue.done.clear()
        return done

    def wait(self, job_ids: Collection[int]) -> None:
        """Run these jobs now."""
        self._stores.wait(set(job_ids))
        self._loads.wait(set(job_ids))

    def shutdown(self) -> None:
        """Release the host memory."""
        self._host.clear()
        if self._region is not None:
            self._region.cleanup()
            self._region = None

    def _host_pages(self, page_bytes: int) -> Any:
        """Allocate memory for a page of each block of each chunk."""
        shape = self._num_chunks, self._per_chunk, page_bytes
        if self._region is not None:
            # Up to 0.27 the attribute has the second name.
            create = _first(self._region, "create_next_worker_view", "create_next_view")
            return create(self._per_chunk * page_bytes).unflatten(1, shape[1:])
        import torch

        return torch.zeros(shape, dtype=torch.int8)

    def _copy(self, gpu: Any, cpu: Any, is_store: bool) -> None:
        chunks = [int(chunk) for chunk in cpu.block_ids]
        blocks = [int(block) for block in gpu.block_ids]
        sizes = getattr(gpu, "group_sizes", None) or [len(blocks)]
        indices = getattr(gpu, "block_indices", None)
        chunk = 0
        for group, size in enumerate(sizes):
            mine, blocks = blocks[:size], blocks[size:]
            if not mine:
                continue
            # Without indices (up to 0.18) a transfer ends at the end of its last chunk.
            skip = -size % self._per_chunk if indices is None else indices[group] % self._per_chunk
            for number, block in enumerate(mine):
                at, part = divmod(skip + number, self._per_chunk)
                for ref in self._caches.group_data_refs[group]:
                    page = self._caches.tensors[ref.tensor_idx].tensor[block]
                    host = self._host[ref.tensor_idx][chunks[chunk + at], part]
                    source, target = (page, host) if is_store else (host, page)
                    target[: ref.page_size_bytes] = source[: ref.page_size_bytes]
            chunk += -(-(skip + size) // self._per_chunk)


def _shared_region(spec: Any, num_chunks: int) -> Any:
    """Return the worker's side of the memory that lower tiers share; None without lower tiers."""
    if not hasattr(spec, "secondary_tier_configs"):
        return None
    chunk_bytes = _first(spec, "kv_bytes_per_chunk", "kv_bytes_per_offloaded_block")
    engine = _first(spec, "_engine_id") or spec.vllm_config.instance_id
    parallel = spec.config.parallel if hasattr(spec, "config") else spec.vllm_config.parallel_config
    return make_known(
        vllm("v1.kv_offload.cpu.shared_offload_region").SharedOffloadRegion,
        **dict.fromkeys(("engine_id", "instance_id"), engine),
        **dict.fromkeys(("num_chunks", "num_blocks"), num_chunks),
        **dict.fromkeys(("kv_bytes_per_chunk", "kv_bytes_per_block"), chunk_bytes),
        cpu_page_size=spec.cpu_page_size_per_worker,
        rank=parallel.rank,
    )


def _result(job_id: int, direction: tuple[str, str]) -> Any:
    result = find_class("TransferResult")
    if not hasattr(result, "__dataclass_fields__"):
        return job_id, True
    values = {"job_id": job_id, "success": True, "transfer_type": direction}
    return make_known(result, **values, transfer_size=1, transfer_time=0.001)


def _first(owner: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(owner, name, None))), None)
