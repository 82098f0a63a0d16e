"""The job tracker: CONN-2, CONN-3 and CONN-5 for any engine.

``tests/cli/hooks.txt`` has the reports and promises that it refuses.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvview import (
    ConnectorError,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    StepPlan,
    TransferJob,
    TransferResult,
)
from kvview.connector.job_tracker import EndedJob, JobTracker

HOST, GPU = CPULoadStoreSpec([0]), GPULoadStoreSpec([1], [1], [0])


def load(job_id: int, request_id: str = "r") -> TransferJob:
    return TransferJob(job_id, HOST, GPU, request_id)


def store(job_id: int) -> TransferJob:
    return TransferJob(job_id, GPU, HOST)


def refused(book: JobTracker, plan: StepPlan) -> str:
    before = list(book)
    with pytest.raises(ConnectorError) as caught:
        book.check(plan)
    assert list(book) == before, "a check changes nothing"
    return str(caught.value)


def begin(book: JobTracker, plan: StepPlan) -> None:
    book.check(plan)
    book.begin(plan)


def done(job_id: int, success: bool = True) -> TransferResult:
    return TransferResult(job_id, success)


def test_a_block_is_moved_when_every_worker_moved_it() -> None:
    tracker = JobTracker(num_workers=3)
    begin(tracker, StepPlan(stores=[store(1)]))
    for rank, moved in enumerate([[True, True, False], [False, True, True]]):
        assert tracker.end(TransferResult(1, False, moved=moved), rank) is None
    ended = tracker.end(done(1), rank=2)
    assert ended is not None
    assert not ended.result.success
    assert ended.result.moved == [False, True, False]
    begin(tracker, StepPlan(stores=[store(2)]))
    tracker.end(TransferResult(2, False, moved=[True]), 0)
    tracker.end(TransferResult(2, False), 1)
    ended = tracker.end(done(2), 2)
    assert ended is not None
    assert ended.result.moved is None


def test_a_promise_needs_its_load_in_the_same_plan() -> None:
    book = JobTracker()
    book.promise("r", 32)
    assert "promised 32 tokens to request 'r' but planned no load" in refused(book, StepPlan())
    assert refused(book, StepPlan(loads=[load(1, "other")])).startswith("CONN-2: load job 1 names")
    job = replace(load(1, "other"), owner="0: my.py:Mine")  # a child of several is named
    assert "load job 1 of 0: my.py:Mine names request 'other'" in refused(book, StepPlan([job]))
    begin(book, StepPlan(loads=[load(1), load(2)]))
    assert refused(book, StepPlan(loads=[load(3)])).startswith("CONN-2"), "a step too late"
    begin(book, StepPlan())


def test_a_job_ends_with_its_last_worker() -> None:
    book = JobTracker(num_workers=3)
    begin(book, StepPlan(stores=[store(1)]))
    assert book.end(done(1), rank=2) is None
    assert book.end(done(1, success=False), rank=0) is None
    assert not book.awaits(1, rank=2)
    with pytest.raises(ConnectorError, match="CONN-3"):
        book.end(done(1), rank=2)
    assert (len(book), book.awaits(1, rank=1)) == (1, True)
    ended = book.end(done(1), rank=1)
    assert ended is not None
    assert not ended.result.success, "one that failed is enough"
    assert not len(book)


def test_a_request_waits_for_its_last_load() -> None:
    book = JobTracker()
    book.promise("r", 16)
    book.promise("other", 16)
    begin(book, StepPlan(loads=[load(1), load(2, "other"), load(3)]))
    assert list(book) == [job.job_id for job in book.jobs()] == [1, 2, 3]
    failed = done(3, success=False)
    assert book.end(failed) == EndedJob(load(3), True, failed, False, True)
    assert book.end(done(2)) == EndedJob(load(2, "other"), True, done(2), True, False)
    assert book.end(done(1)) == EndedJob(load(1), True, done(1), True, True)
    assert (list(book), list(book.jobs())) == ([], [])
    begin(book, StepPlan())
    book.promise("r", 16)
    begin(book, StepPlan(loads=[load(4)]))
    ended = EndedJob(load(4), True, done(4), True, False)
    assert book.end(done(4)) == ended, "an id that is reused forgets a failed load"


def test_nothing_is_kept_of_jobs_that_have_ended() -> None:
    tracker = JobTracker(num_workers=2)
    tracker.promise("r", 16)
    begin(tracker, StepPlan([load(1)], [store(2)]))
    for result in (done(1), done(2, success=False)):
        tracker.end(result, 0)
        tracker.end(result, 1)
    assert vars(tracker) == vars(JobTracker(num_workers=2))
