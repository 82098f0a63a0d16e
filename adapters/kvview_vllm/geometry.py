"""The geometry of a real vLLM engine, read from its configuration.

- VGEO-1 Block sizes **must** be those that vLLM resolved. If a release has a function for this
  (0.20.0 and later), that function is called.
- VGEO-2 A group that a :class:`~kvview.CacheGeometry` cannot express is refused
  with :class:`~kvview.UnsupportedEngineError`, never approximated.

Source: ``resolve_kv_cache_block_sizes``, vllm/v1/core/kv_cache_utils.py, and the
specs of vllm/v1/kv_cache_interface.py, 0.11.0 to 0.33.0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvview import (
    CacheGeometry,
    CacheGroup,
    ChunkedLocalAttention,
    EngineFacts,
    FullAttention,
    GeometryError,
    Mamba,
    SlidingWindow,
    UnsupportedEngineError,
)
from kvview_vllm.releases import GeometrySeam, installed
from kvview_vllm.releases.compat.calls import context_parallel_sizes
from kvview_vllm.releases.compat.versions import vllm

# By exact type, because a subclass may skip other tokens than its base (like RSWASpec).
_FULL = ("FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec", "TQFullAttentionSpec")
_WINDOW = ("SlidingWindowSpec", "SlidingWindowMLASpec")
_CHUNKED = ("ChunkedLocalAttentionSpec",)
_MAMBA = ("MambaSpec",)
_UNIFORM = "UniformTypeKVCacheSpecs"
_KNOWN = (*_FULL, *_WINDOW, *_CHUNKED, *_MAMBA, _UNIFORM)


def read_geometry(vllm_config: Any, kv_cache_config: Any | None) -> CacheGeometry:
    """Read the block sizes and groups of the engine.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        kv_cache_config: vLLM's ``KVCacheConfig``; None in 0.11.0, which has one full-attention
            group whenever a connector is used.

    Raises:
        UnsupportedEngineError: A :class:`~kvview.CacheGeometry` cannot express a group or a
            setting.
        GeometryError: The block sizes contradict each other (GEO-2).
    """
    release = installed().geometry
    for name, size in context_parallel_sizes(vllm_config.parallel_config, release).items():
        if size != 1:
            raise UnsupportedEngineError(
                f"{name}={size} spreads the tokens of a block over several workers, which a "
                f"CacheGeometry cannot express; use 1"
            )
    block_size = vllm_config.cache_config.block_size
    if kv_cache_config is None:
        return CacheGeometry.single(block_size)
    groups = tuple(
        _group(index, group.kv_cache_spec, release)
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
    )
    scheduler_block_size, hash_block_size = _block_sizes(
        vllm_config, kv_cache_config, groups, release
    )
    sizes = [group.block_size for group in groups]
    if {*sizes} != {hash_block_size} and not release.named_by_last_hash:
        raise GeometryError(
            f"GEO-2: block sizes {sizes} over hash_block_size {hash_block_size} are not "
            f"supported, because this vLLM names a larger block by all its hashes instead of the "
            f"last one; use one block size for all groups or a newer vLLM"
        )
    return CacheGeometry(scheduler_block_size, hash_block_size, groups)


def read_facts(
    vllm_config: Any, kv_cache_config: Any | None, geometry: CacheGeometry, num_gpu_blocks: int
) -> EngineFacts:
    """Read the facts of the started engine.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        kv_cache_config: vLLM's ``KVCacheConfig``; without it (0.11.0) the page sizes are computed
            from the model's configuration.
        geometry: Result of :func:`read_geometry`.
        num_gpu_blocks: Number of blocks of the pool, including the null block.
    """
    scheduler = vllm_config.scheduler_config
    if kv_cache_config is None:
        page_bytes: tuple[int, ...] = (_page_bytes_of_model(vllm_config),)
    else:
        page_bytes = tuple(
            # The page size of uniform specs already includes all layers.
            group.kv_cache_spec.page_size_bytes
            * (1 if type(group.kv_cache_spec).__name__ == _UNIFORM else len(group.layer_names))
            for group in kv_cache_config.kv_cache_groups
        )
    return EngineFacts(
        num_gpu_blocks=num_gpu_blocks,
        page_bytes=page_bytes,
        max_blocks_per_step=sum(
            scheduler.max_num_batched_tokens // group.block_size + scheduler.max_num_seqs
            for group in geometry.groups
        ),
    )


def _group(index: int, spec: Any, release: GeometrySeam) -> CacheGroup:
    name = type(spec).__name__
    if name == _UNIFORM:
        groups = {_group(index, inner, release) for inner in spec.kv_cache_specs.values()}
        if len(groups) == 1:
            return groups.pop()
    elif name in _FULL:
        return FullAttention(spec.block_size)
    elif name in _WINDOW:
        # 0.30 keeps some blocks longer for speculative decoding, like a wider window.
        retained = spec.extra_retained_tokens if release.retained_tokens else 0
        return SlidingWindow(spec.block_size, spec.sliding_window + retained)
    elif name in _CHUNKED:
        return ChunkedLocalAttention(spec.block_size, spec.attention_chunk_size)
    elif name in _MAMBA and _has_cached_states(spec, release):
        return Mamba(spec.block_size)
    raise UnsupportedEngineError(
        f"KV-cache group {index} has a {spec!r}, which a CacheGeometry cannot express; known: "
        f"{', '.join(_KNOWN)} (Mamba with cached states and without speculative blocks)"
    )


def _has_cached_states(spec: Any, release: GeometrySeam) -> bool:
    cached = release.mamba_cache_modes and spec.mamba_cache_mode != "none"
    return cached and not spec.num_speculative_blocks


def _block_sizes(
    vllm_config: Any, kv_cache_config: Any, groups: Sequence[CacheGroup], release: GeometrySeam
) -> tuple[int, int]:
    if release.block_sizes_resolved:
        resolve = vllm("v1.core.kv_cache_utils").resolve_kv_cache_block_sizes
        scheduler_block_size, hash_block_size = resolve(kv_cache_config, vllm_config)
        return scheduler_block_size, hash_block_size
    # In older releases requests are hashed by the configured block size, and only the hybrid
    # coordinator has the alignment of hits.
    hash_block_size = vllm_config.cache_config.block_size
    return math.lcm(*(group.block_size for group in groups)), hash_block_size


def _page_bytes_of_model(vllm_config: Any) -> int:
    import torch

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    cache = vllm_config.cache_config
    dtype = model.dtype if cache.cache_dtype == "auto" else torch.int8  # fp8 is one byte too
    tokens = cache.block_size * model.get_num_layers(parallel)
    heads = model.get_num_kv_heads(parallel) * (1 if model.use_mla else 2)
    size: int = tokens * heads * model.get_head_size() * dtype.itemsize
    return size
