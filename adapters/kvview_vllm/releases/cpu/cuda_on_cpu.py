"""CUDA's own operations, done by a CPU: streams, events, and copies of bytes between addresses.

These operations replace no part of a connector, because they use each address and size as the
connector has computed it. Copies in the same direction run in order and may be some steps late.

Source: vllm/v1/kv_offload/cpu/gpu_worker.py, 0.25.0 to 0.33.0; ``swap_blocks_batch`` in
csrc/cache_kernels.cu; ``copy_blocks`` of vllm/v1/simple_kv_offload/cuda_mem_ops.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    import torch

MakeQueue = Callable[[], Any]


def copy_bytes(sources: Iterable[int], targets: Iterable[int], sizes: Iterable[int]) -> None:
    """Copy bytes between addresses."""
    for source, target, size in zip(sources, targets, sizes, strict=True):
        ctypes.memmove(int(target), int(source), int(size))


def as_gpu_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor of the host as a tensor that claims to be on the GPU."""
    import torch

    return tensor.as_subclass(type("TensorOnGPU", (torch.Tensor,), {"is_cuda": True}))


class Stream:
    """A stream without an order of its own, because the queues keep copies in order."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.last: tuple[Any, object] | None = None

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the priorities of streams."""
        return 0, 0

    def wait_stream(self, stream: Stream) -> None:
        """Do nothing, because a step on a CPU has ended when it returns."""

    def wait_event(self, event: Event) -> None:
        """Do nothing, because copies of one direction run in order."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event, or a new one, and return it."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Return True, because a step on a CPU has ended when it returns."""
        return True

    def synchronize(self) -> None:
        """Do nothing, because a step on a CPU has ended when it returns."""


class Device:
    """A ``current_platform`` whose streams copy on the CPU.

    Args:
        make_queue: Makes the queue of copies of one direction.
    """

    def __init__(self, make_queue: MakeQueue) -> None:
        self.Stream = Stream
        self._make_queue = make_queue
        self._current = Stream()

    def is_xpu(self) -> bool:
        """Return False, so that pointers are signed."""
        return False

    def current_stream(self) -> Stream:
        """Return the stream of the innermost ``with stream(...)``."""
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Make a stream the current one."""
        before, self._current = self._current, stream
        yield
        self._current = before

    def make_copy(self, *_: Any, **__: Any) -> Callable[..., None]:
        """Make a ``swap_blocks_batch`` for one direction."""
        queue = self._make_queue()

        def swap_blocks_batch(
            sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, **_: Any
        ) -> None:
            self._current.last = queue, (key := object())
            queue.put(key, lambda: copy_bytes(sources.tolist(), targets.tolist(), sizes.tolist()))

        return swap_blocks_batch


class Event:
    """The end of a copy, with the interface of ``torch.Event``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._copy: tuple[Any, object] | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Set the event to the end of the last copy of a stream."""
        self._copy = None if stream is None else stream.last

    def wait(self, stream: Stream | None = None) -> None:
        """Do nothing, because copies of one direction run in order."""

    def query(self) -> bool:
        """Whether the copy has ended."""
        return self._copy is None or self._copy[1] in self._copy[0].done

    def synchronize(self) -> None:
        """Wait for the copy."""
        if self._copy is not None:
            self._copy[0].wait({self._copy[1]})

    def elapsed_time(self, event: Event) -> float:
        """Return any number of milliseconds, because only metrics read it."""
        return 1.0


def use_in(torch: Any, stack: ExitStack) -> None:
    """Let code that uses ``torch.cuda`` record and wait for events and streams of the CPU.

    Args:
        torch: The module ``torch``.
        stack: Undoes the replacement.
    """
    device = Device(lambda: None)
    replacements: dict[str, Any] = {
        "Event": Event,
        "Stream": Stream,
        "current_stream": lambda *_: device.current_stream(),
        "default_stream": lambda *_: device.current_stream(),
        "stream": device.stream,
        "synchronize": lambda *_: None,
        "set_device": lambda *_: None,
    }
    for name, replacement in replacements.items():
        stack.enter_context(patch.object(torch.cuda, name, replacement))
    if accelerator := getattr(torch, "accelerator", None):  # torch 2.6
        stack.enter_context(patch.object(accelerator, "current_device_index", lambda: 0))


class Torch:
    """The module ``torch`` with :class:`Event` as its events."""

    Event = Event

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)
