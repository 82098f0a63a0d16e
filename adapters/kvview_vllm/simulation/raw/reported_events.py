"""The KV events that a raw connector reports, compared with the requests of the simulation.

1. For each block in each medium, stores and removals alternate, starting with a store (EVENT-1).
   The children of a ``MultiConnector`` may store a block once each. After a reset, a connector may
   remove its blocks or leave the removal to vLLM's ``AllBlocksCleared``.
2. A store that names tokens describes blocks of a request: the tokens follow those of the parent,
   and end at the named block (EVENT-2). A connector may have block hashes of its own, which may
   only be named with tokens, because no reader knows them otherwise.

Source: vllm/distributed/kv_events.py
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from typing import Any

from kvview.testing.connector.judge.invariants import InvariantBroken
from kvview_vllm.releases.compat.versions import vllm

_Hash = int | bytes | None  # of a block in events; None before the first block


class ReportedEvents:
    """Compares the events of one connector.

    Args:
        scheduler: vLLM's scheduler.
        hash_block_size: Tokens of a block hash.
    """

    def __init__(self, scheduler: Any, hash_block_size: int) -> None:
        events = vllm("distributed.kv_events")
        self._stored, self._removed = events.BlockStored, events.BlockRemoved
        self._convert = vllm("v1.core.kv_cache_utils").maybe_convert_block_hash
        self._scheduler = scheduler
        self._hash_size = hash_block_size
        self._requests: dict[str, Any] = {}  # that ran when events were last taken, or later
        self._next: defaultdict[tuple[_Hash, tuple[int, ...]], set[_Hash]] = defaultdict(set)
        self._hashes: set[_Hash] = {None}
        self._ends: dict[_Hash, set[_Hash]] = {}  # the last block of each hash of the connector
        self._advertised: Counter[tuple[Any, ...]] = Counter()
        self._may_be_cleared: set[tuple[Any, ...]] = set()
        self._has_children = "Multi" in type(scheduler.connector).__name__

    def note_reset(self) -> None:
        """Note a reset, after which readers may have forgotten all blocks."""
        self._may_be_cleared |= self._advertised.keys()

    def note_requests(self) -> None:
        """Note the running requests, because a request may end before its events are taken."""
        self._requests |= self._scheduler.requests

    def check(self, events: Iterable[Any]) -> None:
        """Compare the events that the connector has reported since the last call."""
        self.note_requests()
        for event in events:
            for request in self._requests.values():
                self._learn(request)
            self._requests.clear()
            if isinstance(event, self._stored):
                self._check_store(event)
                self._count(event, 1)
            elif isinstance(event, self._removed):
                self._count(event, -1)

    def _learn(self, request: Any) -> None:
        parent: _Hash = None
        size = self._hash_size
        for number, block_hash in enumerate(map(self._convert, request.block_hashes)):
            tokens = request.all_token_ids[number * size : (number + 1) * size]
            self._next[parent, tuple(tokens)].add(block_hash)
            self._hashes.add(block_hash)
            parent = block_hash

    def _count(self, event: Any, change: int) -> None:
        for block_hash in event.block_hashes:
            name = event.medium, event.group_idx, block_hash
            if name in self._may_be_cleared:
                self._may_be_cleared.discard(name)
                self._advertised[name] = change < 0
            self._advertised[name] += change
            most = 2 if self._has_children else 1
            if not 0 <= self._advertised[name] <= most:
                does = "stores a block again"
                if change < 0:
                    does = "removes a block that is not stored"
                raise InvariantBroken(
                    "EVENT-1", f"take_events {does}: {_text(block_hash)} in {event.medium}"
                )

    def _check_store(self, event: Any) -> None:
        hashes, size, tokens = event.block_hashes, event.block_size, tuple(event.token_ids)
        names = f"take_events stores {len(hashes)} blocks, {_text(hashes[0])} first,"
        if not tokens:
            if not self._hashes.issuperset(hashes):
                raise InvariantBroken(
                    "EVENT-2", f"{names} which belong to no request, and names no tokens"
                )
            return
        if len(tokens) != size * len(hashes):
            raise InvariantBroken(
                "EVENT-2",
                f"{names} of {size} tokens with {len(tokens)} tokens; expected "
                f"{size * len(hashes)}",
            )
        parent = event.parent_block_hash
        if parent not in self._hashes and parent not in self._ends:
            raise InvariantBroken(
                "EVENT-2", f"{names} whose parent {_text(parent)} belongs to no request"
            )
        places: Collection[_Hash] = self._ends.get(parent, {parent})
        for number, block_hash in enumerate(hashes):
            places = self._after(places, tokens[number * size : (number + 1) * size])
            if not places or (block_hash in self._hashes and block_hash not in places):
                raise InvariantBroken(
                    "EVENT-2",
                    f"{names} but block {number} does not follow the parent "
                    f"{'None' if parent is None else _text(parent)} with these tokens in any "
                    f"request",
                )
            self._ends[block_hash] = {*places}

    def _after(self, places: Collection[_Hash], tokens: tuple[int, ...]) -> set[_Hash]:
        """Return the blocks that these tokens can end at, after one of some blocks."""
        for start in range(0, len(tokens), self._hash_size):
            block = tokens[start : start + self._hash_size]
            places = {end for one in places for end in self._next.get((one, block), ())}
        return {*places}


def _text(block_hash: object) -> str:
    text = block_hash.hex() if isinstance(block_hash, bytes) else str(block_hash)
    return text if len(text) <= 12 else f"{text[:12]}..."
