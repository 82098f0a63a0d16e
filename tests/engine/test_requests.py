"""Requests of the engine: the content and the counts that a connector receives."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvview import (
    BlockIds,
    CacheGeometry,
    ConnectorConfig,
    FinishReason,
    FullAttention,
    Mamba,
    RequestContent,
    RequestInfo,
    SlidingWindow,
    StepInfo,
    StepPlan,
    full_blocks,
)
from kvview_reference.engine import Engine, Request, Status, chain_hashes
from kvview_reference.store_connector.scheduler import StoreScheduler
from tests.connector.halves import WithHalves

SIZE = 4
GEOMETRIES = {
    "one": CacheGeometry.single(SIZE),
    "window": CacheGeometry(4, 4, (FullAttention(4), SlidingWindow(4, 10))),
    "mixed": CacheGeometry(24, 2, (FullAttention(4), SlidingWindow(6, 9), Mamba(12))),
}


def make(ids: Sequence[object], more: int = 0, output: int = 0, name: str = "a") -> Request:
    """A prompt with a block for each id, and some tokens more."""
    num_tokens = len(ids) * SIZE + more
    return Request(name, num_tokens, output, SIZE, chain_hashes(ids))


# --- counts ---


class WatchingScheduler(StoreScheduler):
    """Checks the request of every call against the engine's bytes."""

    engine: Engine

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: set[str] = set()
        self.contents: dict[str, RequestContent] = {}
        self.num_prompt_tokens: dict[str, int] = {}

    def check(self, hook: str, request: RequestInfo, block_ids: BlockIds) -> None:
        self.calls.add(hook)
        content = self.contents.setdefault(request.request_id, request.content)
        assert request.content is content, "a request has one content object"
        assert len(content.token_ids) >= request.num_tokens
        if any(block_ids):
            stored = list(full_blocks(self._geometry, request, block_ids))
            ids, keys = [b.block_id for b in stored], [b.key for b in stored]
            loading = self.engine._loads.get(request.request_id)
            limit = loading.num_gpu_tokens if loading else request.num_computed_tokens
            assert request.num_computed_tokens == limit, "blocks in a load do not count"
            assert not ids or self.engine.kv_bytes.count_mismatches(ids, keys) == 0
        else:
            assert request.num_computed_tokens == 0

    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int | None:
        assert request.num_computed_tokens == num_computed_tokens
        assert self.contents.setdefault(request.request_id, request.content) is request.content
        return super().match_prefix(request, num_computed_tokens)

    def on_blocks_allocated(
        self,
        request: RequestInfo,
        block_ids: BlockIds,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        assert request.num_computed_tokens == num_computed_tokens
        self.check("loading" if num_external_tokens else "allocated", request, block_ids)
        super().on_blocks_allocated(request, block_ids, num_computed_tokens, num_external_tokens)

    def plan_step(self, step: StepInfo) -> StepPlan:
        for scheduled in step.scheduled:
            assert scheduled.num_computed_tokens == scheduled.request.num_computed_tokens
            self.check("scheduled", scheduled.request, scheduled.block_ids)
        return super().plan_step(step)

    def on_request_preempted(self, request: RequestInfo, block_ids: BlockIds) -> None:
        self.check("preempted", request, block_ids)
        super().on_request_preempted(request, block_ids)

    def on_request_finished(
        self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
    ) -> None:
        self.check(reason.name, request, block_ids)
        self.contents.pop(request.request_id, None)  # the id may be reused
        if reason is FinishReason.FINISHED:
            # All tokens but the last sampled one are computed.
            has_output = request.num_tokens > self.num_prompt_tokens[request.request_id]
            assert request.num_computed_tokens == request.num_tokens - has_output


class Watching(WithHalves):
    scheduler = WatchingScheduler


@pytest.mark.parametrize("decode_tokens", [1, 5])
@pytest.mark.parametrize("name", sorted(GEOMETRIES))
def test_every_call_has_the_number_of_computed_tokens(name: str, decode_tokens: int) -> None:
    geometry, random = GEOMETRIES[name], Random(7)
    engine = Engine(
        geometry,
        Watching(ConnectorConfig(geometry, {"cpu_blocks": 300, "mode": "eager"})),
        num_gpu_blocks={"one": 22, "window": 32, "mixed": 34}[name],
        page_bytes=16,
        max_running=4,
        max_tokens_per_step=24,
        decode_tokens=decode_tokens,
    )
    half = engine.scheduler_connector
    assert isinstance(half, WatchingScheduler)
    half.engine = engine
    alive: list[Request] = []
    size = geometry.hash_block_size
    for number in range(120):
        num_tokens = random.randint(1, 55)
        hashes = chain_hashes(
            f"{number % 3}/{i}" if i < 12 else f"{number}/{i}" for i in range(num_tokens // size)
        )
        request = Request(f"r{number}", num_tokens, random.choice([0, 1, 4, 9, 20]), size, hashes)
        half.num_prompt_tokens[request.request_id] = num_tokens
        engine.add_request(request)
        alive.append(request)
        for _ in range(random.randint(1, 8)):
            engine.step()
        if random.random() < 0.4:
            loading = [r for r in alive if r.status is Status.LOADING]
            unfinished = [r for r in alive if r.status not in {Status.FINISHED, Status.ABORTED}]
            for victim in (loading or unfinished)[:1]:
                engine.abort(victim.request_id)
    while engine.has_work():
        engine.step()
    assert engine.stats.loaded_blocks > 0
    assert engine.stats.mismatches == 0
    hooks = {"allocated", "loading", "scheduled", "preempted", "FINISHED", "ABORTED"}
    assert half.calls == hooks
    assert engine.shutdown() == {}


# --- content ---


IDS = st.lists(st.integers(0, 2), max_size=6)


@settings(max_examples=200)
@given(IDS, IDS, st.integers(0, 3), st.integers(0, 3))
def test_tokens_are_equal_exactly_as_far_as_the_hashes(
    one: list[int], other: list[int], more: int, output: int
) -> None:
    first, second = make([9, *one], more, output), make([9, *other], more, output)
    first.generate(output)
    second.generate(output)
    num_equal = sum(a == b for a, b in zip(first.block_hashes, second.block_hashes, strict=False))
    a, b = list(first.content.token_ids), list(second.content.token_ids)
    assert len(a) == first.num_tokens
    assert a[: num_equal * SIZE] == b[: num_equal * SIZE]
    for start in range(num_equal * SIZE, min(len(a), len(b)), SIZE):
        assert a[start : start + SIZE] != b[start : start + SIZE]


def test_tokens_grow_and_never_change() -> None:
    request = make(range(3), 2, 40)
    tokens = request.content.token_ids
    seen: list[int] = []
    for _ in range(40):
        assert list(tokens)[: len(seen)] == seen
        seen = list(tokens)
        request.generate(1)
        assert request.content.token_ids is tokens
    assert len(tokens) == request.num_tokens == 54
    assert tokens[-1] == list(tokens)[53]
    assert tokens[4:9] == list(tokens)[4:9]
    assert all(0 <= token < 2**31 for token in tokens)
    with pytest.raises(IndexError):
        tokens[54]
    assert list(pickle.loads(pickle.dumps(request.content)).token_ids) == list(tokens)


@settings(max_examples=200)
@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 9))
def test_the_next_turn_starts_with_all_tokens_of_the_last(more: int, output: int, new: int) -> None:
    first = make(range(2), more % SIZE, output)
    first.generate(output)
    turn = first.next_turn("b", new, 3, (f"new {i}" for i in range(9)))
    other = first.next_turn("c", new, 3, (f"new {i}" for i in range(9)))
    assert turn.num_prompt_tokens == first.num_tokens + new
    assert turn.content.token_ids[: first.num_tokens] == list(first.content.token_ids)
    assert turn.block_hashes[: len(first.block_hashes)] == first.block_hashes
    assert turn.block_hashes == other.block_hashes
    before = list(first.content.token_ids)
    turn.generate(3)
    assert list(first.content.token_ids) == before


@pytest.mark.parametrize(
    ("num_tokens", "num_output", "num_hashes", "message"),
    [
        (0, 1, 0, "0 prompt tokens"),
        (4, -1, 1, "-1 output tokens"),
        (11, 1, 3, "3 block hashes, but its tokens fill 2 blocks"),
    ],
)
def test_key1_impossible_counts_are_refused(
    num_tokens: int, num_output: int, num_hashes: int, message: str
) -> None:
    with pytest.raises(ValueError, match=rf"^KEY-1: request 'a' has .*{message}"):
        Request("a", num_tokens, num_output, SIZE, chain_hashes(range(num_hashes)))
