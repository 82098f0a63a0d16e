"""Connectors that copy the pages of the KV cache wrongly, whatever the memory layout."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from examples.host_cache import HostCacheConnector, HostCacheWorker
from kvview import TransferResult, WorkerConnector


class RightConnector(HostCacheConnector):
    """A connector whose worker may be replaced."""

    worker: type[HostCacheWorker] = HostCacheWorker

    @override
    def make_worker(self) -> WorkerConnector:
        return self.worker(100)


class _Wrong(HostCacheWorker):
    def spoil(self, pages: torch.Tensor, block: int) -> None:
        """Write a wrong byte after a load."""

    @override
    def copy(
        self, job_id: int, src: Any, src_pages: list[torch.Tensor], dst: Any, dst_pages: list[Any]
    ) -> TransferResult:
        result = super().copy(job_id, src, src_pages, dst, dst_pages)
        if dst_pages is self.gpu:
            # Groups overlay each other: each address once.
            for pages in {pages.data_ptr(): pages for pages in dst_pages}.values():
                self.spoil(pages, dst.block_ids[-1])
        return result


class LosesAByte(RightConnector):
    """One byte of the last block is not that of the store."""

    class worker(_Wrong):
        @override
        def spoil(self, pages: torch.Tensor, block: int) -> None:
            pages[block, 0] ^= 1


class WritesElsewhere(RightConnector):
    """A load also changes a block that no request has."""

    class worker(_Wrong):
        @override
        def spoil(self, pages: torch.Tensor, block: int) -> None:
            pages[(block + 20) % len(pages), 0] ^= 1
