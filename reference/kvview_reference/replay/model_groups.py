"""The KV-cache groups of a model and the bytes of their blocks, for a replay."""

from __future__ import annotations

from kvview import (
    CacheGeometry,
    CacheGroup,
    ChunkedLocalAttention,
    ConfigError,
    Mamba,
    SlidingWindow,
)
from kvview_reference.sizing.model import LayerSet, ModelShape

_ORDER = ("full", "window", "chunked", "state")


def groups_of(model: ModelShape) -> str:
    """Format the groups of a model for ``--groups``, one group for each kind of layer."""
    layers = sorted(model.layers, key=lambda layers: _ORDER.index(layers.kind))
    return ",".join(
        {"full": "full", "state": "mamba"}.get(part.kind, f"{part.kind}:{part.tokens}")
        for part in layers
    )


def block_bytes_of(model: ModelShape, geometry: CacheGeometry) -> tuple[int, ...]:
    """Compute the bytes of a block of each group, summed over all ranks.

    Args:
        model: The model.
        geometry: Geometry of the replay.

    Raises:
        ConfigError: The groups of the geometry differ from the groups of the model.
    """
    layers = {_kind_of(part): part for part in model.layers}
    kinds = [_kind(group) for group in geometry.groups]
    if sorted(kinds) != sorted(layers):
        raise ConfigError(
            f"--groups differs from the groups of --model: drop it, or pass {groups_of(model)}"
        )
    return tuple(
        model.tp
        * layers[kind].count
        * (layers[kind].state_bytes or size * layers[kind].token_bytes)
        for kind, size in zip(kinds, (g.block_size for g in geometry.groups), strict=True)
    )


def _kind_of(layers: LayerSet) -> tuple[str, int]:
    return layers.kind, layers.tokens or 0


def _kind(group: CacheGroup) -> tuple[str, int]:
    match group:
        case SlidingWindow(sliding_window=tokens):
            return "window", tokens
        case ChunkedLocalAttention(attention_chunk_size=tokens):
            return "chunked", tokens
        case Mamba():
            return "state", 0
        case _:
            return "full", 0
