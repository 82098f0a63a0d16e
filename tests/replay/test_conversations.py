"""The turns of conversations in a replay: their prompts, and their order."""

from __future__ import annotations

import pytest

from kvview import ConfigError, ConnectorError, WorkerConnector
from kvview_reference.engine.request import Request, Status
from kvview_reference.replay.conversations import Conversations, TurnQueue
from kvview_reference.replay.run import ReplayConfig, replay
from kvview_reference.replay.workload import generate_trace
from kvview_reference.store_connector import StoreConnector
from kvview_reference.traces.trace import TraceRequest

SIZE = 4


def row(
    name: str, prompt: int, output: int, ids: str, continues: str | None = None
) -> TraceRequest:
    numbers = tuple(map(ord, ids))
    return TraceRequest(name, 0.0, prompt, output, numbers, 1, continues)


def end(request: Request) -> Request:
    request.generate(request.num_output_tokens)
    request.status = Status.FINISHED
    return request


def test_the_next_turn_has_the_hashes_of_the_generated_blocks() -> None:
    turns = Conversations(SIZE)
    first = end(turns.make_request(row("1", 9, 8, "abx")))  # 17 tokens: 4 full blocks and 1
    second = turns.make_request(row("2", 30, 1, "abcdefgh", "1"))
    assert second.block_hashes[:4] == first.block_hashes[:4]
    assert len(second.block_hashes) == 7
    assert list(second.content.token_ids[:17]) == list(first.content.token_ids)
    third = turns.make_request(row("3", 33, 1, "abcdefghi", "2"))  # the second has not ended
    assert third.block_hashes[:7] == second.block_hashes[:7]


def test_an_edited_answer_shares_the_prompt_only() -> None:
    turns = Conversations(SIZE)
    first = end(turns.make_request(row("1", 8, 8, "ab")))
    second = turns.make_request(row("2", 20, 1, "abcde", "1"))
    other = turns.make_request(row("3", 20, 1, "abxye", "1"))
    same = turns.make_request(row("4", 20, 1, "abcde", "1"))
    assert other.block_hashes[:2] == first.block_hashes[:2]
    assert other.block_hashes[2] != first.block_hashes[2]
    assert same.block_hashes[:4] == second.block_hashes[:4] == first.block_hashes[:4]


def test_other_rows_with_its_ids_share_the_generated_blocks() -> None:
    turns = Conversations(SIZE)
    end(turns.make_request(row("1", 9, 8, "abx")))
    second = turns.make_request(row("2", 30, 1, "abcdefgh", "1"))
    branch = turns.make_request(row("3", 28, 1, "abcdefy"))
    assert branch.block_hashes[:6] == second.block_hashes[:6]
    assert branch.block_hashes[6] != second.block_hashes[6]


def test_a_row_that_is_not_a_next_turn_has_the_hashes_of_its_ids() -> None:
    turns = Conversations(SIZE)
    running = turns.make_request(row("1", 8, 8, "ab"))
    running.generate(4)
    early = turns.make_request(row("2", 20, 1, "abcde", "1"))
    end(running)
    short = turns.make_request(row("3", 12, 1, "abc", "1"))  # the answer is not all in it
    plain = turns.make_request(row("4", 12, 1, "abc"))
    assert early.block_hashes[:3] == short.block_hashes == plain.block_hashes
    assert plain.block_hashes[2] != running.block_hashes[2]
    other = turns.make_request(row("5", 16, 1, "zzzz", "1"))
    assert other.block_hashes[0] != running.block_hashes[0]


def test_the_generated_workload_names_the_previous_turns() -> None:
    workload = list(generate_trace(num_requests=300))
    turns = [one for one in workload if one.continues is not None]
    assert len(turns) > 60
    rows = {one.request_id: one for one in workload}
    assert all(one.num_prompt_tokens > rows[one.continues or ""].num_prompt_tokens for one in turns)


def test_a_turn_waits_for_the_previous_turn_and_then_behind_the_rows_read_meanwhile() -> None:
    rows = [row("a", 8, 4, "ab"), row("b", 16, 1, "abcd", "a"), row("c", 20, 1, "abcde", "b")]
    rows += [row(name, 8, 1, name * 2) for name in "xyz"]
    queue = TurnQueue(rows, SIZE)

    def take() -> tuple[str, Request]:
        taken = queue.take()
        assert taken is not None
        return taken[1].request_id, taken[0]

    (first, request), (second, _) = take(), take()
    assert (first, second) == ("a", "x")
    end(request)
    (third, continued), (fourth, _), (fifth, _) = take(), take(), take()
    assert (third, fourth, fifth) == ("b", "y", "z")
    assert queue.take() is None
    end(continued)
    assert take()[0] == "c"
    assert queue.take() is None


def test_a_request_that_does_not_fit_is_counted_and_skipped() -> None:
    rows = [row("a", 16, 1, "abcd"), row("b", 200, 1, "x" * 50), row("c", 16, 1, "abcd", "b")]
    report = replay(rows, SIZE, StoreConnector, ReplayConfig(20, 8, 2))
    assert (report.requests, report.requests_too_large, report.blocks) == (2, 1, 8)
    assert report.is_clean
    with pytest.raises(ConfigError, match=r"line 1 of the trace: .* use more GPU blocks"):
        replay([rows[1]], SIZE, StoreConnector, ReplayConfig(20, 8, 2))


class _NeverReports(StoreConnector):
    def make_worker(self) -> WorkerConnector:
        worker = super().make_worker()
        worker.get_finished = list  # type: ignore[method-assign]
        return worker


def test_a_connector_that_never_reports_is_an_error() -> None:
    rows = [row("a", 16, 1, "abcd")]
    with pytest.raises(ConnectorError, match=r"CONN-3: jobs .* were never reported"):
        replay(rows, SIZE, _NeverReports, ReplayConfig(60, 8, 2, options={"cpu_blocks": 9}))
