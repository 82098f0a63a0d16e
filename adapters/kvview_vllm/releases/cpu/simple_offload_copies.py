"""The copies of vLLM's ``SimpleCPUOffloadConnector`` on a CPU.

The manager, the worker and the addresses of the copies come from vLLM. The CPU copies the bytes
during steps of the run, and not on the backend's thread, so that each seed is reproducible.

Source: vllm/v1/simple_kv_offload/worker.py and copy_backend.py, 0.19.0 to 0.33.0.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from kvview_vllm.releases.cpu.cuda_on_cpu import Event, Stream, copy_bytes


def replace_backend(make_queue: Callable[[str], Any], stack: ExitStack, connector: type) -> None:
    """Let the worker copy with a :class:`LateBackend` until the stack is closed.

    Args:
        make_queue: Makes the queue of copies of one direction, which may be late.
        stack: Undoes the replacement.
        connector: vLLM's class, or a copy of this class in another package, with a separate worker.
    """
    import torch

    worker = _module_of(_module_of(connector).SimpleCPUOffloadWorker)
    memory = importlib.import_module(f"{worker.__package__}.cuda_mem_ops")
    copy: Any = _copy_batch
    name = "_batch_memcpy_fn"
    if not hasattr(memory, name):  # with the number of attributes that CUDA takes
        name, copy = "_batch_memcpy", (copy, 1)
    stack.enter_context(patch.object(memory, name, copy))
    stack.enter_context(
        patch.object(worker, "DmaCopyBackend", lambda: LateBackend(memory, make_queue))
    )
    stack.enter_context(patch.object(torch, "Event", Event))


def _module_of(kind: type) -> Any:
    return importlib.import_module(kind.__module__)


def _copy_batch(targets: int, sources: int, sizes: int, count: int, *_: Any) -> int:
    """Replaces ``cuMemcpyBatchAsync``, for arrays at three addresses."""
    array = ctypes.c_uint64 * count
    copy_bytes(array.from_address(sources), array.from_address(targets), array.from_address(sizes))
    return 0


class LateBackend:
    """Copies blocks between two sets of tensors, in order and some steps late.

    Args:
        memory: The worker's module ``cuda_mem_ops``.
        make_queue: Makes the queue of copies of one direction.
    """

    def __init__(self, memory: Any, make_queue: Callable[[str], Any]) -> None:
        self._memory = memory
        self._queues = {is_store: make_queue("") for is_store in (True, False)}

    def init(self, gpu_caches: Mapping[str, Any], cpu_caches: Mapping[str, Any], *_: Any) -> None:
        """Receive the tensors of both sides, one row per block."""
        self._params = {
            True: self._memory.build_params(gpu_caches, cpu_caches, Stream()),
            False: self._memory.build_params(cpu_caches, gpu_caches, Stream()),
        }

    def launch_copy(
        self,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Any]],
        wait_event: object = None,
    ) -> None:
        """Copy blocks; the event ends when the blocks are copied."""
        event, stream = Event(), Stream()
        stream.last = self._queues[is_store], event
        event.record(stream)
        source, target = list(src_blocks), list(dst_blocks)

        def copy() -> None:
            self._memory.copy_blocks(source, target, self._params[is_store])

        events_list.append((event_idx, event))
        self._queues[is_store].put(event, copy)

    def shutdown(self) -> None:
        """Do nothing, because the copies have no thread."""
