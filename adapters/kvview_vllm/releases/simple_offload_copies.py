"""Stands in for the copies of vLLM's ``SimpleCPUOffloadConnector``, at its backend.

The manager, the worker and its bookkeeping of events stay vLLM's.

Source: vllm/v1/simple_kv_offload/worker.py and copy_backend.py, 0.19.0 to 0.33.0.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

_STANDS_IN = "for the DMA copies of SimpleCPUOffloadConnector, copies between steps"


def replace_backend(make_queue: Callable[[str], Any], stack: ExitStack) -> None:
    """Have its worker copy with a :class:`LateBackend`, as long as the stack is open.

    Args:
        make_queue: Of copies of a direction, which may be late.
        stack: Undoes it.
    """
    import torch

    try:
        worker = importlib.import_module("vllm.v1.simple_kv_offload.worker")
    except ImportError:  # before 0.19
        return
    stack.enter_context(patch.object(worker, "DmaCopyBackend", lambda: LateBackend(make_queue)))
    stack.enter_context(patch.object(torch.cuda, "Stream", _Stream))
    stack.enter_context(patch.object(torch.cuda, "current_stream", _Stream))
    stack.enter_context(patch.object(torch, "Event", _Recorded))


class LateBackend:
    """Copies blocks between two sets of tensors, in order and late.

    Args:
        make_queue: Of copies of a direction.
    """

    def __init__(self, make_queue: Callable[[str], Any]) -> None:
        self._queues = {is_store: make_queue(_STANDS_IN) for is_store in (True, False)}

    def init(self, gpu_caches: Mapping[str, Any], cpu_caches: Mapping[str, Any], *_: Any) -> None:
        """Take the tensors of both sides, a row a block."""
        self._gpu, self._cpu = gpu_caches, cpu_caches

    def launch_copy(
        self,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Any]],
        wait_event: object = None,
    ) -> None:
        """Copy blocks; the event is done when they are."""
        source, target = (self._gpu, self._cpu) if is_store else (self._cpu, self._gpu)
        event = _Done(self._queues[is_store])

        def copy() -> None:
            for name, tensor in source.items():
                target[name][list(dst_blocks)] = tensor[list(src_blocks)]

        events_list.append((event_idx, event))
        self._queues[is_store].put(event, copy)

    def shutdown(self) -> None:
        """Nothing is left running."""


class _Done:
    """The end of one copy, as ``torch.Event`` tells it."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def query(self) -> bool:
        return self in self._queue.done

    def synchronize(self) -> None:
        self._queue.wait({self})


class _Stream:
    """In place of a stream of CUDA: on a CPU a step is over when it returns."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


class _Recorded:
    """In place of an event between streams."""

    def record(self, stream: object = None) -> None: ...
