"""The scheduler half of the canary: finds the sampled blocks that a step computes or a load fills.

- CANARY-1 A block is sampled by its hash, so that all ranks, and all lives of a server, digest the
  same blocks.
- CANARY-2 A block **must** only be digested as computed if its hash exists, because a rejected
  draft may still be in a block without a hash, and if the request still has the block.
- CANARY-3 The blocks of a handoff (``kv_transfer_params``) **must not** be compared, because
  another engine computed them, with other rounding errors.

Source: ``Scheduler.schedule``, vllm/v1/core/sched/scheduler.py, 0.11.0 to 0.33.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import Any

from kvview import CacheGeometry, CacheGroup, Mamba
from kvview_vllm.canary.wrapper.canary_messages import SampledBlock, Work
from kvview_vllm.releases.compat.outputs import resumed_requests


@dataclass(slots=True)
class _Followed:
    """A request with blocks."""

    request: Any
    chunks: list[Sequence[Sequence[int]]] = field(default_factory=list)  # of its block table
    num_seen: int = 0  # tokens whose blocks were sampled
    due: int = 0  # step of the next look

    def table(self) -> Sequence[Sequence[int]]:
        if len(self.chunks) > 1:
            groups = zip(*self.chunks, strict=True)
            self.chunks = [[list(chain.from_iterable(parts)) for parts in groups]]
        return self.chunks[0] if self.chunks else ()


class Sampler:
    """Follows the block tables of all requests.

    Args:
        geometry: Geometry of the engine.
        sample: One block in this many is sampled.
        num_drafts: Most draft tokens of a request in a step.
    """

    def __init__(self, geometry: CacheGeometry, sample: int, num_drafts: int) -> None:
        self._sample = sample
        self._most_a_step = 1 + num_drafts
        self._hash_size = geometry.hash_block_size
        # States are only complete where a step ended, so they have no digest.
        self._groups: list[tuple[int, CacheGroup]] = [
            (number, group)
            for number, group in enumerate(geometry.groups)
            if not isinstance(group, Mamba)
        ]
        self._followed: dict[str, _Followed] = {}
        self._step = 0
        self._due: dict[int, list[str]] = {}  # requests to look at, by step
        self._queried: dict[str, tuple[int, bool]] = {}
        self._loading: set[str] = set()
        self._loads: dict[str, Sequence[SampledBlock]] = {}
        self._within_step: set[str] = set()
        self._ended: list[str] = []
        self._reset = False

    # --- calls of the scheduler ---

    def on_query(self, request: Any, num_computed: int, answer: Any) -> None:
        """Note a promise of the connector."""
        num_tokens, is_async = answer
        if num_tokens:
            self._queried[request.request_id] = num_computed, bool(is_async)
        else:
            self._queried.pop(request.request_id, None)

    def on_allocated(self, request: Any, blocks: Any, num_tokens: int) -> None:
        """Note allocated blocks, and the blocks that a load fills."""
        name = request.request_id
        self._followed[name] = _Followed(request)
        self._plan(name, 1)
        if not num_tokens or name not in self._queried:
            return
        start, is_async = self._queried.pop(name)
        if request.kv_transfer_params:
            return
        places = list(self._filled(request, blocks.get_block_ids(), start, start + num_tokens))
        if not places:
            return
        self._loads[name] = places
        (self._loading if is_async else self._within_step).add(name)

    def on_step(self, output: Any) -> Work | None:
        """Return the work of a step; None without any."""
        self._follow_tables(output)
        self._step += 1
        computed: list[SampledBlock] = []
        lengths = output.num_scheduled_tokens
        for name in self._due.pop(self._step, ()):
            one = self._followed.get(name)
            if one is None or one.due != self._step:
                continue  # it has ended, or has other blocks now
            if name in lengths:
                self._look(name, one, lengths[name], computed)
            else:
                self._plan(name, 1)
        if not (computed or self._loads or self._ended or self._reset):
            return None
        work = Work(computed, self._loads, frozenset(self._within_step), self._ended, self._reset)
        self._loads, self._within_step, self._ended, self._reset = {}, set(), [], False
        return work

    def on_received(self, names: Iterable[str]) -> None:
        """Note the ends of loads."""
        self._loading.difference_update(names)

    def on_finished(self, request_id: str) -> None:
        """Forget a request; its blocks may be allocated again."""
        self._followed.pop(request_id, None)
        self._queried.pop(request_id, None)
        if request_id in self._loading:
            self._loading.discard(request_id)
            self._ended.append(request_id)
            self._loads.pop(request_id, None)

    def on_reset(self) -> None:
        """Note a reset of the caches, after which no KV of before may be loaded."""
        self._reset = True

    # --- blocks ---

    def _follow_tables(self, output: Any) -> None:
        followed = self._followed
        for new in output.scheduled_new_reqs:
            if (one := followed.get(new.req_id)) is not None:
                one.chunks = [[list(group) for group in new.block_ids]]
                one.num_seen = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        names = compress(cached.req_ids, cached.new_block_ids)
        for name, added in zip(names, filter(None, cached.new_block_ids), strict=True):
            if name in followed:
                followed[name].chunks.append(added)
        for name in resumed_requests(cached):
            if (one := followed.get(name)) is not None:
                one.chunks = [[list(group) for group in last] for last in one.chunks[-1:]]
                one.num_seen = one.request.num_computed_tokens

    def _look(
        self, name: str, one: _Followed, num_scheduled: int, computed: list[SampledBlock]
    ) -> None:
        """Add the sampled blocks that are full after a step, and plan the next look."""
        request, size = one.request, self._hash_size
        hashes = request.block_hashes
        before = request.num_computed_tokens
        end = before + num_scheduled
        hashed = len(hashes) * size
        known = min(end, hashed)
        # Most blocks are not sampled, and need no block table.
        if any(map(self._is_sampled, hashes[one.num_seen // size : known // size])):
            computed += self._full(one, before, known)
        one.num_seen = max(one.num_seen, known)
        following = known // size + 1
        # All hashes of a prompt exist, so the look after the next sampled one is early enough.
        while following * size <= hashed and not self._is_sampled(hashes[following - 1]):
            following += 1
        # A request that has computed all its tokens continues with one and its drafts a step.
        is_decoding = end >= request.num_tokens
        num_tokens = following * size - end
        self._plan(name, max(1, num_tokens // self._most_a_step) if is_decoding else 1)

    def _plan(self, name: str, num_steps: int) -> None:
        self._followed[name].due = due = self._step + num_steps
        self._due.setdefault(due, []).append(name)

    def _full(self, one: _Followed, before: int, end: int) -> Iterator[SampledBlock]:
        hashes = one.request.block_hashes
        for (number, group), table in zip(self._groups, self._tables(one.table()), strict=False):
            size = group.block_size
            # vLLM has freed the blocks that a window left behind, without a notification.
            first = max(one.num_seen // size, group.num_skipped_tokens(before) // size)
            for index in range(first, min(end // size, len(table))):
                yield from self._place(hashes, number, size, index, table[index])

    def _filled(
        self, request: Any, tables: Sequence[Sequence[int]], start: int, end: int
    ) -> Iterator[SampledBlock]:
        hashes = request.block_hashes
        for (number, group), table in zip(self._groups, self._tables(tables), strict=False):
            size = group.block_size
            needed = group.required_blocks(end)
            last = min(end // size, len(hashes) * self._hash_size // size, len(table))
            for index in range(max(-(-start // size), needed.start), last):
                yield from self._place(hashes, number, size, index, table[index])

    def _tables(self, tables: Sequence[Sequence[int]]) -> Iterator[Sequence[int]]:
        return (tables[number] for number, _ in self._groups if number < len(tables))

    def _place(
        self, hashes: Sequence[bytes], group: int, size: int, index: int, block_id: int
    ) -> Iterator[SampledBlock]:
        block_hash = hashes[(index + 1) * size // self._hash_size - 1]
        if block_id and self._is_sampled(block_hash):
            yield SampledBlock(bytes(block_hash), group, block_id)

    def _is_sampled(self, block_hash: bytes) -> bool:
        return (block_hash[0] << 8 | block_hash[1]) % self._sample == 0
