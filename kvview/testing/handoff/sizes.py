"""The sizes of two engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvview import CacheGeometry, ChunkedLocalAttention, FullAttention, SlidingWindow
from kvview.testing.connector.scenario.scenario import NUM_LAYERS, PAGE_BYTES, Scenario

_FULL = FullAttention(4)
GEOMETRIES: Mapping[str, CacheGeometry] = {
    "full": CacheGeometry.single(4),
    "window": CacheGeometry(4, 4, (_FULL, SlidingWindow(4, 6))),
    "two sizes": CacheGeometry(8, 4, (FullAttention(8), _FULL)),
    "chunks": CacheGeometry(4, 4, (_FULL, ChunkedLocalAttention(4, 8))),
}
"""The KV-cache groups of an engine."""
SPLITS: Mapping[str, Sequence[int]] = {
    "none": (),
    "tensor": (NUM_LAYERS, NUM_LAYERS),
    "pipeline": (1, NUM_LAYERS - 1),
}
"""The numbers of tensors of each rank, without and with tensor and pipeline parallelism."""


def scenario_of(
    geometry: CacheGeometry, split: str, num_blocks: int, max_running: int, pin_budget: float | None
) -> Scenario:
    """Return the sizes of one engine.

    Args:
        geometry: Its geometry.
        split: Name of its split.
        num_blocks: Number of blocks of each group.
        max_running: Maximum of running requests.
        pin_budget: Share of the blocks that a connector may hold.
    """
    ranks = tuple(SPLITS[split])
    pages = ((PAGE_BYTES,) * sum(ranks),) if ranks else ()
    return Scenario(
        geometry,
        num_gpu_blocks=num_blocks * len(geometry.groups),
        events=(),
        max_running=max_running,
        ranks=ranks,
        pin_budget=pin_budget,
        group_pages=pages * len(geometry.groups),
    )


def doubled(geometry: CacheGeometry) -> CacheGeometry:
    """Double the block sizes; the hashes do not change, so only the layout differs."""
    groups = (replace(group, block_size=2 * group.block_size) for group in geometry.groups)
    size = 2 * geometry.scheduler_block_size
    return CacheGeometry(size, geometry.hash_block_size, tuple(groups))
