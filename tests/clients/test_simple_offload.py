"""A host cache like vLLM's own, over raw pool, view, guard and reference: one decision."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from kvview import SupportsResumableWalk

from .runs import Decisions, Run, SimpleOffloadRun, guarded, serving_over
from .serving import ReferenceEnginePool, VLLMEnginePool
from .simple_offload import RawSimpleOffload, SimpleOffload

NUM_BLOCKS = 600
LATENCY = 3


def over_reference(stores: int | None, seed: int, *, guard: bool) -> Run:
    pool = ReferenceEnginePool(NUM_BLOCKS)
    view: Any = pool.pool.view("client")
    if guard:
        view = guarded(view)
    assert isinstance(view, SupportsResumableWalk)
    client = SimpleOffload(view, 20_000, stores_per_step=stores, latency=LATENCY)
    return SimpleOffloadRun(serving_over(pool, NUM_BLOCKS, seed), client)


def over_vllm(kind: str, stores: int | None, seed: int) -> Run:
    pool = VLLMEnginePool(NUM_BLOCKS)
    options: dict[str, Any] = {"stores_per_step": stores, "latency": LATENCY}
    if kind == "raw":
        client: SimpleOffload = RawSimpleOffload(pool.pool, 20_000, **options)
    else:
        view: Any = import_module("kvview_vllm").view(pool.pool, owner="client")
        client = SimpleOffload(guarded(view) if kind == "guard" else view, 20_000, **options)
    return SimpleOffloadRun(serving_over(pool, NUM_BLOCKS, seed), client)


def decisions(run: Run, num_steps: int = 150) -> Decisions:
    run.steps(num_steps)
    assert sum(len(stored) for _, (_, stored) in run.decisions) > 300
    assert any(loads for loads, _ in run.decisions)
    return run.decisions


@pytest.mark.parametrize("stores", [None, 8, 30])
@pytest.mark.parametrize("seed", range(3))
def test_guard_and_view_decide_alike(stores: int | None, seed: int) -> None:
    bare = decisions(over_reference(stores, seed, guard=False))
    assert decisions(over_reference(stores, seed, guard=True)) == bare


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
    expected = decisions(over_reference(stores, seed, guard=False))
    assert decisions(over_vllm(kind, stores, seed)) == expected


def test_a_block_as_cursor_skips_what_stayed() -> None:
    """What POOL-13 is for: the block that the cursor stands at comes back at the tail."""
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
