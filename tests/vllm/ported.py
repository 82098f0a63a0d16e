"""The port of docs/porting.md: a raw connector that holds blocks while it stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvview_vllm.binding import BlockPoolViewMixin
from tests.vllm.raw_connectors import Ended, HostConnector, Kept


class HoldsWhileItStores(HostConnector):
    """Holds the blocks that it stores, so that requests do not wait for their stores."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.within_step = True
        self.to_send: list[Any] = []
        self.sent: list[Any] = []

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        for held in self.sent:
            self.release(held)
        self.sent, self.to_send = self.to_send, []
        return super().build_connector_meta(scheduler_output)

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> Kept:
        if copies := self.copies_of(request, (block_ids,)):
            self.to_send.append(self.hold(list(block_ids), [block for _, block in copies]))
            self.meta.stores[request.request_id] = copies
            self.stored.update(key for key, _ in copies)
        return False, None

    def get_finished(self, finished_req_ids: set[str]) -> Ended:
        for copies in self._get_connector_metadata().stores.values():
            self.store(copies)
        return None, None

    def hold(self, table: list[int], to_copy: list[int]) -> Any:
        raise NotImplementedError

    def release(self, held: Any) -> None:
        raise NotImplementedError


class Before(HoldsWhileItStores):
    """Holds the whole table, and releases only the blocks that it copied."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.pool = gpu_block_pool

    def hold(self, table: list[int], to_copy: list[int]) -> list[int]:
        self.pool.touch([self.pool.blocks[block_id] for block_id in table])
        return to_copy

    def release(self, held: list[int]) -> None:
        self.pool.free_blocks([self.pool.blocks[block_id] for block_id in held])


class After(BlockPoolViewMixin, HoldsWhileItStores):
    """The same with the view, which counts the holds: it holds the blocks that it copies."""

    def bind_gpu_block_pool_view(self, view: Any) -> None:
        self.view = view

    def hold(self, table: list[int], to_copy: list[int]) -> list[int]:
        self.view.touch_blocks(to_copy)
        return to_copy

    def release(self, held: list[int]) -> None:
        self.view.free_blocks(held)
