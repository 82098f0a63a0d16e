"""The geometry that the adapter reads from a release's KV-cache configuration."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from kvview import FullAttention, SlidingWindow, UnsupportedEngineError
from kvview_vllm.geometry import read_geometry
from kvview_vllm.releases import installed
from kvview_vllm.simulation.kvview.kvview_engine import Configs


def test_vgeo_1_block_sizes_are_those_of_vllm() -> None:
    configs = Configs([FullAttention(16), SlidingWindow(16, 40)])
    sizes = configs.geometry.scheduler_block_size, configs.geometry.hash_block_size
    if installed().geometry.block_sizes_resolved:
        utils: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
        assert sizes == tuple(utils.resolve_kv_cache_block_sizes(configs.kv_cache, configs.vllm))
    else:
        assert sizes == (16, 16)


def test_vgeo_2_a_group_of_unknown_attention_is_refused() -> None:
    configs = Configs([FullAttention(16)])

    class CrossAttentionSpec:
        block_size = 16

    configs.kv_cache.kv_cache_groups[0].kv_cache_spec = CrossAttentionSpec()
    with pytest.raises(UnsupportedEngineError, match=r"KV-cache group 0 has a .*known: "):
        read_geometry(configs.vllm, configs.kv_cache)
