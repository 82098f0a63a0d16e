"""The rates, bytes and seconds of the blocks that a host tier moves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from kvview_reference.sizing.stored import StoredBlocks
from kvview_reference.sizing.tier_hits import HostTraffic, Tiers

PEAK_SECONDS = 10.0
"""Seconds over which a peak is measured; a link that is overloaded for longer delays requests."""


class ReportPart(BaseModel):
    """Base class of the parts of the JSON report."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Point(ReportPart):
    """One policy at one size of the host.

    Args:
        host_gib: Size in GiB; None without a model, like every other figure in bytes.
        gpu_hit_rate: Share of the prompt blocks that are hits on the GPU; the other rates are
            shares of the same blocks.
        loaded_blocks: Number of blocks loaded from the host, which are the host's hits.
        offloaded_blocks: Number of blocks stored to the host.
        offloaded_per_loaded: ``offloaded_blocks`` divided by ``loaded_blocks``; None if no block
            was loaded.
        prefill_seconds_saved: Seconds of compute that the loads save: the loaded tokens divided by
            the prefill rate.
        load_seconds: Seconds that the loads take in total.
        load_gb_per_s: Mean bandwidth over the trace, in 10**9 bytes per second.
        peak_load_gb_per_s: Mean bandwidth over the busiest 10 s.
    """

    host_blocks: int
    host_gib: float | None
    gpu_hit_rate: float
    host_hit_rate: float
    computed_rate: float
    loaded_blocks: int
    offloaded_blocks: int
    offloaded_per_loaded: float | None
    prefill_seconds_saved: float
    load_seconds: float | None
    load_gb_per_s: float | None
    peak_load_gb_per_s: float | None
    offload_gb_per_s: float | None
    peak_offload_gb_per_s: float | None


class Accountant:
    """Converts numbers of blocks into rates, bytes and seconds.

    Args:
        tiers: The trace, and the hits of its tiers.
        num_ids: Number of blocks of all prompts, at least 1.
        block_size: Tokens of a block.
        blocks: The bytes of blocks; None without a model.
        prefill_tokens_per_s: Prompt tokens that the engine computes per second.
        load_bandwidth_gb_per_s: Bandwidth from the host to the GPUs, 10**9 bytes per second.
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
        self._tiers, self._num_ids, self._blocks = tiers, num_ids, blocks
        self._references = tiers.references
        self._block_bytes = (
            None if blocks is None else blocks.block_bytes(tiers.references.tail_shares)
        )
        self._prefill_blocks_per_s = prefill_tokens_per_s / block_size
        self._load_bytes_per_s = load_bandwidth_gb_per_s * 1e9

    def gib(self, blocks: int) -> float | None:
        """Compute the GiB of a number of blocks; None without a model."""
        return None if self._block_bytes is None else blocks * self._block_bytes / 2**30

    def point(self, host: int, traffic: HostTraffic) -> Point:
        """Compute the figures of one policy at one size of the host."""
        gpu_rate, loaded_blocks = sum(self._tiers.gpu_hits) / self._num_ids, sum(traffic.loaded)
        host_rate = loaded_blocks / self._num_ids
        stored = sum(traffic.stored)
        in_bytes = out_bytes = None
        if self._blocks is not None and self._block_bytes is not None:
            sizes = {n: self._blocks.load_bytes(n) for n in set(traffic.loaded)}
            in_bytes = [sizes[number] for number in traffic.loaded]
            out_bytes = [float(number * self._block_bytes) for number in traffic.stored]
        load, peak_load = self._bandwidths(in_bytes)
        offload, peak_offload = self._bandwidths(out_bytes)
        return Point(
            host_blocks=host,
            host_gib=self.gib(host),
            gpu_hit_rate=gpu_rate,
            host_hit_rate=host_rate,
            computed_rate=1 - gpu_rate - host_rate,
            loaded_blocks=loaded_blocks,
            offloaded_blocks=stored,
            offloaded_per_loaded=stored / loaded_blocks if loaded_blocks else None,
            prefill_seconds_saved=loaded_blocks / self._prefill_blocks_per_s,
            load_seconds=None if in_bytes is None else sum(in_bytes) / self._load_bytes_per_s,
            load_gb_per_s=load,
            peak_load_gb_per_s=peak_load,
            offload_gb_per_s=offload,
            peak_offload_gb_per_s=peak_offload,
        )

    def _bandwidths(self, num_bytes: Sequence[float] | None) -> tuple[float | None, float | None]:
        """Compute the mean and the peak bandwidth, in 10**9 bytes per second."""
        seconds = self._references.seconds
        if num_bytes is None or not seconds:
            return None, None
        span = min(PEAK_SECONDS, seconds)
        sums: dict[int, float] = defaultdict(float)
        for request, value in zip(self._references.requests, num_bytes, strict=True):
            sums[int(request.arrival_s / span)] += value
        return sum(num_bytes) / 1e9 / seconds, max(sums.values()) / 1e9 / span
