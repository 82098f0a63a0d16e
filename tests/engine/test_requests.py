"""Requests of the engine: the content and the counts that a connector receives."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest
from hypothesis import given, settings, strategies as st

from kvview import BlockIds, RequestInfo, StepInfo, StepPlan
from kvview.testing.connector import check_connector
from kvview_reference.engine import Request, chain_hashes
from kvview_reference.store_connector.planning.store_scheduler import StoreScheduler
from tests.connector.halves import WithHalves

SIZE = 4


def make(ids: Sequence[object], more: int = 0, output: int = 0, name: str = "a") -> Request:
    """A prompt with a block for each id, and some tokens more."""
    num_tokens = len(ids) * SIZE + more
    return Request(name, num_tokens, output, SIZE, chain_hashes(ids))


# --- counts ---


class CountingScheduler(StoreScheduler):
    """Compares the number of computed tokens of each request with that of its call."""

    def on_blocks_allocated(
        self,
        request: RequestInfo,
        block_ids: BlockIds,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        assert request.num_computed_tokens == num_computed_tokens, "blocks in a load do not count"
        super().on_blocks_allocated(request, block_ids, num_computed_tokens, num_external_tokens)

    def plan_step(self, step: StepInfo) -> StepPlan:
        for scheduled in step.scheduled:
            assert scheduled.num_computed_tokens == scheduled.request.num_computed_tokens
        return super().plan_step(step)


class Counting(WithHalves):
    scheduler = CountingScheduler


def test_every_call_has_the_number_of_computed_tokens() -> None:
    report = check_connector(Counting, seeds=4, first_seed=15)
    assert not report.failures, report.failures[0]
    assert report.coverage["loads"] > 0


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
