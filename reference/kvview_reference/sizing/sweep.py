"""What a host tier is worth at every size: the run, and the JSON of ``kvview size --json``.

``docs/sizing.md`` describes it; ``python docs/make_commands.py`` writes its JSON Schema.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from kvview.errors import ConfigError
from kvview_reference.sizing.curves import optimum_hits
from kvview_reference.sizing.model import ModelShape
from kvview_reference.sizing.references import References
from kvview_reference.sizing.tier_hits import HostTraffic, Tiers

SCHEMA_VERSION: Literal[1] = 1
"""Grows when a field goes or means something else; new fields may come without."""

ENOUGH = 0.99
"""Share of what the largest host wins, for the size that is said to be enough."""

_CURVE_POINTS = 120
_TIMELINE_BUCKETS = 60
_DEFAULT_SIZES = 8


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelReport(_Model):
    """The model whose KV is stored."""

    name: str
    token_bytes: int = Field(description="Of one token's KV, all ranks of TP together.")
    block_bytes: int
    formula: str


class Point(_Model):
    """One policy at one size of the host."""

    host_blocks: int
    host_gib: float | None = Field(description="None where no model was given, as all of bytes.")
    gpu_hit_rate: float = Field(description="Share of the prompt blocks; likewise the others.")
    host_hit_rate: float
    computed_rate: float
    loaded_blocks: int = Field(description="From the host: its hits.")
    offloaded_blocks: int = Field(description="To the host.")
    offloaded_per_loaded: float | None = Field(description="None where nothing was loaded.")
    prefill_seconds_saved: float = Field(description="Of compute: loaded tokens over the rate.")
    load_seconds: float | None = Field(description="What the loads take instead.")
    load_gb_per_s: float | None = Field(description="Mean over the trace, 10**9 bytes a second.")
    peak_load_gb_per_s: float | None = Field(description="In the busiest of the timeline's spans.")
    offload_gb_per_s: float | None
    peak_offload_gb_per_s: float | None


class PolicyCurve(_Model):
    """One policy."""

    policy: str
    method: str = Field(description="How the points came about.")
    points: list[Point]


class Moment(_Model):
    """A span of the trace, with an LRU host that is enough."""

    start_s: float
    requests: int
    blocks: int
    gpu_hit_blocks: int
    host_hit_blocks: int
    offloaded_blocks: int


class SizeReport(_Model):
    """All of it."""

    schema_version: Literal[1] = SCHEMA_VERSION
    trace: str
    play: Literal["order"] = Field(
        default="order", description="One request after another, as they came: no time."
    )
    block_size: int = Field(description="Tokens of a block.")
    requests: int = Field(description="That were served.")
    requests_too_large: int = Field(description="Passed over: they do not fit on the GPU.")
    lost: list[str] = Field(description="What of the trace could not be read.")
    cut: list[str] = Field(description="Of which files all that follows a line is lost.")
    blocks: int = Field(description="Hash ids of all prompts: what rates are shares of.")
    different_blocks: int
    sampling_rate: float = Field(description="Share of the blocks that was looked at.")
    trace_seconds: float
    gpu_blocks: int
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
    lost: Sequence[str] = (),
    cut: Sequence[str] = (),
    on_progress: Callable[[str], object] = lambda what: None,
) -> SizeReport:
    """Hits, and what they cost, at every size of the host.

    Args:
        references: Of the trace.
        trace: Its name.
        block_size: Tokens of a block.
        gpu_blocks: That the GPU's prefix cache holds; 0 for none.
        policies: Of the host, by name; "lru" comes first, whether named or not.
        host_sizes: In blocks; None chooses some.
        model: Turns blocks into bytes.
        prefill_tokens_per_s: What the engine computes.
        load_bandwidth_gb_per_s: From the host to the GPUs, 10**9 bytes a second.
        lost: What of the trace could not be read.
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
    accountant = _Accountant(
        tiers, num_ids, block_size, model, prefill_tokens_per_s, load_bandwidth_gb_per_s
    )
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
        lost=list(lost),
        cut=list(cut),
        blocks=references.num_ids,
        different_blocks=round(references.num_blocks / rate),
        sampling_rate=rate,
        trace_seconds=references.seconds,
        gpu_blocks=gpu_blocks,
        model=None
        if model is None
        else ModelReport(
            name=model.name,
            token_bytes=model.token_bytes,
            block_bytes=block_size * model.token_bytes,
            formula=model.formula(block_size),
        ),
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


class _Accountant:
    """Turns blocks into rates, bytes and seconds."""

    def __init__(
        self,
        tiers: Tiers,
        num_ids: int,
        block_size: int,
        model: ModelShape | None,
        prefill_tokens_per_s: float,
        load_bandwidth_gb_per_s: float,
    ) -> None:
        self._tiers, self._num_ids, self._block_size = tiers, num_ids, block_size
        self._block_bytes = None if model is None else block_size * model.token_bytes
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._load_bytes_per_s = load_bandwidth_gb_per_s * 1e9
        self._seconds = tiers.references.seconds
        self._span = self._seconds / _TIMELINE_BUCKETS
        self._buckets = [
            min(_TIMELINE_BUCKETS - 1, int(request.arrival_s / self._span)) if self._span else 0
            for request in tiers.references.requests
        ]

    def gib(self, blocks: int) -> float | None:
        return None if self._block_bytes is None else blocks * self._block_bytes / 2**30

    def point(self, host: int, traffic: HostTraffic) -> Point:
        references = self._tiers.references
        gpu_hits, loaded_blocks = (
            sum(hits) / references.rate for hits in (self._tiers.gpu_hits, traffic.loaded)
        )
        if gpu_hits:
            gpu_hits = max(0.0, gpu_hits - references.excess)
        elif loaded_blocks:
            loaded_blocks = max(0.0, loaded_blocks - references.excess)
        gpu, loaded = gpu_hits / self._num_ids, round(loaded_blocks)
        stored = round(sum(traffic.stored) / references.rate)
        seconds = None
        if self._block_bytes is not None:
            seconds = loaded * self._block_bytes / self._load_bytes_per_s
        load, peak_load = self._bandwidths(traffic.loaded)
        offload, peak_offload = self._bandwidths(traffic.stored)
        return Point(
            host_blocks=host,
            host_gib=self.gib(host),
            gpu_hit_rate=gpu,
            host_hit_rate=loaded / self._num_ids,
            computed_rate=1 - gpu - loaded / self._num_ids,
            loaded_blocks=loaded,
            offloaded_blocks=stored,
            offloaded_per_loaded=stored / loaded if loaded else None,
            prefill_seconds_saved=loaded * self._block_size / self._prefill_tokens_per_s,
            load_seconds=seconds,
            load_gb_per_s=load,
            peak_load_gb_per_s=peak_load,
            offload_gb_per_s=offload,
            peak_offload_gb_per_s=peak_offload,
        )

    def _bandwidths(self, blocks: Iterable[int]) -> tuple[float | None, float | None]:
        """The mean and the highest, 10**9 bytes a second."""
        if self._block_bytes is None or not self._span:
            return None, None
        sums = self._sums(blocks)
        unit = self._block_bytes / self._tiers.references.rate / 1e9
        return sum(sums) * unit / self._seconds, max(sums) * unit / self._span

    def _sums(self, values: Iterable[int]) -> list[int]:
        sums = [0] * _TIMELINE_BUCKETS
        for bucket, value in zip(self._buckets, values, strict=True):
            sums[bucket] += value
        return sums

    def timeline(self, traffic: HostTraffic) -> list[Moment]:
        requests = self._tiers.references.requests
        rate = self._tiers.references.rate
        num = _TIMELINE_BUCKETS if self._span else 1
        columns = zip(
            self._sums(1 for _ in requests),
            self._sums(request.num_blocks for request in requests),
            self._sums(self._tiers.gpu_hits),
            self._sums(traffic.loaded),
            self._sums(traffic.stored),
            strict=True,
        )
        return [
            Moment(
                start_s=number * self._span,
                requests=count,
                blocks=round(blocks / rate),
                gpu_hit_blocks=round(gpu / rate),
                host_hit_blocks=round(host / rate),
                offloaded_blocks=round(stored / rate),
            )
            for number, (count, blocks, gpu, host, stored) in enumerate(columns)
            if number < num
        ]
