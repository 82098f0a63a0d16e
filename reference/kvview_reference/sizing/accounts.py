"""Turns the blocks that a host moves into rates, bytes and seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict, Field

from kvview_reference.sizing.stored import StoredBlocks
from kvview_reference.sizing.tier_hits import HostTraffic, Tiers

_TIMELINE_BUCKETS = 60


class ReportPart(BaseModel):
    """A part of the JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Point(ReportPart):
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


class Moment(ReportPart):
    """A span of the trace, with an LRU host that is enough."""

    start_s: float
    requests: int
    blocks: int
    gpu_hit_blocks: int
    host_hit_blocks: int
    offloaded_blocks: int


class Accountant:
    """Turns blocks into rates, bytes and seconds.

    Args:
        tiers: The trace, and what its tiers hit.
        num_ids: Blocks of all prompts, at least 1.
        block_size: Tokens of a block.
        blocks: Their bytes; None where no model is known.
        prefill_tokens_per_s: Prompt tokens that the engine computes in a second.
        load_bandwidth_gb_per_s: From the host to the GPUs, 10**9 bytes a second.
    """

    def __init__(
        self,
        tiers: Tiers,
        num_ids: int,
        block_size: int,
        blocks: StoredBlocks | None,
        prefill_tokens_per_s: float,
        load_bandwidth_gb_per_s: float,
    ) -> None:
        self._tiers, self._num_ids, self._block_size = tiers, num_ids, block_size
        self._blocks = blocks
        self._block_bytes = (
            None if blocks is None else blocks.block_bytes(tiers.references.tail_shares)
        )
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._load_bytes_per_s = load_bandwidth_gb_per_s * 1e9
        self._seconds = tiers.references.seconds
        self._span = self._seconds / _TIMELINE_BUCKETS
        self._buckets = [
            min(_TIMELINE_BUCKETS - 1, int(request.arrival_s / self._span)) if self._span else 0
            for request in tiers.references.requests
        ]

    def gib(self, blocks: int) -> float | None:
        """GiB of so many blocks; None where no model is known."""
        return None if self._block_bytes is None else blocks * self._block_bytes / 2**30

    def point(self, host: int, traffic: HostTraffic) -> Point:
        """One policy at one size of the host."""
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
        loaded_bytes = self._bytes_loaded(traffic.loaded)
        if loaded_bytes is not None:
            seconds = sum(loaded_bytes) / self._load_bytes_per_s
        load, peak_load = self._bandwidths(loaded_bytes)
        offload, peak_offload = self._bandwidths(self._bytes_stored(traffic.stored))
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

    def _bytes_loaded(self, loaded: Sequence[int]) -> list[float] | None:
        if self._blocks is None:
            return None
        size, rate = self._blocks.load_bytes, self._tiers.references.rate
        of = {count: size(count / rate) for count in set(loaded)}
        return [of[count] for count in loaded]

    def _bytes_stored(self, stored: Sequence[int]) -> list[float] | None:
        if self._block_bytes is None:
            return None
        unit = self._block_bytes / self._tiers.references.rate
        return [count * unit for count in stored]

    def _bandwidths(self, num_bytes: list[float] | None) -> tuple[float | None, float | None]:
        """The mean and the highest, 10**9 bytes a second."""
        if num_bytes is None or not self._span:
            return None, None
        sums = self._sums(num_bytes)
        return sum(sums) / 1e9 / self._seconds, max(sums) / 1e9 / self._span

    def _sums(self, values: Iterable[float]) -> list[float]:
        sums = [0.0] * _TIMELINE_BUCKETS
        for bucket, value in zip(self._buckets, values, strict=True):
            sums[bucket] += value
        return sums

    def timeline(self, traffic: HostTraffic) -> list[Moment]:
        """The trace in spans of equal length."""
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
                requests=round(count),
                blocks=round(blocks / rate),
                gpu_hit_blocks=round(gpu / rate),
                host_hit_blocks=round(host / rate),
                offloaded_blocks=round(stored / rate),
            )
            for number, (count, blocks, gpu, host, stored) in enumerate(columns)
            if number < num
        ]
