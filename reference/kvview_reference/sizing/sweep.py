"""What a host tier is worth at every size: the run, and the JSON of ``kvview size --json``.

``docs/sizing.md`` describes it; ``python docs/make_commands.py`` writes its JSON Schema.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import Field

from kvview.errors import ConfigError
from kvview_reference.sizing.accounts import Accountant, Moment, Point, ReportPart
from kvview_reference.sizing.curves import optimum_hits
from kvview_reference.sizing.model import ModelShape
from kvview_reference.sizing.references import References
from kvview_reference.sizing.stored import (
    ModelReport,
    StoredBlocks,
    notes_on_model,
    report_model,
)
from kvview_reference.sizing.tier_hits import Tiers

SCHEMA_VERSION: Literal[1] = 1
"""Grows when a field goes or means something else; new fields may come without."""

ENOUGH = 0.99
"""Share of what the largest host wins, for the size that is said to be enough."""

_CURVE_POINTS = 120
_DEFAULT_SIZES = 8


class PolicyCurve(ReportPart):
    """One policy."""

    policy: str
    method: str = Field(description="How the points came about.")
    points: list[Point]


class SizeReport(ReportPart):
    """All of it."""

    schema_version: Literal[1] = SCHEMA_VERSION
    trace: str
    play: Literal["order"] = Field(
        default="order", description="One request after another, as they came: no time."
    )
    block_size: int = Field(description="Tokens of a block.")
    requests: int = Field(description="That were served.")
    requests_too_large: int = Field(description="Passed over: they do not fit on the GPU.")
    malformed_rows: int = Field(description="Rows and files of the trace that could not be read.")
    lost: list[str] = Field(description="The first 10,000 of them, and why.")
    cut: list[str] = Field(description="Of which files all that follows a line is lost.")
    blocks: int = Field(description="Hash ids of all prompts: what rates are shares of.")
    different_blocks: int
    sampling_rate: float = Field(description="Share of the blocks that was looked at.")
    trace_seconds: float
    gpu_blocks: int
    gpu_gib: float | None = Field(description="Of the GPU cache, on all ranks together.")
    notes: list[str] = Field(description="What a reader must know of the model's figures.")
    model: ModelReport | None
    prefill_tokens_per_s: float
    load_bandwidth_gb_per_s: float
    no_connector_hit_rate: float = Field(description="The GPU's prefix cache alone.")
    unlimited_hit_rate: float = Field(description="With a host that holds everything.")
    full_host_blocks: int = Field(description="Beyond it an LRU host wins nothing.")
    enough_host_blocks: int = Field(description="LRU wins 99 % of what any host can win.")
    enough_host_gib: float | None
    curves: list[PolicyCurve]
    optimum: list[tuple[int, float]] = Field(
        description="Host blocks, and the hit rate that no policy exceeds with GPU and host: MIN "
        "with bypass, which knows the future."
    )
    lru_curve: list[tuple[int, float]] = Field(description="Host blocks and hit rate, exact.")
    timeline: list[Moment]


def size(
    references: References,
    *,
    trace: str,
    block_size: int,
    gpu_blocks: int,
    policies: Sequence[str],
    host_sizes: Sequence[int] | None = None,
    model: ModelShape | None = None,
    prefill_tokens_per_s: float = 10_000.0,
    load_bandwidth_gb_per_s: float = 20.0,
    malformed_rows: int = 0,
    lost: Sequence[str] = (),
    cut: Sequence[str] = (),
    on_progress: Callable[[str], object] = lambda what: None,
) -> SizeReport:
    """Hits, and what they cost, at every size of the host.

    Args:
        references: Of the trace; of a hybrid model read with the ``tails`` of its blocks.
        trace: Its name.
        block_size: Tokens of a block.
        gpu_blocks: That the GPU's prefix cache holds; 0 for none.
        policies: Of the host, by name; "lru" comes first, whether named or not.
        host_sizes: In blocks; None chooses some.
        model: Turns blocks into bytes.
        prefill_tokens_per_s: What the engine computes.
        load_bandwidth_gb_per_s: From the host to the GPUs, 10**9 bytes a second.
        malformed_rows: Rows and files of the trace that could not be read.
        lost: The first of them, and why.
        cut: Of which files all that follows a line is lost.
        on_progress: Told what is being done.

    Raises:
        ConfigError: A rate or a policy is impossible.
    """
    for name, rate in (
        ("--prefill-rate", prefill_tokens_per_s),
        ("--load-bandwidth", load_bandwidth_gb_per_s),
    ):
        if not 0 < rate < math.inf:
            raise ConfigError(f"{name} must be above 0, got {rate}")
    on_progress("stack distances")
    tiers = Tiers(references, gpu_blocks)
    rate = references.rate
    num_ids = max(1, references.num_ids)
    full = round(tiers.curve.full_size / rate)
    excess = references.excess

    def rate_of(hits: int) -> float:
        """As a share of the prompt blocks: the sample's hits as the trace's."""
        return max(0.0, hits / rate - (excess if hits else 0.0)) / num_ids

    def lru_rate(host: int) -> float:
        return rate_of(tiers.curve.hits(max(tiers.sampled(host), tiers.sampled(gpu_blocks))))

    gpu_hits = rate_of(sum(tiers.gpu_hits)) * num_ids

    unlimited = lru_rate(full)
    wanted = gpu_hits + ENOUGH * (unlimited * num_ids - gpu_hits)
    has_gain = unlimited * num_ids > gpu_hits
    enough = 0
    if has_gain:
        enough = round(tiers.curve.size_for((wanted + excess) * rate) / rate)
    sizes = sorted(set(host_sizes or _default_sizes(gpu_blocks, full)))
    blocks = None if model is None else StoredBlocks(model, block_size)
    model_report = None if blocks is None else report_model(blocks, references.tail_shares)
    accountant = Accountant(
        tiers, num_ids, block_size, blocks, prefill_tokens_per_s, load_bandwidth_gb_per_s
    )
    gpu_gib = accountant.gib(gpu_blocks)
    notes = []
    if model is not None and model_report is not None and gpu_gib is not None:
        notes = notes_on_model(model_report, gpu_gib, model.tp)
    on_progress("optimum")
    bounds = optimum_hits(references, [tiers.sampled(gpu_blocks + host) for host in sizes])
    curves = []
    for policy in dict.fromkeys(["lru", *policies]):
        points = []
        for host in sizes:
            on_progress(f"{policy} with {host:,} blocks")
            traffic = tiers.lru(host) if policy == "lru" else tiers.replay(host, policy)
            points.append(accountant.point(host, traffic))
        how = "stack distances, exact" if policy == "lru" else "a replay a size"
        if rate < 1.0:
            how = f"{how.removesuffix(', exact')}, sampled at {rate:g}"
        curves.append(PolicyCurve(policy=policy, method=how, points=points))
    return SizeReport(
        trace=trace,
        block_size=block_size,
        requests=len(references.requests),
        requests_too_large=references.num_too_large,
        malformed_rows=malformed_rows,
        lost=list(lost),
        cut=list(cut),
        blocks=references.num_ids,
        different_blocks=round(references.num_blocks / rate),
        sampling_rate=rate,
        trace_seconds=references.seconds,
        gpu_blocks=gpu_blocks,
        gpu_gib=gpu_gib,
        notes=notes,
        model=model_report,
        prefill_tokens_per_s=prefill_tokens_per_s,
        load_bandwidth_gb_per_s=load_bandwidth_gb_per_s,
        no_connector_hit_rate=gpu_hits / num_ids,
        unlimited_hit_rate=unlimited,
        full_host_blocks=full if has_gain else 0,
        enough_host_blocks=enough,
        enough_host_gib=accountant.gib(enough),
        curves=curves,
        optimum=[(host, rate_of(hits)) for host, hits in zip(sizes, bounds, strict=True)],
        lru_curve=[(host, lru_rate(host)) for host in _curve_sizes(full)],
        timeline=accountant.timeline(tiers.lru(enough)),
    )


def _default_sizes(gpu_blocks: int, full: int) -> list[int]:
    """Up to the size beyond which nothing is won, from where something may be."""
    top = max(full, 1)
    low = min(max(gpu_blocks, top // 200, 1), top)
    factor = top / low
    return [round(low * factor ** (i / (_DEFAULT_SIZES - 1))) for i in range(_DEFAULT_SIZES)]


def _curve_sizes(full: int) -> list[int]:
    top = max(full, 1)
    return sorted({0, *(round(top ** (i / _CURVE_POINTS)) for i in range(_CURVE_POINTS + 1))})
