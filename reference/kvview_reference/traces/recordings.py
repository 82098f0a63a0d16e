"""A recording of a server's KV events as a trace.

1. An event that stores blocks on the GPU stands for a request that computed these blocks. The
   prefix that the request hit is the chain of the blocks' parents. Other media, and all KV-cache
   groups except the first, are ignored.
2. Blocks that follow the last blocks of a request within ``SAME_REQUEST_S`` belong to this request,
   as its next prefill step or its generated blocks.
3. A block that is computed again after its eviction is stored again, so its request is visible. A
   request that hits all of its full blocks stores no block and is invisible.

Source: ``kvview events --record``; the fields are those of vLLM's ``BlockStored``.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from kvview.errors import ConfigError, TraceError, WireFormatError
from kvview.events import MEDIUM_GPU
from kvview.events.recording import read_recording
from kvview.events.wire import EventDecoder, Hash, StoredEvent
from kvview_reference.traces.sessions import PrefixIds
from kvview_reference.traces.trace import SkippedRows, TraceRequest

SAME_REQUEST_S = 5.0
"""Time within which a turn counts as a part of the previous turn, which the GPU still has."""


@dataclass(slots=True)
class _Request:
    start_s: float
    last_s: float
    parent: int
    blocks: array[int]  # behind the parent


class RecordedTrace:
    """The requests in a recording.

    Args:
        path: The recording.
        skipped: Receives the messages that cannot be read.

    Attributes:
        block_size: Tokens of a block.

    Raises:
        ConfigError: The file cannot be read, or stores no block on a GPU.
        TraceError: A message cannot be read.
    """

    def __init__(self, path: str, skipped: SkippedRows) -> None:
        self.path = path
        self.block_size = 0
        self._skipped = skipped
        self._numbers: dict[Hash, int] = {}
        self._parents = array("q")  # of each block; -1 for the first of a prompt
        self._open: dict[int, _Request] = {}  # by the last block
        self._requests: list[_Request] = []
        self._group: int | None = None
        for at, event in self._stored():
            self._add(at, event)
        if not self._requests:
            raise ConfigError(f"recording {path!r}: no event stores a block on a GPU")

    def __iter__(self) -> Iterator[TraceRequest]:
        first = min(request.start_s for request in self._requests)
        ids = PrefixIds()
        for number, request in enumerate(self._requests, 1):
            blocks = ids.chain(self._chain(request.parent) + request.blocks, "")
            tokens, start_s = len(blocks) * self.block_size, request.start_s - first
            yield TraceRequest(str(number), start_s, tokens, 0, blocks, number)

    def _stored(self) -> Iterator[tuple[float, StoredEvent]]:
        decoder = EventDecoder()
        expected: int | None = None
        try:
            for message in read_recording(self.path):
                if expected is not None and message.sequence > expected:
                    num_missing = message.sequence - expected
                    self._skip(f"{num_missing} messages from {expected} are missing", num_missing)
                expected = message.sequence + 1
                try:
                    batch = decoder.decode(message.payload)
                except WireFormatError as error:
                    self._skip(f"message {message.sequence}: {error}")
                    continue
                if not math.isfinite(batch.ts):
                    self._skip(f"message {message.sequence}: its time is {batch.ts}")
                    continue
                for event in batch.events:
                    if isinstance(event, StoredEvent):
                        yield batch.ts, event
        except WireFormatError as error:  # nothing can be read after it
            self._skipped.add(TraceError(str(error)), ends_file=True)

    def _skip(self, problem: str, num_requests: int = 1) -> None:
        self._skipped.add(TraceError(f"{self.path}: {problem}"), num_requests)

    def _add(self, at: float, event: StoredEvent) -> None:
        if (event.medium or MEDIUM_GPU) != MEDIUM_GPU or not event.block_hashes:
            return
        group = event.group_idx or 0
        if self._group is None:
            if not 0 < (event.block_size or 0) < 2**31:
                self._skip(f"an event stores blocks of {event.block_size} tokens")
                return
            self._group, self.block_size = group, event.block_size
        if group != self._group:
            return
        parent = -1
        if event.parent_block_hash is not None:
            parent = self._number(event.parent_block_hash, -1)
        request = self._open.pop(parent, None)
        if request is None or at - request.last_s > SAME_REQUEST_S:
            request = _Request(at, at, parent, array("q"))
            self._requests.append(request)
        request.last_s = at
        for block_hash in event.block_hashes:
            parent = self._number(block_hash, parent)
            request.blocks.append(parent)
        self._open[parent] = request

    def _number(self, block_hash: Hash, parent: int) -> int:
        number = self._numbers.setdefault(block_hash, len(self._parents))
        if number == len(self._parents):
            self._parents.append(parent)
        return number

    def _chain(self, last: int) -> array[int]:
        blocks = array("q")
        while last >= 0:
            blocks.append(last)
            last = self._parents[last]
        blocks.reverse()
        return blocks
