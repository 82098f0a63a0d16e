"""The hit curve of a trace, and the JSON of ``kvview size --json``.

``docs/sizing.md`` describes the JSON; ``python docs/make_commands.py`` writes its JSON Schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from kvview.errors import ConfigError
from kvview_reference.sizing.curves import knee_of, lru_curve, lru_reaches, optimum_hits
from kvview_reference.sizing.references import read_references
from kvview_reference.traces.trace import Trace

_CURVE_POINTS = 120
_KNEE_POINTS = 1000
_DEFAULT_SIZES = 14
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?) ?(?P<unit>[KMGT]iB)|(?P<blocks>\d+)")


@dataclass(frozen=True)
class Point:
    """The hits of a cache of one size.

    Args:
        blocks: Size of the cache in blocks.
        gib: Size in GiB; null without ``--block-bytes``.
        lru_hit_rate: Share of the prompt blocks that LRU hits.
        lru_token_rate: Share of the prompt tokens that LRU hits.
        optimum_hit_rate: Share of the prompt blocks that no policy exceeds.
    """

    blocks: int
    gib: float | None
    lru_hit_rate: float
    lru_token_rate: float
    optimum_hit_rate: float


@dataclass(frozen=True)
class SizeReport:
    """The report of ``kvview size``.

    Args:
        trace: Name of the trace.
        requests: Requests that were counted.
        warmup_requests: First requests that filled the cache and were not counted (``--skip``).
        unread_requests: Requests of the trace that could not be read (``--skip-bad-rows``).
        lost: The first 10,000 reasons.
        block_size: Tokens of a block.
        block_bytes: Bytes of a block; null without ``--block-bytes``.
        prompt_tokens: Prompt tokens of the counted requests.
        blocks: Number of hash ids of their prompts; the hit rates are shares of this number.
        different_blocks: Number of different full blocks of all requests.
        unlimited_hit_rate: Share of the prompt blocks that a cache of every block hits.
        unlimited_token_rate: Share of the prompt tokens that a cache of every block hits.
        full_blocks: Size beyond which LRU gains nothing.
        knee_blocks: Size at which the LRU curve bends most; beyond this size each further block
            gains less than the average block.
        knee_share: Share of the hits of an unlimited cache that LRU has at the knee.
        points: The hits at the sizes of the table.
        lru_curve: Pairs of a number of blocks and the exact hit rate of LRU.
        schema_version: Increased when a field is removed or changes its meaning.
    """

    trace: str
    requests: int
    warmup_requests: int
    unread_requests: int
    lost: list[str]
    block_size: int
    block_bytes: int | None
    prompt_tokens: int
    blocks: int
    different_blocks: int
    unlimited_hit_rate: float
    unlimited_token_rate: float
    full_blocks: int
    knee_blocks: int
    knee_share: float
    points: list[Point]
    lru_curve: list[tuple[int, float]]
    schema_version: Literal[1] = 1

    def gib(self, blocks: int) -> float | None:
        """Return a size in GiB; None without the bytes of a block."""
        return None if self.block_bytes is None else blocks * self.block_bytes / 2**30


def size(
    trace: Trace,
    *,
    sizes: Sequence[int] | None = None,
    block_bytes: int | None = None,
    skip: int = 0,
    on_progress: Callable[[str], object] = lambda text: None,
) -> SizeReport:
    """Compute the hits of a cache at every size.

    Args:
        trace: The trace, whose requests are served one after another.
        sizes: Sizes in blocks; None chooses sizes.
        block_bytes: Bytes of a block; None if they are unknown.
        skip: Number of first requests that fill the cache and are not counted.
        on_progress: Called with the name of each stage.

    Raises:
        ConfigError: No request is left to count.
    """
    counted = trace.requests[skip:]
    if not counted:
        raise ConfigError(
            f"--skip {skip} leaves none of the {len(trace.requests)} requests; skip fewer"
        )
    num_ids = sum(len(request.hash_ids) for request in counted)
    num_tokens = sum(request.num_prompt_tokens for request in counted)
    on_progress("reuse distances")
    references = read_references(trace.requests, trace.block_size)
    curve = lru_curve(islice(lru_reaches(references), skip, None))
    full = curve.full_size

    def block_rate(hits: int) -> float:
        return hits / max(1, num_ids)

    def token_rate(hits: int) -> float:
        return hits * trace.block_size / num_tokens

    most = curve.hits(full)
    step = max(1, full // _KNEE_POINTS)
    knee = knee_of([(blocks, curve.hits(blocks)) for blocks in (*range(0, full, step), full)])
    on_progress("optimum")
    chosen = sorted(set(sizes or _default_sizes(full)))
    points = [
        Point(
            blocks,
            None if block_bytes is None else blocks * block_bytes / 2**30,
            block_rate(curve.hits(blocks)),
            token_rate(curve.hits(blocks)),
            block_rate(best),
        )
        for blocks, best in zip(chosen, optimum_hits(references, chosen, skip), strict=True)
    ]
    return SizeReport(
        trace=trace.title,
        requests=len(counted),
        warmup_requests=skip,
        unread_requests=trace.skipped.num_requests,
        lost=trace.skipped.reasons,
        block_size=trace.block_size,
        block_bytes=block_bytes,
        prompt_tokens=num_tokens,
        blocks=num_ids,
        different_blocks=references.num_blocks,
        unlimited_hit_rate=block_rate(most),
        unlimited_token_rate=token_rate(most),
        full_blocks=full if most else 0,
        knee_blocks=knee if most else 0,
        knee_share=curve.hits(knee) / max(1, most),
        points=points,
        lru_curve=[(blocks, block_rate(curve.hits(blocks))) for blocks in _curve_sizes(full)],
    )


def parse_sizes(text: str, block_bytes: int | None) -> list[int]:
    """Read sizes such as ``5000,64GiB`` as numbers of blocks.

    Raises:
        ConfigError: A size is not a number of blocks or bytes, or the bytes of a block are unknown.
    """
    found = []
    for part in text.split(","):
        match = _SIZE.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"--sizes {part.strip()!r}: expected blocks or bytes: 5000 or 64GiB")
        if match["blocks"]:
            found.append(int(match["blocks"]))
        elif block_bytes is None:
            raise ConfigError(f"--sizes {part.strip()!r} is in bytes, so add --block-bytes")
        else:
            found.append(int(float(match["number"]) * _UNITS[match["unit"]]) // block_bytes)
    return found


def _default_sizes(full: int) -> list[int]:
    top = max(full, 1)
    low = max(top // 200, 1)
    factor = top / low
    return [round(low * factor ** (i / (_DEFAULT_SIZES - 1))) for i in range(_DEFAULT_SIZES)]


def _curve_sizes(full: int) -> list[int]:
    top = max(full, 1)
    return sorted({0, *(round(top ** (i / _CURVE_POINTS)) for i in range(_CURVE_POINTS + 1))})
