"""The KV-cache groups into which vLLM divides a model's layers, and the bytes of their blocks.

1. Each group has its own block table, but all groups share one pool, so a block has the same number
   of bytes in all groups.
2. A state takes one block. If a state is larger than a block of attention, blocks of attention get
   more tokens, and the state is padded to their size.
3. Layers with smaller pages get blocks of more tokens; if the page sizes do not divide each other,
   smaller pages are padded.
4. All groups have the same number of layers. This is the number of layers of the rarest kind or, if
   both numbers are close, of the most frequent kind.

Source: vLLM 0.32.0, ``v1/core/kv_cache_utils.py`` (``get_kv_cache_groups``) and
``platforms/interface.py`` (``_align_hybrid_block_size``).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kvview.errors import ConfigError
from kvview_reference.sizing.model import Kind, LayerSet, ModelShape

GPU_BLOCK_SIZE = 16
"""Tokens of a block of vLLM on GPUs, unless a state or a user requires more."""

_LATENT_BLOCK_SIZE = 128
_MANY_MORE = 1.5


@dataclass(frozen=True)
class PlannedGroup:
    """One KV-cache group.

    Args:
        layers: The set to which the layers of the group belong.
        count: Number of layers of the group.
        block_size: Tokens of a block.
        page_bytes: Bytes of a block in one layer, on one rank.
    """

    layers: LayerSet
    count: int
    block_size: int
    page_bytes: int


@dataclass(frozen=True)
class CachePlan:
    """All groups of a model.

    Args:
        block_size: Number of tokens of a block of attention, before all pages are enlarged to one
            size.
        groups: The groups.
        block_bytes: Bytes of a block on one rank, in the group with the most layers.
    """

    block_size: int
    groups: tuple[PlannedGroup, ...]
    block_bytes: int

    def token_bytes(self, kind: Kind) -> Fraction:
        """Compute the bytes of a token in the blocks of a kind of layers, on one rank."""
        sizes = [group.block_size for group in self.groups if group.layers.kind == kind]
        return sum((Fraction(self.block_bytes, size) for size in sizes), Fraction(0))

    def state_bytes(self) -> int:
        """Compute the bytes of the blocks of all states, on one rank."""
        return self.block_bytes * sum(group.layers.kind == "state" for group in self.groups)


def plan_cache(
    model: ModelShape, block_size: int = GPU_BLOCK_SIZE, kernel_block_size: int = GPU_BLOCK_SIZE
) -> CachePlan:
    """Group the layers of a model as vLLM does.

    Args:
        model: The model.
        block_size: Number of tokens of a block that the engine is configured to have.
        kernel_block_size: Number of tokens; the size of every block is a multiple of it.

    Raises:
        ConfigError: vLLM cannot divide such layers into groups.
    """
    attention = [layers for layers in model.layers if layers.kind != "state"]
    states = [layers.state_bytes for layers in model.layers if layers.kind == "state"]
    if states and attention:
        block_size = _block_that_holds(max(states), attention[0], block_size, kernel_block_size)
    # A state fills a block of attention; without attention it is not padded.
    smallest = block_size * attention[0].token_bytes if states and attention else 0
    pages = [
        max(layers.state_bytes, smallest)
        if layers.kind == "state"
        else block_size * layers.token_bytes
        for layers in model.layers
    ]
    if len(model.layers) == 1 or all(layers.kind == "full" for layers in model.layers):
        group = tuple(
            PlannedGroup(layers, layers.count, block_size, page)
            for layers, page in zip(model.layers, pages, strict=True)
        )
        return CachePlan(block_size, group, sum(part.count * part.page_bytes for part in group))
    counts = [layers.count for layers in model.layers]
    size = max(counts) if max(counts) < _MANY_MORE * min(counts) else min(counts)
    groups: list[PlannedGroup] = []
    for layers, page in zip(model.layers, pages, strict=True):
        tokens = block_size * _ratio(layers, page, max(pages))
        number = -(-layers.count // size)
        sizes = [len(range(first, layers.count, number)) for first in range(number)]
        groups += [PlannedGroup(layers, count, tokens, max(pages)) for count in sizes]
    return CachePlan(block_size, tuple(groups), max(group.count for group in groups) * max(pages))


def _block_that_holds(state: int, attention: LayerSet, block_size: int, kernel: int) -> int:
    """Return the number of tokens of the smallest block of attention that can hold a state."""
    step = max(kernel, block_size, _LATENT_BLOCK_SIZE if attention.is_latent else 0)
    tokens = step * -(-state // (step * attention.token_bytes))
    return max(block_size, kernel * -(-tokens // kernel))


def _ratio(layers: LayerSet, page: int, largest: int) -> int:
    """Return the number of blocks of these layers that fit in the largest page; 1 if padded."""
    if layers.kind == "state" or page == largest:
        return 1
    ratio, rest = divmod(largest, page)
    if rest and layers.is_latent:
        raise ConfigError(
            f"model: the latent vectors of {layers.count} layers cannot share blocks with the "
            f"other layers, because their block of {page:,} bytes does not divide the largest "
            f"block of {largest:,} bytes"
        )
    return 1 if rest else ratio
