"""The block references of a trace, in a compact form that can be read many times.

1. Blocks that exactly the same requests use form one *run*. So a prefix that every turn of a
   session repeats is one reference in each turn, and not thousands. No information is lost, because
   ids stand for prefixes, so such blocks are adjacent in every request.
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

from kvview_reference.traces.trace import TraceRequest


@dataclass(frozen=True)
class References:
    """All requests of a trace.

    Args:
        requests: Runs of the full blocks of each request, in prefix order.
        starts: First block of each run, and at the end the number of blocks.
    """

    requests: Sequence[Sequence[int]]
    starts: Sequence[int]

    @property
    def num_blocks(self) -> int:
        """Different blocks."""
        return self.starts[-1]

    def weights(self) -> list[int]:
        """Count the blocks of each run."""
        return [end - start for start, end in pairwise(self.starts)]


def read_references(requests: Iterable[TraceRequest], block_size: int) -> References:
    """Find the runs of requests.

    Args:
        requests: The requests, in the order in which they are served.
        block_size: Tokens of one hash id. An engine's prefix cache does not hold the partial last
            block of a prompt.
    """
    numbers: dict[int, int] = defaultdict(count().__next__)
    prompts = [
        array("I", map(numbers.__getitem__, row.hash_ids[: row.num_prompt_tokens // block_size]))
        for row in requests
    ]
    # Blocks that the same requests use have the same signature.
    signatures = [0] * len(numbers)
    draw = Random(12).getrandbits
    for blocks in prompts:
        ticket = draw(62)
        for block in blocks:
            signatures[block] ^= ticket
    return _find_runs(prompts, signatures)


def _find_runs(prompts: Iterable[array[int]], signatures: Sequence[int]) -> References:
    run_of = array("i", [-1]) * len(signatures)  # by block
    starts, num_blocks = array("I"), 0
    found: list[array[int]] = []
    for blocks in prompts:
        runs = array("i")
        at, last = 0, None
        while at < len(blocks):
            block = blocks[at]
            if run_of[block] < 0:
                if signatures[block] != last:
                    last = signatures[block]
                    runs.append(len(starts))
                    starts.append(num_blocks)
                run_of[block] = len(starts) - 1
                num_blocks += 1
                at += 1
                continue
            run, last = run_of[block], None
            runs.append(run)
            at += (starts[run + 1] if run + 1 < len(starts) else num_blocks) - starts[run]
        found.append(runs)
    starts.append(num_blocks)
    return References(found, starts)
