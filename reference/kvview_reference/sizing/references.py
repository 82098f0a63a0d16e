"""The block references of a trace, by arrival, in a compact form that can be read many times.

1. Blocks that exactly the same requests use form one *run*. So a prefix that every turn of a
   session repeats is one reference in each turn, and not thousands. No information is lost, because
   in a trace whose ids stand for prefixes, such blocks are adjacent in every request. If the blocks
   are not adjacent, each block is a run.
2. Runs are numbered by first use, and blocks are numbered without gaps: run ``r`` holds the blocks
   ``starts[r]`` to ``starts[r + 1] - 1``, in prefix order.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from random import Random

from kvview_reference.replay.trace_schemas import TraceRequest
from kvview_reference.sizing.tails import Tail, TailCount


@dataclass(frozen=True, slots=True)
class Reference:
    """One request, as a sequence of runs.

    Args:
        arrival_s: Seconds from the first request of the trace.
        runs: Runs of its full blocks, in prefix order.
        num_blocks: Number of blocks in these runs.
    """

    arrival_s: float
    runs: Sequence[int]
    num_blocks: int


@dataclass(frozen=True)
class References:
    """All requests of a trace.

    Args:
        requests: Requests by arrival.
        starts: First block of each run, and at the end the number of blocks.
        num_ids: Number of hash ids of all prompts, including dropped prompts; hit rates are shares
            of it.
        num_too_large: Requests that were skipped.
        tail_shares: Share of the distinct blocks that are in each requested tail.
    """

    requests: Sequence[Reference]
    starts: Sequence[int]
    num_ids: int
    num_too_large: int
    tail_shares: tuple[float, ...] = ()

    @property
    def num_blocks(self) -> int:
        """Different blocks."""
        return self.starts[-1]

    @property
    def seconds(self) -> float:
        """Return the time from the first request to the last request."""
        return self.requests[-1].arrival_s if self.requests else 0.0

    def weights(self) -> list[int]:
        """Count the blocks of each run."""
        return [end - start for start, end in pairwise(self.starts)]


def read_references(
    trace: Iterable[TraceRequest],
    block_size: int,
    *,
    max_request_blocks: int | None = None,
    has_partial_blocks: bool = False,
    tails: Sequence[Tail] = (),
) -> References:
    """Read a trace to its end.

    Args:
        trace: The requests, in any order.
        block_size: Tokens of one hash id.
        max_request_blocks: Number of blocks; a request whose prompt and output need more blocks is
            skipped.
        has_partial_blocks: Whether a cache may hold the partial last block of a prompt, which no
            engine's prefix cache does.
        tails: Ends of prompts whose distinct blocks are counted.
    """
    reader = _Reader(TailCount(tails, block_size))
    num_ids = num_too_large = 0
    for row in trace:
        size = row.num_prompt_tokens + row.num_output_tokens
        if max_request_blocks is not None and -(-size // block_size) > max_request_blocks:
            num_too_large += 1
            continue
        num_ids += len(row.hash_ids)
        ids = row.hash_ids
        if not has_partial_blocks:
            ids = ids[: row.num_prompt_tokens // block_size]
        reader.add(row.arrival_s, row.scope, ids)
    requests, starts = reader.finish()
    return References(requests, starts, num_ids, num_too_large, reader.tails.shares())


class _Reader:
    def __init__(self, tails: TailCount) -> None:
        self.tails = tails
        self._scopes: dict[str, dict[int, int]] = {}
        self._next_block = count()
        self._arrivals = array("d")
        self._blocks: list[array[int]] = []

    def add(self, arrival_s: float, scope: str, ids: Sequence[int]) -> None:
        names = self._scopes.setdefault(scope, defaultdict(self._next_block.__next__))
        blocks = array("I", map(names.__getitem__, ids))
        if len(set(blocks)) < len(blocks):
            blocks = array("I", dict.fromkeys(blocks))
        self.tails.add(blocks)
        self._arrivals.append(arrival_s)
        self._blocks.append(blocks)

    def finish(self) -> tuple[list[Reference], array[int]]:
        self._scopes.clear()
        num_blocks = next(self._next_block)
        order = sorted(range(len(self._blocks)), key=self._arrivals.__getitem__)
        in_order = [self._blocks[index] for index in order]
        first = self._arrivals[order[0]] if order else 0.0
        runs, starts = _runs(in_order, _signatures(in_order, num_blocks))
        if not _are_prefixes(runs):
            runs, starts = _runs(in_order, range(num_blocks))
        return [
            Reference(self._arrivals[index] - first, kept, len(blocks))
            for index, kept, blocks in zip(order, runs, in_order, strict=True)
        ], starts


def _signatures(in_order: Iterable[array[int]], num_blocks: int) -> list[int]:
    """Assign each block a number that is equal for blocks that the same requests use."""
    signatures = [0] * num_blocks
    draw = Random(12).getrandbits
    for blocks in in_order:
        ticket = draw(62)
        for block in blocks:
            signatures[block] ^= ticket
    return signatures


def _runs(
    in_order: Sequence[array[int]], signatures: Sequence[int]
) -> tuple[list[array[int]], array[int]]:
    """List the runs of each request, with -1 for a partial run, and the first block of each run."""
    numbers = [-1] * len(signatures)
    run_of = [-1] * len(signatures)  # by the number of a first block
    starts = array("I")
    num_blocks = 0
    found: list[array[int]] = []
    for blocks in in_order:
        runs = array("i")
        at, size, last = 0, len(blocks), None
        while at < size:
            first = numbers[blocks[at]]
            if first < 0:
                signature = signatures[blocks[at]]
                if signature != last:
                    run_of[num_blocks] = len(starts)
                    runs.append(len(starts))
                    starts.append(num_blocks)
                    last = signature
                numbers[blocks[at]] = num_blocks
                num_blocks += 1
                at += 1
                continue
            run, last = run_of[first], None
            end = starts[run + 1] if run + 1 < len(starts) else num_blocks
            length = end - first
            if list(map(numbers.__getitem__, blocks[at : at + length])) != list(range(first, end)):
                run = -1
            runs.append(run)
            at += max(1, length)
        found.append(runs)
    starts.append(num_blocks)
    return found, starts


def _are_prefixes(requests: Iterable[array[int]]) -> bool:
    """Whether each run always follows the same run, so that the ids stand for prefixes."""
    before: dict[int, int] = {}
    for runs in requests:
        last = -2
        for run in runs:
            if run < 0 or before.setdefault(run, last) != last:
                return False
            last = run
    return True
