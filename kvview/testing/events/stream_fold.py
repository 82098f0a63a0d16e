"""Validation of a stream of KV events, which must have no gaps, and alternate stores and removals.

1. Each sequence number is one higher than the number of the message before. Gaps, repeated numbers
   and restarted publishers are reported. After a gap, or if the start of the stream is missing, a
   removal of an unknown key is not a fault (EVENT-1, EVENT-3). A lower number with a later time
   means that the publisher has restarted, so the keys of the old publisher are gone. A repeated
   or late message is not applied.
2. In a tier a key is stored once and then removed; on the GPU several blocks may have one key.
3. ``AllBlocksCleared`` empties only the GPU (EVENT-5), because it names no medium and the keys of a
   tier stay loadable.
4. A store event of a sliding window may name fewer blocks than its tokens fill, because vLLM omits
   the blocks that the window never reads (``BlockPool.cache_full_blocks``).
5. If the start of the stream is known, the parent of a stored block was published before, and one
   block always has the same parent and the same tokens (EVENT-2). Readers drop other blocks. Blocks
   of windows are not compared, because vLLM omits some of their parents.
6. A stream does not show whether an advertised key is loadable, and whether failed stores
   emit no event (EVENT-4), so these laws are not checked. Compare :attr:`StreamFold.held` with the
   tier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvview.errors import WireFormatError
from kvview.events import MEDIUM_GPU
from kvview.events.fold import FoldedEvents
from kvview.events.wire import (
    ClearedEvent,
    EventDecoder,
    Hash,
    RemovedEvent,
    StoredEvent,
    WireEvent,
)

FULL_KINDS = ("full_attention", "mla_attention", "sink_full_attention")
"""Values of ``kv_cache_spec_kind`` of groups that read every block of a prefix."""

_Key = tuple[Hash, int | None]  # the hash and the group of a block


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault of a stream.

    Args:
        sequence: Number of the message.
        law: ``"EVENT-1"`` for example, or ``"FORMAT"``.
        what: The fault, in a sentence.
    """

    sequence: int
    law: str
    what: str


@dataclass
class StreamFold:
    """The fold of messages into the blocks of each medium, with the faults found."""

    _decoder: EventDecoder = field(default_factory=EventDecoder)
    _held: FoldedEvents[_Key] = field(default_factory=FoldedEvents)
    num_messages: int = 0
    num_events: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    knows_all: bool = False
    _next: int | None = None
    _time: float = 0.0  # time of the last batch
    # The parent, and the hash of the tokens, of each block of each size that was described. Events
    # of tiers may lack the group.
    _described: dict[tuple[Hash, int], tuple[Hash | None, int]] = field(default_factory=dict)
    _published: set[Hash] = field(default_factory=set)

    def apply(self, sequence: int, payload: bytes) -> list[Finding]:
        """Apply one message, and return its faults.

        Args:
            sequence: Sequence number of the message.
            payload: The batch.
        """
        self.num_messages += 1
        batch = None
        try:
            batch = self._decoder.decode(payload)
        except WireFormatError as error:
            unreadable = str(error)
        is_new, found = self._number(sequence, None if batch is None else batch.ts)
        if batch is None:
            self.knows_all = False
            return [*found, Finding(sequence, "FORMAT", unreadable)]
        self.formats[batch.wire_format.name] += 1
        for number, event in enumerate(batch.events if is_new else ()):
            self.num_events += 1
            for law, fault in self._fold(event):
                found.append(Finding(sequence, law, f"event {number} {fault}"))
        return found

    def _number(self, sequence: int, time: float | None) -> tuple[bool, list[Finding]]:
        """Return whether a message is new, and the faults of its sequence number."""
        expected, is_later = self._next, time is not None and time > self._time
        if is_later:
            self._time = time or 0.0
        fault = ""
        if expected is None:
            self.knows_all = sequence == 0
        elif sequence > expected:
            self.knows_all = False
            fault = f"{sequence - expected} messages from {expected} are missing"
        elif sequence == 0 or (sequence < expected and is_later):
            fault = f"the publisher restarted after {expected - 1}"
            if sequence:
                fault += f", and its first {sequence} messages are missing"
            self._held = FoldedEvents()
            self._described.clear()
            self._published.clear()
            self.knows_all = sequence == 0
        elif sequence < expected:
            fault = f"the message comes again, or late, after {expected - 1}"
            self.knows_all = False
            return False, [Finding(sequence, "EVENT-3", fault)]
        self._next = sequence + 1
        return True, [Finding(sequence, "EVENT-3", fault)] if fault else []

    @property
    def held(self) -> dict[str, Counter[_Key]]:
        """Number of blocks by medium, hash and group."""
        return self._held.held

    def _fold(self, event: WireEvent) -> Iterator[tuple[str, str]]:
        if isinstance(event, ClearedEvent):
            self._held.clear_gpu()
        else:
            medium, is_removal = event.medium or MEDIUM_GPU, isinstance(event, RemovedEvent)
            for block_hash in event.block_hashes:
                key = block_hash, event.group_idx
                is_allowed = self._held.change(medium, key, removed=is_removal)
                if is_allowed:
                    continue
                if not is_removal:
                    yield "EVENT-1", f"stores {_named(block_hash)} in {medium} a second time"
                elif self.knows_all:
                    name = _named(block_hash)
                    yield "EVENT-1", f"removes {name} from {medium}, which does not hold it"
            self._held.held.setdefault(medium, Counter())
            if isinstance(event, StoredEvent):
                yield from _shape(event)
                if self.knows_all:
                    yield from self._content(event)
                self._published.update(event.block_hashes)

    def _content(self, event: StoredEvent) -> Iterator[tuple[str, str]]:
        """Compare the parents and tokens of stored blocks with the events before (5.)."""
        size, hashes, parent = event.block_size, event.block_hashes, event.parent_block_hash
        if not event.token_ids or len(event.token_ids) != size * len(hashes):
            return
        if event.kv_cache_spec_kind not in (None, *FULL_KINDS):
            return
        if parent is not None and parent not in self._published:
            yield "EVENT-2", f"names the parent {_named(parent)}, which was never published"
        for number, block_hash in enumerate(hashes):
            tokens = event.token_ids[number * size : (number + 1) * size]
            hash_of_tokens = hash(tuple(tokens))
            known = self._described.setdefault((block_hash, size), (parent, hash_of_tokens))
            known_parent, known_tokens = known
            if known_tokens != hash_of_tokens:
                yield "EVENT-2", f"stores {_named(block_hash)} with other tokens than before"
            elif known_parent != parent:
                yield "EVENT-2", f"stores {_named(block_hash)} with another parent than before"
            parent = block_hash


def _shape(event: StoredEvent) -> Iterator[tuple[str, str]]:
    tokens, blocks, size = len(event.token_ids), len(event.block_hashes), event.block_size
    if not tokens or tokens == blocks * size:
        return
    is_whole = size > 0 and tokens % size == 0 and tokens > blocks * size
    is_sparse = event.group_idx is not None and event.kv_cache_spec_kind not in FULL_KINDS  # 4.
    if not (is_whole and is_sparse):
        yield "FORMAT", f"has {tokens} tokens for {blocks} blocks of {size}"


def _named(block_hash: Hash) -> str:
    return f"block {block_hash.hex() if isinstance(block_hash, bytes) else block_hash}"
