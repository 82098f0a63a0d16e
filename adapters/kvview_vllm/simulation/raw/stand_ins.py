"""What moves bytes in place of CUDA, at the narrowest interface that there is.

Copies of one direction run in order, and up to some steps late, as on a CUDA stream.

- VSIM-5 What stands in for a part of the connector **must** be named in the verdict.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from kvview.testing.connector.scenario import Fate

_CUDA_ONLY = frozenset({"OffloadingConnector", "SimpleCPUOffloadConnector"})

_LMCACHE = frozenset({"LMCacheConnectorV1", "LMCacheConnectorV1Dynamic"})

PREFIX = "stands in"
"""Begins the names of what stood in, in the coverage."""


def copies_on_cuda(connector_classes: Sequence[type]) -> bool:
    """Whether vLLM's own part of a connector copies with CUDA alone, and is replaced."""
    return not _CUDA_ONLY.isdisjoint(_names(connector_classes))


def _names(connector_classes: Sequence[type]) -> set[str]:
    return {kind.__name__ for cls in connector_classes for kind in cls.__mro__}


class CopyQueue:
    """Copies of one direction, in order.

    Args:
        stand_ins: Says how late each is.
    """

    def __init__(self, stand_ins: StandIns) -> None:
        self._stand_ins = stand_ins
        self._waiting: deque[tuple[int, object, Callable[[], None]]] = deque()
        self.done: list[Any] = []

    def put(self, key: object, copy: Callable[[], None]) -> None:
        """Start a copy, which is known by its key."""
        due = self._stand_ins.now + self._stand_ins.next_delay()
        self._waiting.append((due, key, copy))
        self.advance()

    def advance(self) -> None:
        """Run what is due."""
        while self._waiting and self._waiting[0][0] <= self._stand_ins.now:
            self._run_one()

    def wait(self, keys: Collection[object]) -> None:
        """Run until none of these is left."""
        while any(key in keys for _, key, _ in self._waiting):
            self._run_one()

    def _run_one(self) -> None:
        _, key, copy = self._waiting.popleft()
        copy()
        self.done.append(key)


class StandIns:
    """What stands in during one run.

    Args:
        fates: How many steps the copies are late, in turn.
    """

    def __init__(self, fates: Sequence[Fate]) -> None:
        self._delays = [fate.move_after for fate in fates] or [1]
        self._num_copies = 0
        self._queues: list[CopyQueue] = []
        self.now = 0
        self.used: set[str] = set()

    def tick(self) -> None:
        """A step begins."""
        self.now += 1
        for queue in self._queues:
            queue.advance()

    def next_delay(self) -> int:
        """Steps until the next copy may run."""
        self._num_copies += 1
        return self._delays[self._num_copies % len(self._delays)]

    def make_queue(self, what: str) -> CopyQueue:
        """Queue for a direction.

        Args:
            what: Stands in, for the verdict.
        """
        self.used.add(f"{PREFIX}: {what}")
        self._queues.append(CopyQueue(self))
        return self._queues[-1]

    @contextmanager
    def installed(self, connector_classes: Sequence[type]) -> Iterator[None]:
        """Stand in as long as the block runs; nothing where there is CUDA.

        Args:
            connector_classes: What is run: for those of vLLM its own parts are replaced.
        """
        with ExitStack() as stack:
            if not torch.cuda.is_available():
                stack.enter_context(patch.object(torch.Tensor, "cuda", self._cuda))
                names = _names(connector_classes)
                if "OffloadingConnector" in names:
                    self._replace_cpu_spec(stack)
                if "SimpleCPUOffloadConnector" in names:
                    self._replace_backend(stack)
                if not _LMCACHE.isdisjoint(names):
                    self._replace_gpu_connector(stack)
            yield

    @property
    def _cuda(self) -> Callable[..., torch.Tensor]:
        def cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.used.add(f"{PREFIX}: for Tensor.cuda(), the tensor itself")
            return tensor

        return cuda

    def _replace_cpu_spec(self, stack: ExitStack) -> None:
        from kvview_vllm.releases.cpu_spec_copies import replace_worker

        replace_worker(self.make_queue, stack)

    def _replace_backend(self, stack: ExitStack) -> None:
        from kvview_vllm.releases.simple_offload_copies import replace_backend

        replace_backend(self.make_queue, stack)

    def _replace_gpu_connector(self, stack: ExitStack) -> None:
        from kvview_vllm.releases.lmcache_copies import replace_gpu_connector

        replace_gpu_connector(self.make_queue, stack)
