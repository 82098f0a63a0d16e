"""The kinds of KV cache that the release allocates, for every backend that can be imported.

The specs are made by vLLM's own layers and backends. Sizes are small: two layers, two KV heads
and blocks of 16 tokens.

Source: ``get_kv_cache_spec`` of the layers in vllm/model_executor/layers/attention,
``customize_attention_spec`` in vllm/v1/worker/utils.py (0.33.0), and the registry of backends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from inspect import isfunction
from types import SimpleNamespace
from typing import Any

from kvview import FullAttention
from kvview_vllm.releases.compat.calls import states_take_loads
from kvview_vllm.releases.compat.probes import installed
from kvview_vllm.releases.compat.versions import vllm
from kvview_vllm.releases.cpu.runner_caches import layer_shape
from kvview_vllm.releases.cpu.worker_caches import (
    BLOCK_SIZE,
    CacheKind,
    can_allocate_states,
    layer_class_of,
    layouts,
    make_layers,
    make_states,
)

_HEAD_SIZES = (64, 32, 128, 256, 512)
_MLA_HEAD_SIZES = (576, 512)
_INDEXER_BYTES = 132  # bytes of a token: an fp8 key of 128 elements and its scale
_MEMORY = ("num_heads", "num_kv_heads", "head_size", "dtype", "state_content_size_bytes")
"""The fields of a spec that decide the memory of a layer."""
_MODEL_DTYPES = frozenset({"float16", "bfloat16"})


def cache_kinds() -> dict[CacheKind, frozenset[str]]:
    """Return the kinds, each with the memory layouts that its backends accept."""
    names: dict[Any, list[str]] = {}
    first: dict[Any, tuple[Any, Any, str]] = {}
    taken: dict[Any, set[str]] = {}
    for name, backend in _backends():
        for dtype in _dtypes(backend):
            try:
                spec = _spec(backend, dtype)
                memory = _memory_of(backend, spec, dtype)
                own = _layouts_of(backend)
            except Exception:  # the backend refuses these sizes or this machine
                continue
            first.setdefault(memory, (backend, spec, dtype))
            names.setdefault(memory, []).append(name if dtype == "auto" else f"{name} {dtype}")
            taken.setdefault(memory, set()).update(own)
    found = {
        CacheKind(_short(names[memory]), ((backend, spec),) * 2, dtype): frozenset(taken[memory])
        for memory, (backend, spec, dtype) in first.items()
    }
    if not found:  # 0.11.0 and 0.11.1 have no list of backends
        kind = replace(make_layers([FullAttention(BLOCK_SIZE)]), name="FLASH_ATTN float32")
        return {kind: frozenset(layouts())}
    return found | dict.fromkeys(_mixed_kinds(), frozenset(layouts()))


def _memory_of(backend: Any, spec: Any, dtype: str) -> Any:
    """Return the properties that decide the memory of a layer, which are equal for equal kinds.

    Raises:
        ValueError: Up to 0.28, the tensor is not of the size of the page, or has no dimension for
            tokens.
    """
    if can_allocate_states():
        return type(spec), *(getattr(spec, part) for part in _MEMORY)
    shape, _, order = layer_shape(backend, spec, dtype, 1)
    if math.prod(shape) * spec.dtype.itemsize != spec.page_size_bytes:
        raise ValueError(f"{shape} does not fill a page of {spec.page_size_bytes} bytes")
    return type(spec), spec.dtype, shape, order


def _layouts_of(backend: Any) -> list[str]:
    """Return the names of the memory layouts that a backend accepts."""
    if hasattr(backend, "supported_kv_cache_layouts"):
        own = backend.supported_kv_cache_layouts()
        return [*layouts()] if own is None else [layout.name for layout in own]
    required = backend.get_required_kv_cache_layout()
    return [required] if required else [*layouts()]


def _short(names: list[str]) -> str:
    backend = names[0].split()[0]
    others = [name for name in names if name.split()[0] != backend]
    return f"{names[0]}, {others[0]} and similar" if others else names[0]


def _backends() -> Iterator[tuple[str, Any]]:
    for member in _registry():
        try:
            yield member.name, member.get_class()
        except Exception:  # needs a GPU or a package
            continue


def _registry() -> Iterable[Any]:
    """Return the list of backends; empty in 0.11.0 and 0.11.1, which have none."""
    for module in ("v1.attention.backends.registry", "attention.backends.registry"):
        try:
            found: Iterable[Any] = vllm(module).AttentionBackendEnum
        except (AttributeError, ImportError):
            continue
        return found
    return ()


def _dtypes(backend: Any) -> list[str]:
    """Return the cache dtypes of a backend; ``auto`` stands for the dtypes of models."""
    names = list(backend.supported_kv_cache_dtypes)
    return [name for name in names if name not in _MODEL_DTYPES or "auto" not in names]


def _spec(
    backend: Any, dtype: str, *, head_size: int | None = None, window: int | None = None
) -> Any:
    """Return the spec of a layer: the layer makes the spec, and the backend then changes it."""
    is_mla = backend.is_mla()
    torch_utils = vllm("utils.torch_utils")
    model = SimpleNamespace(dtype=torch_utils.torch.bfloat16, use_mla=is_mla)
    sizes = _MLA_HEAD_SIZES if is_mla else _HEAD_SIZES
    size = head_size or next(one for one in sizes if backend.supports_head_size(one))
    layer_class = layer_class_of(is_mla)
    layer = _Layer(
        layer_class,
        attn_backend=backend,
        attn_type="decoder",
        head_size=size,
        head_size_v=size,
        num_kv_heads=2,
        kv_cache_dtype=dtype,
        kv_cache_torch_dtype=torch_utils.kv_cache_dtype_str_to_dtype(dtype, model),
        sliding_window=window,
    )
    cache = SimpleNamespace(block_size=BLOCK_SIZE, cache_dtype=dtype, skip_page_size_padded=None)
    config = SimpleNamespace(cache_config=cache, model_config=model)
    spec = layer_class.get_kv_cache_spec(layer, config)
    customize = getattr(vllm("v1.worker.utils"), "customize_attention_spec", None)
    if customize is None:
        return getattr(backend, "customize_spec", lambda own: own)(spec)
    # Alignments are for larger blocks than these.
    return replace(customize(backend, spec), block_stride_alignment=None)


class _Layer:
    """A layer with the methods of vLLM's class and no weights; missing attributes are None."""

    def __init__(self, layer_class: type, **values: Any) -> None:
        self.__dict__.update(values, layer_class=layer_class)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.layer_class, name, None)
        return method.__get__(self) if isfunction(method) else None


def _mixed_kinds() -> Iterator[CacheKind]:
    """Make the kinds in which layers differ from each other, and Mamba states."""
    flash = vllm("v1.attention.backends.flash_attn").FlashAttentionBackend
    full = _spec(flash, "auto")
    window = _spec(flash, "auto", window=2 * BLOCK_SIZE)
    yield _kind("full attention and a window", flash, full, window)
    if can_allocate_states():
        yield from _kinds_with_sizes(flash, full, window)
    if installed().geometry.mamba_cache_modes and states_take_loads():
        mamba, states = make_states(BLOCK_SIZE, full.page_size_bytes)
        yield CacheKind("Mamba states and full attention", ((flash, full), (mamba, states)))
        unpadded = replace(states, page_size_padded=None)
        yield CacheKind("Mamba states without padding", ((flash, full), (mamba, unpadded)))
        yield CacheKind("Mamba states alone", ((mamba, unpadded), (mamba, unpadded)))


def _kinds_with_sizes(flash: Any, full: Any, window: Any) -> Iterator[CacheKind]:
    """Make the kinds whose layers of attention have several sizes, from 0.29 on."""
    import torch

    small = replace(_spec(flash, "fp8", window=4 * BLOCK_SIZE), block_size=BLOCK_SIZE)
    yield _kind("block sizes that differ by group", flash, full, small)
    odd = replace(window, head_size=48, head_size_v=48)
    yield _kind("pages with padding", flash, full, odd)
    yield _kind("two head sizes in one group", flash, full, _spec(flash, "auto", head_size=32))
    yield _kind("quantised and other layers", flash, full, _spec(flash, "fp8"))
    mla = vllm("v1.attention.backends.mla.flashmla_sparse").FlashMLASparseBackend
    latent = _spec(mla, "auto")
    indexer = replace(latent, head_size=_INDEXER_BYTES, dtype=torch.uint8)
    yield _kind("MLA with an indexer", mla, latent, indexer)
    compressed = replace(latent, tokens_per_state=4)
    yield _kind("MLA with four tokens a state", mla, compressed, compressed)


def _kind(name: str, backend: Any, *specs: Any) -> CacheKind:
    return CacheKind(name, tuple((backend, spec) for spec in specs))
