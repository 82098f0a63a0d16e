"""The caches that must be restored unchanged: each kind of layers in each memory layout."""

from __future__ import annotations

import tempfile
from pathlib import Path

from kvview_vllm.partition.pair_engine import NUM_BLOCKS
from kvview_vllm.partition.pairs import PROMPT, EngineSettings, Pair
from kvview_vllm.releases.cpu.cache_kinds import cache_kinds
from kvview_vllm.releases.cpu.worker_caches import (
    BLOCK_SIZE,
    CacheKind,
    layouts,
    make_config,
    resolve_layout,
)
from kvview_vllm.simulation.scheduler import cpu_scheduler

_NEXT_TURN = [*PROMPT, *range(100, 108)]
"""Tokens of the second request: a window and a Mamba state are stored for the end of a prompt."""


def layout_pairs() -> list[Pair]:
    """Return one pair, a request and its continuation, for each cache of the release."""
    return [
        Pair(
            f"{kind}, {layout}",
            len(PROMPT),
            second=lambda: {"prompt_token_ids": _NEXT_TURN},
            first_engine=EngineSettings(layout=layout, kind=kind),
        )
        for kind, taken in cache_kinds().items()
        for layout in layouts()
        if layout in taken and _is_allocated(kind, layout)
    ]


def _is_allocated(kind: CacheKind, layout: str) -> bool:
    """Whether vLLM starts with this cache, without a connector."""
    with tempfile.TemporaryDirectory(prefix="kvview-") as folder:
        config = cpu_scheduler.make_vllm_config(
            Path(folder),
            None,
            block_size=BLOCK_SIZE,
            num_groups=len(kind.layers),
            num_blocks=NUM_BLOCKS,
            has_states=kind.has_states,
        )
    try:
        resolve_layout(config, layout, [spec for _, spec in kind.layers])
        make_config(config, kind, NUM_BLOCKS)
    except (AssertionError, NotImplementedError, ValueError):  # as vLLM refuses a combination
        return False
    return True
