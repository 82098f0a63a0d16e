"""Wrong raw connectors whose author had not read how the canary compares blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.vllm.raw_connectors import Copies, HostConnector, Match


class ShortKeys(HostConnector):
    """Uses one byte of a hash as the key of a page."""

    def key(self, group: int, block_hash: bytes) -> bytes:
        return bytes([group]) + block_hash[:1]


class ReusesPages(HostConnector):
    """Has eight pages of host memory, and reuses the oldest although its key is still found."""

    def store(self, copies: Copies) -> None:
        for key, block_id in copies:
            super().store([(key, block_id)])
            if len(self.host) > 8:
                self.host[next(iter(self.host))] = self.host[key]


class LoadsABatch(HostConnector):
    """Copies at most two blocks of a load."""

    def load(self, copies: Copies) -> None:
        super().load(copies[:2])


class ForgetsTheHits(HostConnector):
    """Loads from the first block on, also after hits on the GPU."""

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> Match:
        answer = super().get_num_new_matched_tokens(request, num_computed)
        self.first_block[request.request_id] = 0
        return answer


class StoresTheTail(HostConnector):
    """Stores the block that is not full under the key of the block before it."""

    def copies_of(self, request: Any, tables: Sequence[Sequence[int]]) -> Copies:
        copies = super().copies_of(request, tables)
        num_full = self.num_full_blocks(request)
        if copies and num_full < len(tables[0]):
            copies.append((copies[-1][0], tables[0][num_full]))
        return copies
