"""CUDA on a CPU, and stand-ins for the parts of connectors that cannot run without a GPU.

Copies of one direction run in order, at most a few steps late, as on a CUDA stream.

- VSIM-5 A replaced part of the connector **must** be named in the verdict. CUDA's own operations
  (streams, events, copies between addresses) are not parts of a connector.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import Any
from unittest.mock import patch

import torch

from kvview.testing.connector.exercised.coverage import REPLACED
from kvview.testing.connector.scenario.scenario import Fate
from kvview_vllm.releases.cpu.cuda_on_cpu import use_in

_CUDA_ONLY = {
    "OffloadingConnector": ("cpu_spec_copies", "replace_worker"),
    "SimpleCPUOffloadConnector": ("simple_offload_copies", "replace_backend"),
}
_LMCACHE = frozenset({"LMCacheConnectorV1", "LMCacheConnectorV1Dynamic"})
# Not a comment about LMCache, because importing LMCache takes seconds, and vLLM 0.32 cannot start
# an engine after the import.
_NAMES_LMCACHE = re.compile(r"lmcache\.|import lmcache|LMCacheConnector")
_MAKE_TENSORS = ("empty", "zeros", "ones", "full", "tensor", "empty_like", "zeros_like")


def copies_on_cuda(connector_classes: Sequence[type]) -> bool:
    """Whether a stand-in replaces a part of these connectors, which can only copy with CUDA."""
    return not _names(connector_classes).isdisjoint(_CUDA_ONLY)


def _bases(connector_classes: Sequence[type]) -> set[type]:
    return {kind for cls in connector_classes for kind in cls.__mro__}


def _names(connector_classes: Sequence[type]) -> set[str]:
    return {kind.__name__ for kind in _bases(connector_classes)}


def _use_lmcache(connector_classes: Sequence[type]) -> bool:
    """Whether a connector is LMCache's, or is defined in a module that names it, to wrap it."""
    is_lmcache = not _LMCACHE.isdisjoint(_names(connector_classes))
    return is_lmcache or any(_names_lmcache(cls.__module__) for cls in connector_classes)


@cache  # because each run of a seed asks twice
def _names_lmcache(module: str) -> bool:
    if module.startswith("vllm."):
        return False
    try:
        return bool(_NAMES_LMCACHE.search(inspect.getsource(sys.modules[module])))
    except (KeyError, OSError, TypeError):  # without a source
        return False


class CopyQueue:
    """Copies of one direction, in order.

    Args:
        stand_ins: Determines the delay of each copy.
    """

    def __init__(self, stand_ins: StandIns) -> None:
        self._stand_ins = stand_ins
        self._waiting: deque[tuple[int, object, Callable[[], None]]] = deque()
        self.done: list[Any] = []

    def put(self, key: object, copy: Callable[[], None]) -> None:
        """Start a copy, which is identified by a key."""
        due = self._stand_ins.now + self._stand_ins.next_delay()
        self._waiting.append((due, key, copy))
        self.advance()

    def advance(self) -> None:
        """Run the copies that are due."""
        while self._waiting and self._waiting[0][0] <= self._stand_ins.now:
            self._run_one()

    def wait(self, keys: Collection[object]) -> None:
        """Run copies in order until all copies with these keys have ended."""
        while any(key in keys for _, key, _ in self._waiting):
            self._run_one()

    def _run_one(self) -> None:
        _, key, copy = self._waiting.popleft()
        copy()
        self.done.append(key)


class StandIns:
    """The stand-ins of one run.

    Args:
        fates: Delays of the copies, in steps, which are used in turn.
        before_step: Called at the start of each step.
    """

    def __init__(
        self, fates: Sequence[Fate], before_step: Callable[[], None] = lambda: None
    ) -> None:
        self._before_step = before_step
        self._delays = [fate.move_after for fate in fates] or [1]
        self._num_copies = 0
        self._queues: list[CopyQueue] = []
        self.now = 0
        self.used: set[str] = set()
        """The replaced parts, as the coverage names them."""

    def tick(self) -> None:
        """Start a step."""
        self._before_step()
        self.now += 1
        for queue in self._queues:
            queue.advance()

    def delay_from(self, rank: int) -> None:
        """Start with another delay on each rank, so that a copy is late on one rank only."""
        self._num_copies = rank

    def next_delay(self) -> int:
        """Return the number of steps until the next copy may run."""
        self._num_copies += 1
        return self._delays[self._num_copies % len(self._delays)]

    def note(self, part: str) -> None:
        """Record that a part of the connector was replaced."""
        self.used.add(f"{REPLACED}{part}")

    def make_queue(self, part: str) -> CopyQueue:
        """Make the queue of one direction.

        Args:
            part: The part of the connector that the queue replaces; empty if the queue replaces
                only CUDA.
        """
        if part:
            self.note(part)
        self._queues.append(CopyQueue(self))
        return self._queues[-1]

    @contextmanager
    def installed(self, connector_classes: Sequence[type]) -> Iterator[None]:
        """Replace parts during the ``with`` block; replace nothing on a machine with CUDA.

        Args:
            connector_classes: The connectors that run.
        """
        with ExitStack() as stack:
            if not torch.cuda.is_available():
                stack.enter_context(patch.object(torch.Tensor, "cuda", _itself))
                use_in(torch, stack)
                for name in _MAKE_TENSORS:
                    make = _without_pinning(getattr(torch, name))
                    stack.enter_context(patch.object(torch, name, make))
                stack.enter_context(patch.object(torch.Tensor, "pin_memory", _itself))
                for kind in _bases(connector_classes):
                    if kind.__name__ in _CUDA_ONLY:
                        module, replace = _CUDA_ONLY[kind.__name__]
                        getattr(_copies(module), replace)(self.make_queue, stack, kind)
                if _use_lmcache(connector_classes):
                    _copies("lmcache_copies").replace_gpu_connector(self.note, stack)
            yield

    @staticmethod
    def end_process(connector_classes: Sequence[type]) -> None:
        """Drop the state of these connectors that stays in the process after their shutdown.

        Args:
            connector_classes: The connectors that ran.
        """
        if _use_lmcache(connector_classes):
            _copies("lmcache_copies").end_engines()


def _itself(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Replaces ``Tensor.cuda`` and ``Tensor.pin_memory``; returns the tensor itself."""
    return tensor


def _without_pinning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function that ignores ``pin_memory``, which only CUDA needs."""

    @wraps(make)
    def call(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return make(*args, **kwargs)

    return call


def _copies(module: str) -> Any:
    return importlib.import_module(f"kvview_vllm.releases.cpu.{module}")
