"""The scheduler half of the canary: finds the sampled blocks that a step computes or a load fills.

- CANARY-1 A block is sampled by its hash, so that all ranks, and all lives of a server, digest the
  same blocks.
- CANARY-2 A block **must** only be digested as computed if its hash exists, because a rejected
  draft may still be in a block without a hash, and if the request still has the block.
- CANARY-3 The blocks of a handoff (``kv_transfer_params``) **must not** be compared, because
  another engine computed them, with other rounding errors.

A request is read in the steps in which it gets blocks, and while a sampled block of its prompt is
not full. Each hash is tested once, before anything else is read, because most blocks are not
sampled.

Source: ``Scheduler.schedule``, vllm/v1/core/sched/scheduler.py, 0.11.0 to 0.33.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, compress
from typing import Any

from kvview import CacheGeometry, CacheGroup, Mamba
from kvview_vllm.canary.wrapper.canary_messages import SampledBlock, Work

Tables = Sequence[Sequence[int]]  # block ids, by group


class _Followed:
    """A request that has blocks.

    Args:
        request: vLLM's ``Request``.
    """

    __slots__ = ("chunks", "num_tested", "request", "sampled")

    def __init__(self, request: Any) -> None:
        self.request = request
        self.chunks: list[Tables] = []  # of its block tables
        self.num_tested = 0  # hashes
        self.sampled: list[int] = []  # numbers of sampled hashes whose blocks are not full

    def tables(self) -> Tables:
        if len(self.chunks) > 1:
            groups = zip(*self.chunks, strict=True)
            self.chunks = [[list(chain.from_iterable(parts)) for parts in groups]]
        return self.chunks[0]


class Sampler:
    """Follows the block tables of all requests.

    Args:
        geometry: Geometry of the engine.
        sample: One block in this many is sampled.
    """

    def __init__(self, geometry: CacheGeometry, sample: int) -> None:
        self._sample = sample
        self._hash_size = geometry.hash_block_size
        # States are only complete where a step ended, so they have no digest.
        self._groups: list[tuple[int, CacheGroup]] = [
            (number, group)
            for number, group in enumerate(geometry.groups)
            if not isinstance(group, Mamba)
        ]
        self._followed: dict[str, _Followed] = {}
        self._unfilled: dict[str, _Followed] = {}  # those with a sampled block that is not full
        self._promised: dict[str, tuple[int, bool]] = {}  # first token, whether between steps
        self._loading: set[str] = set()
        self._work = Work()

    def take_work(self) -> Work | None:
        """Return the work since the last call; None without any."""
        if self._work.is_empty():
            return None
        work, self._work = self._work, Work()
        return work

    # --- calls of the scheduler ---

    def on_promise(self, request: Any, num_computed: int, answer: Any) -> None:
        """Note a promise of the connector."""
        num_tokens, is_async = answer
        if num_tokens:
            self._promised[request.request_id] = num_computed, is_async

    def on_allocated(self, request: Any, blocks: Any, num_tokens: int) -> None:
        """Note allocated blocks, and the blocks that a load fills."""
        name = request.request_id
        self._followed[name] = _Followed(request)
        self._unfilled.pop(name, None)
        start, is_async = self._promised.pop(name, (0, False))
        if not num_tokens or request.kv_transfer_params:
            return
        size, end = self._hash_size, start + num_tokens
        needed = [group.required_blocks(end).start for _, group in self._groups]
        numbers = range(-(-start // size), min(end // size, len(request.block_hashes)))
        hashes, sample = request.block_hashes, self._sample
        if sampled := [n for n in numbers if not hashes[n][0] % sample]:
            places = [*self._places(hashes, sampled, blocks.get_block_ids(), needed)]
            self._work.loads[name] = places
            (self._loading if is_async else self._work.within_step).add(name)

    def on_step(self, output: Any) -> None:
        """Find the sampled blocks that are full after a step."""
        lengths, followed, sample = output.num_scheduled_tokens, self._followed, self._sample
        cached = output.scheduled_cached_reqs
        grown = zip(
            compress(cached.req_ids, cached.new_block_ids),
            filter(None, cached.new_block_ids),
            strict=True,
        )
        started = [(new.req_id, new.block_ids) for new in output.scheduled_new_reqs]
        for name, added in chain(started, grown):
            if (one := followed.get(name)) is None:
                continue
            request, chunks = one.request, one.chunks
            hashes, first = request.block_hashes, one.num_tested
            if not chunks:  # it starts, or resumes after a preemption
                first = request.num_computed_tokens // self._hash_size
            chunks.append(added)
            one.num_tested = len(hashes)
            one.sampled += [n for n in range(first, len(hashes)) if not hashes[n][0] % sample]
            if one.sampled:
                self._unfilled[name] = one
        for name in [name for name in self._unfilled if name in lengths]:
            self._find_full(name, lengths[name])

    def _find_full(self, name: str, length: int) -> None:
        """Find the sampled blocks of a request that are full after a step."""
        one = self._unfilled[name]
        hashes, before = one.request.block_hashes, one.request.num_computed_tokens
        last = min((before + length) // self._hash_size, len(hashes))
        full = [number for number in one.sampled if number < last]
        if full:
            one.sampled = [number for number in one.sampled if number >= last]
            if not one.sampled:
                del self._unfilled[name]
            # vLLM has freed the blocks that a window left behind, without a notification.
            kept = [g.num_skipped_tokens(before) // g.block_size for _, g in self._groups]
            self._work.computed += self._places(hashes, full, one.tables(), kept)

    def on_output(self, output: Any) -> None:
        """Note the ends of loads."""
        self._loading.difference_update(output.finished_recving or ())

    def on_finished(self, request: Any, answer: Any) -> None:
        """Forget a request; its blocks may be allocated again."""
        name = request.request_id
        self._followed.pop(name, None)
        self._unfilled.pop(name, None)
        self._promised.pop(name, None)
        if name in self._loading:
            self._loading.discard(name)
            self._work.loads.pop(name, None)
            self._work.ended.append(name)

    def on_empty_reset(self) -> None:
        """Note a reset of all caches, after which no older KV may be loaded."""
        self._work.reset = True

    # --- blocks ---

    def _places(
        self, hashes: Sequence[bytes], sampled: Sequence[int], tables: Tables, firsts: Sequence[int]
    ) -> Iterator[SampledBlock]:
        """Yield the blocks of the groups that end with the sampled hashes."""
        for (number, group), first in zip(self._groups, firsts, strict=True):
            if number >= len(tables):
                continue
            table = tables[number]
            for place in sampled:
                index, rest = divmod((place + 1) * self._hash_size, group.block_size)
                if not rest and first < index <= len(table) and (block_id := table[index - 1]):
                    yield SampledBlock(bytes(hashes[place]), number, block_id)
