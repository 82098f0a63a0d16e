"""The blocks of requests that may be stored: each one once, when its KV is computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvview.connector import BlockIds, FullBlock, RequestInfo, RequestStep, full_blocks
from kvview.geometry import CacheGeometry
from kvview.store_connector.page_policy import Policy


class Candidates:
    """Notes of each running request how many of its tokens were considered.

    Args:
        geometry: Of the engine.
        policy: Decides which blocks are wanted.
    """

    def __init__(self, geometry: CacheGeometry, policy: Policy) -> None:
        self._geometry = geometry
        self._admits = policy.admits
        self._admits_all = type(policy).admits is Policy.admits
        self.null_block_id = 0
        self._seen: dict[str, int] = {}

    def begin(self, request: RequestInfo, num_tokens: int) -> None:
        """A request starts, and has KV of so many tokens that it did not compute."""
        self._seen[request.request_id] = num_tokens

    def has_less(self, request_id: str, num_computed_tokens: int) -> bool:
        """Whether a request lost tokens that were considered, because a load failed."""
        return num_computed_tokens < self._seen.get(request_id, 0)

    def go_back(self, request_id: str, num_computed_tokens: int) -> None:
        """Consider the tokens of a request again from here on."""
        if request_id in self._seen:
            self._seen[request_id] = num_computed_tokens

    def after(self, steps: Iterable[RequestStep]) -> list[FullBlock]:
        """The blocks that become full in a step; generated ones get their hash a step later."""
        blocks: list[FullBlock] = []
        size, seen = self._geometry.hash_block_size, self._seen
        for running in steps:
            first = running.num_computed_tokens
            end = first + running.num_scheduled_tokens
            first = seen.setdefault(running.request.request_id, first)
            if end // size > first // size:
                blocks += self._new_blocks(running.request, running.block_ids, end)
        return blocks

    def at_end(self, request: RequestInfo, block_ids: BlockIds) -> Sequence[FullBlock]:
        """The last blocks of a request that is about to lose them."""
        if request.request_id not in self._seen:
            return ()  # it never had blocks
        blocks = self._new_blocks(request, block_ids, request.num_computed_tokens)
        del self._seen[request.request_id]
        return blocks

    def _new_blocks(
        self, request: RequestInfo, block_ids: BlockIds, computed: int
    ) -> list[FullBlock]:
        first = self._seen[request.request_id]
        hashed = len(request.block_hashes) * self._geometry.hash_block_size
        self._seen[request.request_id] = max(first, min(computed, hashed))
        blocks = full_blocks(
            self._geometry,
            request,
            block_ids,
            null_block_id=self.null_block_id,
            first_token=first,
            last_token=computed,
        )
        if self._admits_all:  # which saves a call for each block
            return list(blocks)
        return [block for block in blocks if self._admits(block, request)]
