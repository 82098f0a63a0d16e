"""The value of a host tier at every size: its computation, and the JSON of ``kvview size --json``.

``docs/sizing.md`` describes the JSON; ``python docs/make_commands.py`` writes its JSON Schema.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from kvview_reference.replay.traces import Lost
from kvview_reference.sizing.accounts import Accountant, Point, ReportPart
from kvview_reference.sizing.curves import knee_of, optimum_hits
from kvview_reference.sizing.references import References
from kvview_reference.sizing.stored import (
    ModelReport,
    StoredBlocks,
    notes_on_model,
    report_model,
)
from kvview_reference.sizing.tier_hits import Tiers

SCHEMA_VERSION: Literal[1] = 1
"""Increased when a field is removed or changes its meaning; new fields do not increase it."""

_CURVE_POINTS = 120
_KNEE_POINTS = 1000
_DEFAULT_SIZES = 8


class PolicyCurve(ReportPart):
    """The points of one policy.

    Args:
        method: The way in which the points were computed.
    """

    policy: str
    method: str
    points: list[Point]


class SizeReport(ReportPart):
    """The report of ``kvview size``.

    Args:
        play: "order": requests are served one after another, in the order of arrival, without
            times.
        block_size: Tokens of a block.
        requests: Requests that were served.
        requests_too_large: Requests that were skipped because they do not fit on the GPU.
        malformed_rows: Rows and files of the trace that could not be read.
        lost: The first 10,000 of these rows and files, with the reasons.
        cut: Files that could only be read up to a line, each with this line.
        blocks: Number of hash ids of all prompts; the rates are shares of this number.
        gpu_gib: Size of the GPU cache in GiB, summed over all ranks.
        notes: Warnings about the figures of the model.
        no_connector_hit_rate: Hit rate of the GPU's prefix cache alone.
        unlimited_hit_rate: Hit rate with a host that holds every block.
        full_host_blocks: Size beyond which an LRU host gains nothing.
        knee_host_blocks: Size at which the LRU curve bends most; beyond this size each further
            block gains less than the average block.
        knee_share: Share of the gain of the largest host that LRU has at the knee.
        optimum: Pairs of host blocks and the highest possible hit rate of GPU and host, which MIN
            with bypass reaches, because it knows all later requests.
        lru_curve: Pairs of a number of host blocks and the exact hit rate.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    trace: str
    play: Literal["order"] = "order"
    block_size: int
    requests: int
    requests_too_large: int
    malformed_rows: int
    lost: list[str]
    cut: list[str]
    blocks: int
    different_blocks: int
    trace_seconds: float
    gpu_blocks: int
    gpu_gib: float | None
    notes: list[str]
    model: ModelReport | None
    prefill_tokens_per_s: float
    load_bandwidth_gb_per_s: float
    no_connector_hit_rate: float
    unlimited_hit_rate: float
    full_host_blocks: int
    knee_host_blocks: int
    knee_host_gib: float | None
    knee_share: float
    curves: list[PolicyCurve]
    optimum: list[tuple[int, float]]
    lru_curve: list[tuple[int, float]]


def size(
    references: References,
    *,
    trace: str,
    block_size: int,
    gpu_blocks: int,
    policies: Sequence[str],
    host_sizes: Sequence[int] | None = None,
    blocks: StoredBlocks | None = None,
    prefill_tokens_per_s: float = 10_000.0,
    load_bandwidth_gb_per_s: float = 20.0,
    lost: Lost | None = None,
    on_progress: Callable[[str], object] = lambda text: None,
) -> SizeReport:
    """Compute the hits and costs of a host at every size.

    Args:
        references: The trace, which was read with the ``tails`` of ``blocks``.
        trace: Name of the trace.
        block_size: Tokens of a block.
        gpu_blocks: Blocks that the GPU's prefix cache holds; 0 for no cache.
        policies: Names of the host's policies; "lru" is added in front.
        host_sizes: Sizes in blocks; None lets the command choose sizes.
        blocks: The bytes of blocks; None without a model.
        prefill_tokens_per_s: Prompt tokens that the engine computes per second.
        load_bandwidth_gb_per_s: Bandwidth from the host to the GPUs, 10**9 bytes per second.
        lost: Parts of the trace that could not be read.
        on_progress: Called with the name of each stage.

    Raises:
        ConfigError: A policy is unknown.
    """
    on_progress("stack distances")
    tiers = Tiers(references, gpu_blocks)
    num_ids = max(1, references.num_ids)
    full = tiers.curve.full_size

    def lru_rate(host: int) -> float:
        return tiers.curve.hits(max(host, gpu_blocks)) / num_ids

    alone, unlimited = sum(tiers.gpu_hits) / num_ids, lru_rate(full)
    knee, knee_share = 0, 0.0
    if unlimited > alone:
        sizes_between = range(gpu_blocks, full, max(1, (full - gpu_blocks) // _KNEE_POINTS))
        knee = knee_of([(host, lru_rate(host)) for host in (*sizes_between, full)])
        knee_share = (lru_rate(knee) - alone) / (unlimited - alone)
    accountant = Accountant(
        tiers, num_ids, block_size, blocks, prefill_tokens_per_s, load_bandwidth_gb_per_s
    )
    model_report, notes, gpu_gib = None, [], accountant.gib(gpu_blocks)
    if blocks is not None and gpu_gib is not None:
        model_report = report_model(blocks, references.tail_shares)
        notes = notes_on_model(model_report, gpu_gib, blocks.model.tp)
    sizes = sorted(set(host_sizes or _default_sizes(gpu_blocks, full)))
    on_progress("optimum")
    bounds = optimum_hits(references, [gpu_blocks + host for host in sizes])
    curves = []
    for policy in dict.fromkeys(["lru", *policies]):
        points = []
        for host in sizes:
            on_progress(f"{policy} with {host:,} blocks")
            traffic = tiers.lru(host) if policy == "lru" else tiers.replay(host, policy)
            points.append(accountant.point(host, traffic))
        method = "stack distances, exact" if policy == "lru" else "one replay per size"
        curves.append(PolicyCurve(policy=policy, method=method, points=points))
    lost = lost or Lost()
    return SizeReport(
        trace=trace,
        block_size=block_size,
        requests=len(references.requests),
        requests_too_large=references.num_too_large,
        malformed_rows=lost.num_rows,
        lost=lost.rows,
        cut=lost.cut,
        blocks=references.num_ids,
        different_blocks=references.num_blocks,
        trace_seconds=references.seconds,
        gpu_blocks=gpu_blocks,
        gpu_gib=gpu_gib,
        notes=notes,
        model=model_report,
        prefill_tokens_per_s=prefill_tokens_per_s,
        load_bandwidth_gb_per_s=load_bandwidth_gb_per_s,
        no_connector_hit_rate=alone,
        unlimited_hit_rate=unlimited,
        full_host_blocks=full if unlimited > alone else 0,
        knee_host_blocks=knee,
        knee_host_gib=accountant.gib(knee),
        knee_share=knee_share,
        curves=curves,
        optimum=[(host, hits / num_ids) for host, hits in zip(sizes, bounds, strict=True)],
        lru_curve=[(host, lru_rate(host)) for host in _curve_sizes(full)],
    )


def _default_sizes(gpu_blocks: int, full: int) -> list[int]:
    """Choose sizes from the GPU's size up to the size beyond which a host gains no hits."""
    top = max(full, 1)
    low = min(max(gpu_blocks, top // 200, 1), top)
    factor = top / low
    return [round(low * factor ** (i / (_DEFAULT_SIZES - 1))) for i in range(_DEFAULT_SIZES)]


def _curve_sizes(full: int) -> list[int]:
    top = max(full, 1)
    return sorted({0, *(round(top ** (i / _CURVE_POINTS)) for i in range(_CURVE_POINTS + 1))})
