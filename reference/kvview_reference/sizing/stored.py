"""The bytes that a host tier stores for a block of a trace, layer by layer.

1. KV of full attention and of attention chunks is stored for every token, because vLLM's connector
   skips no blocks of these layers.
2. Sliding windows are stored for the tokens that are read at the end of each prompt; states are
   stored at the end of each prompt.
3. Blocks have the same bytes as in vLLM, including padding, summed over all ranks.

The number of prompt ends depends on the trace, so the bytes of a block are a mean over the distinct
blocks of the trace. The total of a host that holds the whole trace is exact.

Source: vLLM 0.32.0, ``reachable_block_mask`` in ``v1/core/single_type_kv_cache_manager.py``, with
the default retention: only the end of the prompt is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from pydantic import BaseModel, ConfigDict

from kvview_reference.sizing.cache_plan import CachePlan, plan_cache
from kvview_reference.sizing.model import Kind, LayerSet, ModelShape
from kvview_reference.sizing.tails import Tail

LARGEST_GPU_GB = 288
"""Memory of the largest GPUs, 10**9 bytes: NVIDIA B300, AMD MI355X."""


@dataclass(frozen=True)
class StoredLayers:
    """The part of one set of layers that the host stores.

    Args:
        layers: The set.
        share: Share of the distinct blocks for which the part is stored.
        block_bytes: Bytes of one such block, summed over all ranks.
    """

    layers: LayerSet
    share: float
    block_bytes: Fraction


class StoredBlocks:
    """The bytes of a trace's blocks.

    Args:
        model: The model.
        block_size: Number of tokens of a block of the trace.
    """

    def __init__(self, model: ModelShape, block_size: int) -> None:
        self.model, self.block_size = model, block_size
        self.plan: CachePlan = plan_cache(model)
        self._ends = [layers for layers in model.layers if layers.kind in ("window", "state")]

    @property
    def tails(self) -> list[Tail]:
        """The ends of prompts that must be counted for windows and states, in this order."""
        return [
            Tail(1, self.plan.block_size)
            if layers.kind == "state"
            else Tail(max(1, (layers.tokens or 1) - 1))
            for layers in self._ends
        ]

    def layers(self, tail_shares: Sequence[float]) -> list[StoredLayers]:
        """Compute the stored part of each set of layers.

        Args:
            tail_shares: Shares of the distinct blocks, in the order of ``tails``.
        """
        shares = dict(zip(map(id, self._ends), tail_shares, strict=True))
        stored: list[StoredLayers] = []
        for layers in self.model.layers:
            if layers.kind == "state":
                size = Fraction(self.plan.state_bytes())
            else:
                size = self.plan.token_bytes(layers.kind) * self.block_size
            stored.append(StoredLayers(layers, shares.get(id(layers), 1.0), size * self.model.tp))
        return stored

    def block_bytes(self, tail_shares: Sequence[float]) -> int:
        """Compute the mean bytes of a block, rounded up."""
        return max(
            1, ceil(sum(s.block_bytes * Fraction(s.share) for s in self.layers(tail_shares)))
        )

    def dense_block_bytes(self, tail_shares: Sequence[float]) -> int:
        """Compute the mean bytes of a block if windows, too, are stored for every token."""
        return ceil(
            sum(
                stored.block_bytes
                * (Fraction(stored.share) if stored.layers.kind == "state" else 1)
                for stored in self.layers(tail_shares)
            )
        )

    def load_bytes(self, num_blocks: float) -> float:
        """Compute the bytes that a hit of some blocks moves to the GPUs."""
        if not num_blocks:
            return 0.0
        loaded = 0.0
        for stored in self.layers([1.0] * len(self._ends)):
            layers = stored.layers
            tokens = num_blocks * self.block_size
            if layers.kind == "state":
                tokens = self.block_size
            elif layers.tokens is not None:
                tokens = min(tokens, layers.tokens)
            loaded += float(stored.block_bytes) * tokens / self.block_size
        return loaded


class LayersReport(BaseModel):
    """Layers of the model with the same KV.

    Args:
        tokens: Tokens of the window or chunk.
        token_bytes: Bytes of one token in all these layers, summed over all TP ranks.
        state_bytes: Bytes of the states of these layers, summed over all ranks; 0 for attention.
        stored_share: Share of the trace's distinct blocks for which the host stores these layers.
        stored_block_bytes: Bytes of one such block in vLLM, including padding.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    layers: int
    tokens: int | None
    token_bytes: int
    state_bytes: int
    stored_share: float
    stored_block_bytes: int
    formula: str


class ModelReport(BaseModel):
    """The model whose KV is stored.

    Args:
        token_bytes: Bytes that every token adds in full attention, summed over all TP ranks.
        block_bytes: Mean bytes that the host stores for a block of the trace.
        dense_block_bytes: Mean bytes for a block if a connector stores windows for every token.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    token_bytes: int
    block_bytes: int
    dense_block_bytes: int
    formula: str
    layers: list[LayersReport]


def report_model(blocks: StoredBlocks, tail_shares: Sequence[float]) -> ModelReport:
    """Make the report of the model."""
    model, tp = blocks.model, blocks.model.tp
    parts = [
        LayersReport(
            kind=stored.layers.kind,
            layers=stored.layers.count,
            tokens=stored.layers.tokens,
            token_bytes=tp * stored.layers.count * stored.layers.token_bytes,
            state_bytes=tp * stored.layers.count * stored.layers.state_bytes,
            stored_share=stored.share,
            stored_block_bytes=ceil(stored.block_bytes),
            formula=_formula(stored, blocks),
        )
        for stored in blocks.layers(tail_shares)
    ]
    return ModelReport(
        name=model.name,
        token_bytes=model.token_bytes,
        block_bytes=blocks.block_bytes(tail_shares),
        dense_block_bytes=blocks.dense_block_bytes(tail_shares),
        formula="; ".join(part.formula for part in parts),
        layers=parts,
    )


def _formula(stored: StoredLayers, blocks: StoredBlocks) -> str:
    """Write the formula of the bytes of a set of layers."""
    layers, tp = stored.layers, blocks.model.tp
    mib = float(stored.block_bytes) / 2**20
    if layers.kind == "state":
        size = tp * layers.count * layers.state_bytes
        text = f"{layers.formula} = {size:,} bytes; {mib:,.2f} MiB in blocks of vLLM"
    else:
        size = tp * layers.count * layers.token_bytes
        text = (
            f"{layers.formula} = {size:,} bytes a token; x {blocks.block_size} tokens = "
            f"{mib:,.2f} MiB a block"
        )
    if not blocks.model.is_hybrid:
        return text
    share = "all" if stored.share == 1.0 else f"{stored.share:.1%} of the"
    return f"{layers.name}: {text}, for {share} blocks"


def notes_on_model(report: ModelReport, gpu_gib: float, tp: int) -> list[str]:
    """List the warnings about the figures of this model."""
    notes: list[str] = []
    if any(part.kind in ("window", "state") for part in report.layers):
        mean, dense = (size / 2**20 for size in (report.block_bytes, report.dense_block_bytes))
        every = ""
        if dense > mean:
            every = (
                " A connector that stores windows for every token, as OffloadConnector does, takes "
                f"{dense:,.2f} MiB."
            )
        notes.append(
            "Hybrid model: windows and states are stored for the end of each prompt, as vLLM's "
            f"OffloadingConnector does by default; {mean:,.2f} MiB a block is the mean over this "
            f"trace.{every} Hits are those of full attention: an engine resumes only where it has "
            "windows and states, so it may hit fewer."
        )
    if gpu_gib / tp > LARGEST_GPU_GB * 1e9 / 2**30:
        notes.append(
            f"The GPU cache takes {gpu_gib / tp:,.0f} GiB{' on each GPU' if tp > 1 else ''}, "
            f"more than any GPU has ({LARGEST_GPU_GB} GB at most): pass its size, for example "
            "--gpu-blocks 40GiB, or more ranks (--tp)."
        )
    return notes
