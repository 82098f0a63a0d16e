"""A host cache like vLLM's own decides alike over raw pool, view, guard and reference."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from .runs import Decisions, Run, SimpleOffloadRun, guarded, serving_over
from .serving import ReferenceEnginePool, VLLMEnginePool
from .simple_offload import RawSimpleOffload, SimpleOffload

NUM_BLOCKS = 600
LATENCY = 3


def run_over(kind: str, stores: int | None, seed: int) -> Run:
    """Make a run over ``raw``, ``view``, ``guard`` (of vLLM), ``reference`` or its guard."""
    make = ReferenceEnginePool if "reference" in kind else VLLMEnginePool
    pool: Any = make(NUM_BLOCKS)
    view: Any = pool.pool
    if "reference" in kind:
        view = view.view("client")
    elif kind != "raw":
        view = import_module("kvview_vllm").view(view, owner="client")
    if "guard" in kind:
        view = guarded(view)
    client = RawSimpleOffload if kind == "raw" else SimpleOffload
    made = client(view, 20_000, stores_per_step=stores, latency=LATENCY)
    return SimpleOffloadRun(serving_over(pool, NUM_BLOCKS, seed), made)


def decisions(run: Run, num_steps: int = 150) -> Decisions:
    run.steps(num_steps)
    assert sum(len(stored) for _, (_, stored) in run.decisions) > 300
    assert any(loads for loads, _ in run.decisions)
    return run.decisions


@pytest.mark.parametrize("stores", [None, 8, 30])
@pytest.mark.parametrize("seed", range(3))
def test_guard_and_view_decide_alike(stores: int | None, seed: int) -> None:
    bare = decisions(run_over("reference", stores, seed))
    assert decisions(run_over("guarded reference", stores, seed)) == bare


@pytest.mark.parametrize("kind", ["raw", "view", "guard"])
@pytest.mark.parametrize("stores", [None, 8, 30])
@pytest.mark.parametrize("seed", range(3))
def test_real_pool_and_reference_decide_alike(kind: str, stores: int | None, seed: int) -> None:
    block_pool = pytest.importorskip(
        "vllm.v1.core.block_pool", reason="needs a vLLM release", exc_type=ImportError
    )
    queue = block_pool.BlockPool(4, True, 16).free_block_queue
    if not hasattr(queue, "iter_blocks_after"):
        pytest.skip("this release has no cursor, and an order of its own")
    expected = decisions(run_over("reference", stores, seed))
    assert decisions(run_over(kind, stores, seed)) == expected


def test_a_walk_finds_blocks_that_a_block_as_cursor_skips() -> None:
    """POOL-13: the block of the cursor returns to the tail of the queue."""
    pytest.importorskip(
        "vllm.v1.core.block_pool", reason="needs a vLLM release", exc_type=ImportError
    )
    stored = {}
    for kind in ("raw", "view"):
        pool = VLLMEnginePool(20)
        if not hasattr(pool.pool.free_block_queue, "iter_blocks_after"):
            pytest.skip("this release has no cursor")
        blocks = pool.allocate(12)
        pool.cache(blocks, [bytes([block]) * 32 for block in blocks])
        pool.free(blocks)
        options: dict[str, Any] = {"stores_per_step": 4, "latency": 1}
        if kind == "raw":
            client: SimpleOffload = RawSimpleOffload(pool.pool, 64, **options)
        else:
            view = import_module("kvview_vllm").view(pool.pool)
            client = SimpleOffload(view, 64, **options)
        stored[kind] = [block for _ in range(6) for block in client.plan({})[1]]
    assert stored["view"] == list(range(1, 13))
    assert stored["raw"] == list(range(1, 5))  # and 5 to 12 are evicted unstored
