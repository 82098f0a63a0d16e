"""The KV events that a simulated vLLM publishes, compared with its connectors and its GPU events.

1. vLLM publishes the events of a connector in the batch of the same step: for each medium and key,
   the same stores and removals in the same order (EVENT-1, EVENT-3).
2. An event of a store describes each block as vLLM's own event of the same GPU block does: tokens,
   parent, LoRA, extra keys, size and kind of the group. vLLM's events of windows, which name fewer
   blocks than their tokens fill, describe no block.
3. A store of a block is described at least if its request runs, or is among the last finished
   requests that have together as many hashes as the pool has blocks (EVENT-2). A connector does not
   know a waiting request yet.

Source: vllm/distributed/kv_events.py, and ``update_from_output`` of vllm/v1/core/sched/scheduler.py
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from kvview import (
    BlockHash,
    CacheGeometry,
    OffloadingEvent,
    get_offload_block_hash,
    get_offload_group_idx,
)
from kvview.events import MEDIUM_GPU
from kvview.testing.connector.judge.invariants import InvariantBroken
from kvview_vllm.releases.compat.versions import vllm

_Key = tuple[int | bytes, int]  # the hash of a block in events, and its group


class _Block(NamedTuple):
    parent: int | bytes | None
    tokens: tuple[int, ...]
    extra_keys: Any
    others: tuple[Any, ...]  # the fields that all blocks of an event share


class PublishedEvents:
    """Receives and checks the batches of one scheduler.

    Args:
        scheduler: vLLM's scheduler.
        halves: The scheduler halves of its connectors.
        geometry: Geometry of the engine.
    """

    def __init__(self, scheduler: Any, halves: Iterable[Any], geometry: CacheGeometry) -> None:
        self._scheduler = scheduler
        self._geometry = geometry
        self._num_blocks = len(scheduler.kv_cache_manager.block_pool.blocks)
        self._convert: Callable[[bytes], int | bytes] = vllm(
            "v1.core.kv_cache_utils"
        ).maybe_convert_block_hash
        self._stored = vllm("distributed.kv_events").BlockStored
        self._removed = vllm("distributed.kv_events").BlockRemoved
        self._gpu: dict[_Key, _Block] = {}
        self._finished: deque[Sequence[BlockHash]] = deque()  # of one half, the newest first
        self._reported: defaultdict[tuple[str, _Key], list[bool]] = defaultdict(list)
        self._published: defaultdict[tuple[str, _Key], list[bool]] = defaultdict(list)
        scheduler.kv_event_publisher.publish = self._publish
        for number, half in enumerate(halves):
            half.take_events = partial(self._take, half.take_events)
            if not number:  # because each half learns of each request
                half.on_request_finished = partial(self._finish, half.on_request_finished)

    def check(self) -> None:
        """Require that the events of the halves were published (1.)."""
        reported, published = dict(self._reported), dict(self._published)
        self._reported.clear()
        self._published.clear()
        for key in reported | published:
            by_half, by_vllm = reported.get(key, []), published.get(key, [])
            if by_half != by_vllm:
                raise InvariantBroken(
                    "EVENT-3",
                    f"vLLM published {_text(by_vllm)} of a block in {key[0]}, but the connector "
                    f"reported {_text(by_half)}",
                )

    def _take(self, take_events: Callable[[], Iterable[OffloadingEvent]]) -> list[OffloadingEvent]:
        events = list(take_events())
        for event in events:
            for key in event.keys:
                name = self._convert(get_offload_block_hash(key)), get_offload_group_idx(key)
                self._reported[event.medium, name].append(event.removed)
        return events

    def _finish(self, on_request_finished: Callable[..., None], request: Any, *args: Any) -> None:
        self._finished.appendleft(tuple(request.block_hashes))
        on_request_finished(request, *args)

    def _publish(self, batch: Any) -> None:
        for event in batch.events:
            if not isinstance(event, self._stored | self._removed):
                continue
            is_store = isinstance(event, self._stored)
            if event.medium in (None, MEDIUM_GPU):
                self._gpu.update(self._blocks_of(event) if is_store else ())
                continue
            for block_hash in event.block_hashes:
                self._published[event.medium, (block_hash, event.group_idx)].append(not is_store)
            if is_store:
                self._check_store(event)

    def _check_store(self, event: Any) -> None:
        names = [(block_hash, event.group_idx) for block_hash in event.block_hashes]
        size = self._geometry.groups[event.group_idx].block_size
        if event.block_size != size:
            raise InvariantBroken("EVENT-2", f"an event has blocks of {event.block_size} tokens")
        if not event.token_ids:
            if not self._remembered().isdisjoint(names):
                raise InvariantBroken(
                    "EVENT-2", f"an event of {len(names)} blocks in {event.medium} has no tokens"
                )
            return
        if len(event.token_ids) != size * len(names):
            raise InvariantBroken(
                "EVENT-2",
                f"an event of {len(names)} blocks of {size} has {len(event.token_ids)} tokens",
            )
        for name, block in self._blocks_of(event):
            known = self._gpu.get(name, block)
            if block != known:
                raise InvariantBroken(
                    "EVENT-2", f"vLLM published {block} in {event.medium}, but {known} on the GPU"
                )

    def _blocks_of(self, event: Any) -> Iterator[tuple[_Key, _Block]]:
        """Yield the description of each block of an event, unless it describes none (2.)."""
        size, parent = event.block_size, event.parent_block_hash
        if len(event.token_ids) != size * len(event.block_hashes):
            return
        fields = self._stored.__struct_fields__
        others = ("lora_id", "lora_name", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
        shared = tuple(getattr(event, name) for name in others if name in fields)
        for number, block_hash in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[number * size : (number + 1) * size])
            extra_keys = event.extra_keys[number] if event.extra_keys else None
            yield (block_hash, event.group_idx), _Block(parent, tokens, extra_keys, shared)
            parent = block_hash

    def _remembered(self) -> set[_Key]:
        """Return the blocks that must be described (3.)."""
        chains = [request.block_hashes for request in self._scheduler.running]
        num_left = self._num_blocks
        for hashes in self._finished:
            num_left -= len(hashes)
            if num_left < 0:
                break
            chains.append(hashes)
        groups = range(len(self._geometry.groups))
        return {
            (self._convert(get_offload_block_hash(key)), group)
            for hashes in chains
            for group in groups
            for number in range(len(hashes))
            if (key := self._geometry.block_key(hashes, group, number))
        }


def _text(changes: Sequence[bool]) -> str:
    return ", ".join("a removal" if removed else "a store" for removed in changes) or "nothing"
