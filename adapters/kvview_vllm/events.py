"""The conversion of a connector's offloading events into KV-cache events of the installed vLLM.

1. An event has the same fields as an event of a GPU block: tokens, parent, LoRA, extra keys, hash,
   size, group and medium. Routers drop an event of a store without these fields (EVENT-2).
2. The content of a block is taken from its request, and is remembered for as many blocks as the
   pool has. For an older block, or with ``location_only``, an event contains only the location,
   because the content is never guessed.
3. The block size is the block size of the key's group, never 0, and hashes have the same form as in
   events of GPU blocks. The medium has the name that the connector uses.

Source: vllm/distributed/kv_events.py, vllm/v1/core/block_pool.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvview import (
    BlockHash,
    CacheGeometry,
    OffloadingEvent,
    OffloadKey,
    RequestContent,
    get_offload_block_hash,
    get_offload_group_idx,
)
from kvview_vllm.releases.compat.calls import event_extra_keys, extra_keys_of, make_event


@dataclass(eq=False, slots=True)
class _Chain:
    """The content of the blocks of one request.

    Args:
        hashes: Block hashes of the request; vLLM's live list until the request has finished.
        content: Content of the request.
        extra_keys: For each group, the extra keys of each of its blocks; None if none has any.
        num_known: Number of blocks of each group whose keys are in the index.
    """

    hashes: Sequence[BlockHash]
    content: RequestContent
    extra_keys: Sequence[Sequence[Any] | None]
    num_known: list[int] = field(default_factory=list)


class _Place(NamedTuple):
    chain: _Chain
    number: int  # number of the block, in blocks of its group


class BlockDescriptions:
    """Remembers the content of blocks (rule 2).

    A request takes only one entry until the next events are converted, because its keys are not
    indexed before that.

    Args:
        geometry: Geometry of the engine.
        num_blocks: Number of blocks of finished requests that are remembered.
    """

    def __init__(self, geometry: CacheGeometry, num_blocks: int) -> None:
        self.geometry = geometry
        self.num_blocks = num_blocks
        self._living: dict[str, _Chain] = {}
        self._finished: OrderedDict[int, _Chain] = OrderedDict()  # by identity, oldest first
        self._num_finished = 0  # number of hashes of these
        self._unwritten: dict[int, _Chain] = {}  # finished requests that are not indexed yet
        self._places: dict[OffloadKey, _Place] = {}

    def follow(self, request: Any, content: RequestContent) -> None:
        """Start to track a request."""
        self._living[request.request_id] = self._chain(request, content)

    def finish(self, request: Any, content: RequestContent) -> None:
        """Finish a request, without keeping the request object."""
        chain = self._living.pop(request.request_id, None) or self._chain(request, content)
        sizes = (group.block_size for group in self.geometry.groups)
        counts = [len(chain.hashes) * self.geometry.hash_block_size // size for size in sizes]
        computed = [
            [keys[number] for number in range(count)]
            for keys, count in zip(self._extra_keys(request), counts, strict=True)
        ]
        chain.extra_keys = [keys if any(keys) else None for keys in computed]
        chain.hashes = tuple(chain.hashes)
        chain.content = RequestContent(
            content.token_ids, content.lora_name, content.lora_id, content.cache_salt
        )
        self._finished[id(chain)] = self._unwritten[id(chain)] = chain
        self._num_finished += len(chain.hashes)
        while self._num_finished > self.num_blocks and len(self._finished) > 1:
            identity, oldest = self._finished.popitem(last=False)
            self._unwritten.pop(identity, None)
            self._num_finished -= len(oldest.hashes)
            self._forget(oldest)

    def places(self) -> Mapping[OffloadKey, _Place]:
        """Return the position of each remembered key in its request."""
        for chain in self._unwritten.values():
            # From its first block, because requests that finish earlier are forgotten earlier.
            self._learn(chain, [0] * len(chain.num_known))
        for chain in self._living.values():
            self._learn(chain, chain.num_known)
        self._unwritten.clear()
        return self._places

    def _chain(self, request: Any, content: RequestContent) -> _Chain:
        extra_keys = self._extra_keys(request)
        return _Chain(request.block_hashes, content, extra_keys, [0] * len(extra_keys))

    def _extra_keys(self, request: Any) -> Sequence[Sequence[Any]]:
        return [extra_keys_of(request, group.block_size) for group in self.geometry.groups]

    def _learn(self, chain: _Chain, num_known: Sequence[int]) -> None:
        for group_idx, number in enumerate(num_known):
            while key := self.geometry.block_key(chain.hashes, group_idx, number):
                self._places[key] = _Place(chain, number)
                number += 1
            chain.num_known[group_idx] = number

    def _forget(self, chain: _Chain) -> None:
        """Forget the keys of a finished request, except those that an unfinished request has."""
        for group_idx, known in enumerate(chain.num_known):
            heirs = [*self._living.values()]  # with the same blocks so far
            for number in range(known):
                key = self.geometry.block_key(chain.hashes, group_idx, number)
                if key is None or key not in self._places or self._places[key].chain is not chain:
                    continue
                del self._places[key]
                heirs = [
                    one
                    for one in heirs
                    if number < one.num_known[group_idx]
                    and self.geometry.block_key(one.hashes, group_idx, number) == key
                ]
                if heirs:
                    self._places[key] = _Place(heirs[-1], number)


def to_vllm_events(
    events: Iterable[OffloadingEvent],
    geometry: CacheGeometry,
    *,
    descriptions: BlockDescriptions | None = None,
    group_kinds: Sequence[Mapping[str, Any]] = (),
) -> Iterator[Any]:
    """Convert events: one event per KV-cache group, and for stores one event per run of blocks.

    Args:
        events: The events, in order.
        geometry: Geometry of the engine, for the block size of each group.
        descriptions: The content of blocks; with None, events contain only locations.
        group_kinds: The release's event fields for each group, in addition to the number of the
            group.

    Yields:
        ``BlockStored`` and ``BlockRemoved`` of the installed vLLM.
    """
    places: Mapping[OffloadKey, _Place] | None = None
    for event in events:
        if descriptions is not None and not event.removed and places is None:
            places = descriptions.places()
        for keys in _runs(event, {} if event.removed else places or {}):
            group_idx = get_offload_group_idx(keys[0])
            fields: dict[str, Any] = {
                "block_size": geometry.groups[group_idx].block_size,
                "medium": event.medium,
                "group_idx": group_idx,
            }
            if group_kinds and not event.removed:
                fields |= group_kinds[group_idx]
            if not event.removed and places and keys[0] in places:
                fields |= _described(places[keys[0]], group_idx, len(keys), geometry)
            yield make_event(event.removed, [get_offload_block_hash(key) for key in keys], fields)


def _runs(
    event: OffloadingEvent, places: Mapping[OffloadKey, _Place]
) -> Iterator[list[OffloadKey]]:
    """Yield the keys of one event, in runs of consecutive blocks of one request and one group."""
    runs: dict[int, list[OffloadKey]] = {}  # keys without a known place, by group
    run: list[OffloadKey] = []
    for key in event.keys:
        if key not in places:
            runs.setdefault(get_offload_group_idx(key), []).append(key)
            continue
        last = places[run[-1]] if run else None
        group_idx, place = get_offload_group_idx(key), places[key]
        if last != (place.chain, place.number - 1) or group_idx != get_offload_group_idx(run[-1]):
            if run:
                yield run
            run = []
        run.append(key)
    if run:
        yield run
    yield from runs.values()


def _described(
    first: _Place, group_idx: int, num_blocks: int, geometry: CacheGeometry
) -> dict[str, Any]:
    chain, number = first
    size = geometry.groups[group_idx].block_size
    parent = geometry.block_key(chain.hashes, group_idx, number - 1) if number else None
    extra_keys = chain.extra_keys[group_idx]
    of_blocks = extra_keys[number : number + num_blocks] if extra_keys else [None] * num_blocks
    return {
        "parent_block_hash": None if parent is None else get_offload_block_hash(parent),
        "token_ids": list(chain.content.token_ids[number * size : (number + num_blocks) * size]),
        "lora_id": chain.content.lora_id,
        "lora_name": chain.content.lora_name,
        "extra_keys": event_extra_keys([*of_blocks]),
    }
