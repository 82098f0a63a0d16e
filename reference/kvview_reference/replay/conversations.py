"""The turns of conversations; the tokens of an answer are a part of the next turn's prompt.

A trace has ids for the blocks of prompts, but not for generated blocks. If the trace names the
request that a row continues, the row's prompt uses the hashes of the blocks that this request
generated in the engine. So the next turn, and every other row with the same ids, hits the generated
blocks, as in an engine that receives real tokens.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvview import BlockHash
from kvview_reference.engine.request import Request, Status, chain_hashes
from kvview_reference.traces.trace import TraceRequest

_MAX_TURNS = 4096
"""Number of latest turns that are remembered, so that memory does not grow with the trace."""
_MAX_GENERATED = 2**20
"""Number of generated blocks whose ids are remembered, so that memory stays bounded."""


@dataclass
class _Turn:
    row: TraceRequest
    request: Request
    continued_by: tuple[int, ...] | None = None
    """Ids of the generated blocks in the first row that continues the request."""


class Conversations:
    """Makes the requests of a trace.

    1. A row is a next turn if the request that it continues has ended, if the row's prompt contains
       all tokens of that request, and if the ids of both prompts agree.
    2. If several rows continue one request with different blocks, the first row is the next turn;
       the other rows (an edited answer, for example) only share the prompt.

    Args:
        block_size: Tokens of a hash id.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._turns: OrderedDict[str, _Turn] = OrderedDict()
        self._num_requests = 0
        # Hashes of generated blocks, by the previous hash and the trace's id.
        self._generated: OrderedDict[tuple[bytes, int], BlockHash] = OrderedDict()

    def is_unfinished(self, request_id: str) -> bool:
        """Whether a request of the trace has started and has not ended."""
        turn = self._turns.get(request_id)
        return turn is not None and turn.request.status not in (Status.FINISHED, Status.ABORTED)

    def make_request(self, row: TraceRequest) -> Request:
        """Make the request of the next row."""
        # A trace may repeat request ids, but requests in flight at once need different ids.
        request_id = f"{row.request_id}#{self._num_requests}"
        self._num_requests += 1
        before = None if row.continues is None else self._turns.get(row.continues)
        request = self._continue(request_id, row, before)
        self._turns[row.request_id] = _Turn(row, request)
        self._turns.move_to_end(row.request_id)
        if len(self._turns) > _MAX_TURNS:
            self._turns.popitem(last=False)
        return request

    def _continue(self, request_id: str, row: TraceRequest, before: _Turn | None) -> Request:
        size = self._block_size
        hashes: list[BlockHash] = []
        parent = b""
        if before is not None:
            num_shared = before.row.num_prompt_tokens // size
            num_known = -(-before.request.num_tokens // size)
            if row.hash_ids[:num_shared] == before.row.hash_ids[:num_shared]:
                generated = tuple(row.hash_ids[num_shared:num_known])
                is_covered = before.request.num_tokens <= row.num_prompt_tokens
                is_first = before.continued_by in (None, generated)
                if before.request.status is Status.FINISHED and is_covered and is_first:
                    before.continued_by = generated
                    turn = before.request.next_turn(
                        request_id,
                        row.num_prompt_tokens - before.request.num_tokens,
                        row.num_output_tokens,
                        row.hash_ids[num_known:],
                    )
                    self._remember(turn.block_hashes, row, num_shared, num_known)
                    return turn
                hashes = before.request.block_hashes[:num_shared]
                parent = hashes[-1] if hashes else parent
        full = row.num_prompt_tokens // size
        hashes += self._chain(row.hash_ids[len(hashes) : full], parent)
        return Request(request_id, row.num_prompt_tokens, row.num_output_tokens, size, hashes)

    def _remember(
        self, hashes: Sequence[BlockHash], row: TraceRequest, first: int, last: int
    ) -> None:
        """Record the ids that the trace uses for the generated blocks in a prompt."""
        for block in range(first, min(last, len(hashes))):
            parent = hashes[block - 1] if block else b""
            self._generated[parent, row.hash_ids[block]] = hashes[block]
        while len(self._generated) > _MAX_GENERATED:
            self._generated.popitem(last=False)

    def _chain(self, ids: Sequence[int], parent: bytes) -> list[BlockHash]:
        if not self._generated:
            return chain_hashes(ids, parent)
        hashes: list[BlockHash] = []
        for name in ids:
            parent = self._generated.get((parent, name)) or chain_hashes([name], parent)[0]
            hashes.append(parent)
        return hashes


class TurnQueue:
    """A queue of the requests of a trace that may start, in the order of the trace.

    A turn does not start before the previous turn has ended. A turn that had to wait starts after
    the requests that were read in the meantime.

    Args:
        rows: Rows of the trace.
        block_size: Number of tokens of a hash id.
    """

    def __init__(self, rows: Iterable[TraceRequest], block_size: int) -> None:
        self._rows = iter(rows)
        self._conversations = Conversations(block_size)
        # For each request that rows continue: the order in which rows first waited for it, and the
        # rows.
        self._held: dict[str, tuple[int, list[TraceRequest]]] = {}
        self._num_held = 0
        self._taken: set[str] = set()  # requests that other rows continue
        self._waiting_ids: set[str] = set()  # of rows that have not started
        self._ready: deque[TraceRequest] = deque()

    def take(self) -> tuple[Request, TraceRequest] | None:
        """Take the next request that may start, with its row; None if no request can start."""
        self._release()
        while not self._ready and (row := next(self._rows, None)) is not None:
            self._read(row)
        if not self._ready:
            return None
        row = self._ready.popleft()
        self._waiting_ids.discard(row.request_id)
        if row.request_id in self._held:
            self._taken.add(row.request_id)
        return self._conversations.make_request(row), row

    def _read(self, row: TraceRequest) -> None:
        if row.continues is not None and self._is_unfinished(row.continues):
            self._num_held += 1
            self._held.setdefault(row.continues, (self._num_held, []))[1].append(row)
            if row.continues not in self._waiting_ids:
                self._taken.add(row.continues)
        else:
            self._ready.append(row)
        self._waiting_ids.add(row.request_id)

    def _release(self) -> None:
        ended = {name for name in self._taken if not self._is_unfinished(name)}
        self._taken -= ended
        for _, rows in sorted(self._held.pop(name) for name in ended):
            self._ready += rows

    def _is_unfinished(self, request_id: str) -> bool:
        return request_id in self._waiting_ids or self._conversations.is_unfinished(request_id)
