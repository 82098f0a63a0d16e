"""The block references of a trace, by arrival, small enough to be read many times.

1. Blocks that the same requests use make one *run*: a prefix that every turn of a session
   repeats is one reference per turn, not thousands. This is exact, because in a trace whose
   ids name prefixes such blocks are adjacent in every request. If they are not, each block is
   a run.
2. Runs are numbered by first use, and their blocks without gaps: run ``r`` holds the
   blocks ``starts[r]`` to ``starts[r + 1] - 1``, in prefix order.
3. A trace of more than ``max_references`` is sampled by block: half of the blocks are
   dropped, with all their references, until the rest fits. A cache of ``n`` blocks then
   corresponds to one of ``n * rate`` for the sample. A few blocks that every request uses may be
   in the sample or not; their surplus of uses is subtracted from the hits (:attr:`excess`).

Source: C. Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST '15 (sampling by
block, fixed size); "Cache Modeling and Optimization using Miniature Simulations", ATC '17.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from kvview_reference.replay.trace_schemas import TraceRequest
from kvview_reference.sizing.tails import Tail, TailCount

MAX_REFERENCES = 2**26
"""References that are kept, 4 bytes each."""


@dataclass(frozen=True, slots=True)
class Reference:
    """One request, as its runs.

    Args:
        arrival_s: Seconds from the first request of the trace.
        runs: Runs of its full blocks, in prefix order.
        num_blocks: Blocks in these runs.
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
        num_ids: Hash ids of all prompts, dropped ones included; hit rates are shares of them.
        num_full_blocks: Ids among them that a cache may hold.
        rate: Share of the blocks in the sample; 1.0 unless sampled.
        num_too_large: Requests that were skipped.
        tail_shares: Share of the different blocks in each requested tail, of all blocks, not of
            the sample.
    """

    requests: Sequence[Reference]
    starts: Sequence[int]
    num_ids: int
    num_full_blocks: int
    rate: float
    num_too_large: int
    tail_shares: tuple[float, ...] = ()

    @property
    def num_blocks(self) -> int:
        """Different blocks."""
        return self.starts[-1]

    @property
    def num_references(self) -> int:
        """Uses of blocks."""
        return sum(request.num_blocks for request in self.requests)

    @property
    def excess(self) -> float:
        """Surplus uses in the sample, in blocks of the trace; 0.0 unless sampled."""
        return self.num_references / self.rate - self.num_full_blocks if self.rate < 1.0 else 0.0

    @property
    def seconds(self) -> float:
        """Time from the first request to the last."""
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
    max_references: int = MAX_REFERENCES,
    tails: Sequence[Tail] = (),
) -> References:
    """Read a trace to its end.

    Args:
        trace: Requests in any order.
        block_size: Tokens of one hash id.
        max_request_blocks: Requests whose prompt and output need more are skipped.
        has_partial_blocks: Whether a cache holds the partial last block of a prompt; no engine's
            prefix cache does.
        max_references: References that are kept in memory.
        tails: Ends of prompts whose different blocks are counted.
    """
    reader = _Reader(max_references, TailCount(tails, block_size))
    num_ids = num_full = num_too_large = 0
    for row in trace:
        size = row.num_prompt_tokens + row.num_output_tokens
        if max_request_blocks is not None and -(-size // block_size) > max_request_blocks:
            num_too_large += 1
            continue
        num_ids += len(row.hash_ids)
        ids = row.hash_ids
        if not has_partial_blocks:
            ids = ids[: row.num_prompt_tokens // block_size]
        num_full += len(ids)
        reader.add(row.arrival_s, row.scope, ids)
    requests, starts = reader.finish()
    return References(
        requests, starts, num_ids, num_full, reader.rate, num_too_large, reader.tails.shares()
    )


class _Names(dict[int, int]):
    """Numbers of the ids of one scope, unique among all scopes."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader

    def __missing__(self, name: int) -> int:
        self[name] = number = self._reader.new_block()
        return number


class _Reader:
    def __init__(self, max_references: int, tails: TailCount) -> None:
        self._max_references = max_references
        self.tails = tails
        self._scopes: dict[str, _Names] = {}
        self._random = Random(12)
        self._tickets: list[int] = []  # by block; the highest stay in the sample longest
        self._level = 0
        self._arrivals = array("d")
        self._blocks: list[array[int]] = []
        self._num_references = 0

    @property
    def rate(self) -> float:
        return 0.5**self._level

    def new_block(self) -> int:
        # The number of trailing zeros of random bits is the level up to which a block stays.
        bits = self._random.getrandbits(62) | 1 << 62
        self._tickets.append((bits & -bits).bit_length() - 1)
        return len(self._tickets) - 1

    def add(self, arrival_s: float, scope: str, ids: Sequence[int]) -> None:
        names = self._scopes.get(scope)
        if names is None:
            names = self._scopes[scope] = _Names(self)
        blocks = array("I", map(names.__getitem__, ids))
        if len(set(blocks)) < len(blocks):
            blocks = array("I", dict.fromkeys(blocks))
        self.tails.add(blocks)
        if self._level:
            blocks = self._sampled(blocks)
        self._arrivals.append(arrival_s)
        self._blocks.append(blocks)
        self._num_references += len(blocks)
        while self._num_references > self._max_references:
            self._level += 1
            self._blocks = [self._sampled(kept) for kept in self._blocks]
            self._num_references = sum(map(len, self._blocks))

    def _sampled(self, blocks: array[int]) -> array[int]:
        tickets, level = self._tickets, self._level
        return array("I", [block for block in blocks if tickets[block] >= level])

    def finish(self) -> tuple[list[Reference], array[int]]:
        self._scopes.clear()
        order = sorted(range(len(self._blocks)), key=self._arrivals.__getitem__)
        in_order = [self._blocks[index] for index in order]
        first = self._arrivals[order[0]] if order else 0.0
        runs, starts = _runs(in_order, self._signatures(in_order))
        if not _are_prefixes(runs):
            runs, starts = _runs(in_order, range(len(self._tickets)))
        return [
            Reference(self._arrivals[index] - first, kept, len(blocks))
            for index, kept, blocks in zip(order, runs, in_order, strict=True)
        ], starts

    def _signatures(self, in_order: Iterable[array[int]]) -> list[int]:
        """Give the same number to blocks that the same requests use."""
        signatures = [0] * len(self._tickets)
        draw = self._random.getrandbits
        for blocks in in_order:
            ticket = draw(62)
            for block in blocks:
                signatures[block] ^= ticket
        return signatures


def _runs(
    in_order: Sequence[array[int]], signatures: Sequence[int]
) -> tuple[list[array[int]], array[int]]:
    """List the runs of each request, -1 for a partial run, and the first block of each run."""
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
    """Whether each run always follows the same run, so that the ids name prefixes."""
    before: dict[int, int] = {}
    for runs in requests:
        last = -2
        for run in runs:
            if run < 0 or before.setdefault(run, last) != last:
                return False
            last = run
    return True
