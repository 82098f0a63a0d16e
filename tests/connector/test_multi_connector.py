"""Several connectors seen as one, as far as the scenarios with two connectors do not show it.

``two.txt`` of the mutants has their injected faults.
"""

from __future__ import annotations

import pytest

from kvview import (
    BlockIds,
    BlockNotHeldError,
    CacheGeometry,
    ConnectorError,
    GPUBlockPoolView,
    GuardedView,
    RequestInfo,
    SchedulerConnector,
    TransferResult,
    WorkerConnector,
)
from kvview_reference.connector import MultiScheduler, MultiWorker
from kvview_reference.engine.request import chain_hashes
from kvview_reference.pool import BlockPool

FULL = CacheGeometry.single(4)
REQUEST = RequestInfo("a", 33, chain_hashes(range(8)))


class Holder(SchedulerConnector):
    """Keeps its view, for the test to use."""

    def bind_gpu_block_pool_view(self, view: GPUBlockPoolView) -> None:
        assert isinstance(view, GuardedView)
        self.view = view


def test_a_child_cannot_release_blocks_of_another() -> None:
    pool_view = GuardedView(BlockPool(8).view("engine"))
    one, other = Holder(), Holder()
    MultiScheduler([one, other]).bind_gpu_block_pool_view(pool_view)
    one.view.touch_blocks([3])
    with pytest.raises(BlockNotHeldError, match="'1: Holder' frees block 3 1x and holds it 0x"):
        other.view.free_blocks([3])
    assert pool_view.held_blocks() == {3: 1}
    one.view.free_blocks([3])
    assert pool_view.held_blocks() == {}


class Worker(WorkerConnector):
    def get_finished(self) -> list[TransferResult]:
        return [TransferResult(7, True)]


def test_conn3_a_child_that_reports_an_unknown_job_is_named() -> None:
    with pytest.raises(ConnectorError, match="Worker reported its job 7, which is not in flight"):
        MultiWorker([WorkerConnector(), Worker()]).get_finished()


# --- promises ---


class Promises(SchedulerConnector):
    def __init__(self, num_tokens: int | None) -> None:
        self.num_tokens = num_tokens
        self.external: list[int] = []

    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int | None:
        return self.num_tokens

    def on_blocks_allocated(
        self,
        request: RequestInfo,
        block_ids: BlockIds,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        self.external.append(num_external_tokens)


@pytest.mark.parametrize(
    ("promises", "promised", "chosen"),
    [([0, 8, 16], 8, 1), ([0, 0], 0, None), ([16, 8], 16, 0), ([0, None, 8], None, None)],
)
def test_the_first_child_that_promises_loads(
    promises: list[int | None], promised: int | None, chosen: int | None
) -> None:
    children = [Promises(num_tokens) for num_tokens in promises]
    scheduler = MultiScheduler(children)
    assert scheduler.match_prefix(REQUEST, 0) == promised
    if promised is not None:
        scheduler.on_blocks_allocated(REQUEST, ([1, 2],), 0, promised)
        expected = [[promised if index == chosen else 0] for index in range(len(children))]
        assert [child.external for child in children] == expected


# --- resets ---


class Answers(SchedulerConnector):
    def __init__(self, answer: bool) -> None:
        self.answer = answer
        self.was_asked = False

    def reset_cache(self) -> bool:
        self.was_asked = True
        return self.answer


@pytest.mark.parametrize("answers", [[True, True], [False, True], [True, False]])
def test_reset_asks_every_child(answers: list[bool]) -> None:
    children = [Answers(answer) for answer in answers]
    assert MultiScheduler(children).reset_cache() == all(answers)
    assert all(child.was_asked for child in children)
