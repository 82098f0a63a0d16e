"""The reference engine without a connector: sizes, its end, and the bytes that it verifies.

The kit plays everything else on it: late and failed transfers, aborts, reused ids, preemptions,
resets and steps in flight, with its invariants after every event.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from kvview import (
    CacheGeometry,
    CacheGroup,
    ChunkedLocalAttention,
    ConfigError,
    Connector,
    ConnectorError,
    FullAttention,
    Mamba,
    SlidingWindow,
    ViewClosedError,
)
from kvview_reference.engine import Engine
from kvview_reference.engine.request import Request, Status, chain_hashes

FULL = CacheGeometry.single(4)


def build(
    connector: Connector | None,
    geometry: CacheGeometry = FULL,
    num_gpu_blocks: int = 60,
    **options: Any,
) -> Engine:
    return Engine(
        geometry, connector, num_gpu_blocks=num_gpu_blocks, **{"page_bytes": 16, **options}
    )


def prompt(
    name: str, head: int, num_tokens: int, num_output: int = 5, geometry: CacheGeometry = FULL
) -> Request:
    size = geometry.hash_block_size
    hashes = chain_hashes(f"{head}.{i}" for i in range(num_tokens // size))
    return Request(name, num_tokens, num_output, size, hashes)


def drain(engine: Engine, max_steps: int = 5000) -> None:
    for _ in range(max_steps):
        if not engine.has_work():
            return
        engine.step()
    pytest.fail(f"still at work after {max_steps} steps: {engine.stats}")


def in_use(engine: Engine) -> int:
    return engine.kv_cache.pool.num_blocks - 1 - engine.kv_cache.pool.num_free_blocks()


def run(engine: Engine, *requests: Request) -> None:
    for request in requests:
        engine.add_request(request)
        assert engine.has_unfinished_requests()
    drain(engine)
    assert not engine.has_unfinished_requests()
    for request in requests:
        if request.status is not Status.ABORTED:
            assert request.status is Status.FINISHED
            assert request.num_generated_tokens == request.num_output_tokens


def end(engine: Engine) -> None:
    """Nothing is held, and no byte was wrong."""
    assert in_use(engine) == 0
    assert engine.stats.mismatches == 0
    assert engine.shutdown() == {}
    assert engine.shutdown() == {}


# --- sizes ---


def test_conn4_a_request_that_is_preempted_for_ever_is_not_a_hang() -> None:
    """Three blocks are left: a prefix too short to be a hit is computed again and again."""
    engine = build(None, CacheGeometry(16, 4, (FullAttention(4),)), max_tokens_per_step=8)
    engine.view.touch_blocks(range(1, 57))
    with pytest.raises(ConnectorError, match=r"preempted 1000 times: .* holds 56 of 59 blocks"):
        run(engine, prompt("a", 0, 33, 2))


def test_a_request_that_can_never_fit_is_refused() -> None:
    engine = build(None, num_gpu_blocks=10)
    with pytest.raises(ConfigError, match=r"'big' needs 10 GPU blocks at once for 37 tokens"):
        engine.add_request(prompt("big", 0, 32, 5))
    assert not engine.has_work()
    run(engine, prompt("fits", 0, 32, 4))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 30)), min_size=1),
    st.integers(5, 40),
    st.integers(1, 60),
    st.integers(0, 30),
    st.integers(1, 20),
    st.integers(1, 9),
)
@example([(0, 1, 1), (2, 1, 30)], 41, 31, 0, 1, 1)  # a chunk is longest before the prompt ends
def test_an_accepted_request_finishes_without_preemption(
    mix: list[tuple[int, int, int]], blocks: int, num: int, out: int, budget: int, decode: int
) -> None:
    kinds: list[Callable[[int, int], CacheGroup]] = [
        lambda size, span: FullAttention(size),
        SlidingWindow,
        ChunkedLocalAttention,
        lambda size, span: Mamba(size),
    ]
    groups = tuple(kinds[kind](size, span) for kind, size, span in mix)
    geometry = CacheGeometry(math.lcm(*(group.block_size for group in groups)), 1, groups)
    engine = build(None, geometry, blocks, max_tokens_per_step=budget, decode_tokens=decode)
    request = prompt("a", 0, num, out, geometry)
    every_block = sum(-(-(num + out) // group.block_size) for group in groups)
    try:
        engine.add_request(request)
    except ConfigError:
        assert every_block > blocks - 1
        return
    drain(engine, 500)
    assert request.status is Status.FINISHED
    assert engine.stats.preemptions == 0
    end(engine)


# --- its end ---


def test_pool10_shutdown_closes_the_view_and_returns_the_holds() -> None:
    engine = build(None)
    engine.view.touch_blocks([3, 3, 4])
    assert engine.shutdown() == {3: 2, 4: 1}
    with pytest.raises(ViewClosedError):
        engine.view.touch_blocks([3])


def test_a_stale_block_on_the_gpu_is_detected() -> None:
    engine = build(None)
    run(engine, prompt("a", 0, 20))
    engine.kv_bytes.poison([2])
    run(engine, prompt("b", 0, 20))
    assert engine.stats.mismatches == 1
