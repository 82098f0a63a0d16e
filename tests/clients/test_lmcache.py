"""LMCache's own lazy-offload manager, over raw pool, view, guard and reference."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

import pytest

from .runs import LMCacheRun, guarded
from .serving import ReferenceEnginePool, Request, Serving, VLLMEnginePool

with warnings.catch_warnings():  # imports of vLLM and LMCache warn
    warnings.simplefilter("ignore")
    try:
        shim = import_module(".lmcache_shim", __package__)
        metadata: Any = import_module("lmcache.integration.vllm.lmcache_mp_metadata")
        VLLMEnginePool(4)
    except (ImportError, TypeError) as error:
        pytest.skip(
            f"needs LMCache beside a vLLM release ({error}): pip install --no-deps "
            f"-r tests/vllm/requirements-clients.txt, and tests/vllm/sources.py for vLLM",
            allow_module_level=True,
        )

NUM_BLOCKS = 600


def store(request: Request, start: int, end: int) -> Any:
    op = metadata.LoadStoreOp(
        token_ids=[], block_ids=[request.block_ids[start:end]], start=start * 16, end=end * 16
    )
    return metadata.LMCacheMPRequestMetadata(request.request_id, "STORE", op)


def run(pool: str, client: str, seed: int) -> LMCacheRun:
    engine_pool = VLLMEnginePool(NUM_BLOCKS) if pool == "vllm" else ReferenceEnginePool(NUM_BLOCKS)
    gpu_pool: Any = engine_pool.pool
    if client != "raw":
        view = import_module("kvview_vllm").view(gpu_pool) if pool == "vllm" else gpu_pool.view()
        gpu_pool = shim.PoolShim(guarded(view) if client == "guard" else view)
    manager = shim.make_manager(gpu_pool)
    return LMCacheRun(Serving(engine_pool, seed), manager, store, chunk=4)


@pytest.mark.parametrize("seed", range(2))
def test_every_pool_gets_the_same_stores(seed: int) -> None:
    raw = run("vllm", "raw", seed)
    raw.steps(150)
    assert raw.num_stored > 30
    for pool in ("vllm", "reference"):
        for client in ("view", "guard"):
            other = run(pool, client, seed)
            other.steps(150)
            assert other.decisions == raw.decisions, (pool, client)
