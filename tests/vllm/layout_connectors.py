"""Connectors that copy the pages of the KV cache wrongly, whatever the memory layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from examples.host_cache import HostCacheConnector, HostCacheWorker
from kvview import TransferResult, WorkerConnector
from kvview_vllm.releases.cpu.worker_caches import RealCaches


class RightConnector(HostCacheConnector):
    """A connector whose worker may be replaced."""

    worker: type[HostCacheWorker] = HostCacheWorker

    @override
    def make_worker(self) -> WorkerConnector:
        return self.worker(100)


class WritesElsewhere(RightConnector):
    """A load also changes a block that no request has."""

    class worker(HostCacheWorker):
        @override
        def copy(
            self, job_id: int, src: Any, src_pages: list[Any], dst: Any, dst_pages: list[Any]
        ) -> TransferResult:
            result = super().copy(job_id, src, src_pages, dst, dst_pages)
            if dst_pages is self.gpu:
                # Groups overlay each other: each address once.
                for pages in {pages.data_ptr(): pages for pages in dst_pages}.values():
                    pages[(dst.block_ids[-1] + 20) % len(pages), 0] ^= 1
            return result


@dataclass(frozen=True)
class Fault:
    """A wrong copy of pages of a layer, each of shape ``(states, heads ..., words)``.

    Args:
        name: Name in reports.
        layer: The layer.
        pages: The wrong pages among those that a load writes.
        change: Makes a wrong page from the page and from the bytes that were there before.
    """

    name: str
    layer: int
    pages: slice
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _swap_heads(page: torch.Tensor) -> torch.Tensor:
    return page.flip(-2) if page.dim() > 2 else page  # MLA may have no dimension for heads


_ALL, _LAST = slice(None), slice(-1, None)
FAULTS = (
    Fault("two heads are swapped", 0, _LAST, lambda page, _: _swap_heads(page)),
    Fault("the last layer is skipped", -1, _ALL, lambda _, before: before),
    Fault("the tokens of a block are reversed", 0, _LAST, lambda page, _: page.flip(0)),
    Fault("the offset is wrong", -1, _LAST, lambda page, _: page.roll(1, -1)),
)


class InjectsFault(RightConnector):
    """Loads pages, and makes some of them wrong in the memory of vLLM's layers."""

    fault: Fault
    caches: RealCaches
    """The memory of the engine that runs."""
    has_changed: bool
    """Whether the fault changed a byte."""

    @override
    def make_worker(self) -> WorkerConnector:
        return _Injecting(100)


class _Injecting(HostCacheWorker):
    @override
    def copy(
        self, job_id: int, src: Any, src_pages: list[torch.Tensor], dst: Any, dst_pages: list[Any]
    ) -> TransferResult:
        if dst_pages is not self.gpu:
            return super().copy(job_id, src, src_pages, dst, dst_pages)
        fault, caches = InjectsFault.fault, InjectsFault.caches
        layer = fault.layer % len(caches.slots)
        sizes = [len(group.layer_names) for group in caches.config.kv_cache_groups]
        number = [index for index, size in enumerate(sizes) for _ in range(size)][layer]
        first = sum(dst.group_sizes[:number])
        blocks = dst.block_ids[first : first + dst.group_sizes[number]]
        before = caches.slots[layer][blocks]
        result = super().copy(job_id, src, src_pages, dst, dst_pages)
        right = caches.slots[layer][blocks]
        wrong = right.clone()
        for page, old in zip(wrong[fault.pages], before[fault.pages], strict=True):
            page.copy_(fault.change(page.clone(), old))
        caches.slots[layer][blocks] = wrong
        InjectsFault.has_changed = bool((wrong != right).any())
        return result
