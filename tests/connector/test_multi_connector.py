"""Several connectors seen as one: the bind, job ids, plans, promises and merged events."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvview import (
    BlockIds,
    BlockNotHeldError,
    CacheGeometry,
    ConfigError,
    Connector,
    ConnectorConfig,
    ConnectorError,
    CPULoadStoreSpec,
    GPUBlockPoolView,
    GPULoadStoreSpec,
    GuardedView,
    OffloadingEvent,
    RequestInfo,
    SchedulerConnector,
    StepInfo,
    StepPlan,
    TransferJob,
    TransferResult,
    WorkerConnector,
    fold_events,
    make_offload_key,
)
from kvview_reference.connector.multi import MultiConnector, MultiScheduler, MultiWorker
from kvview_reference.engine import Engine
from kvview_reference.engine.request import Request, chain_hashes
from kvview_reference.pool import BlockPool

FULL = CacheGeometry.single(4)
STORE = TransferJob(7, GPULoadStoreSpec([1], [1], [0]), CPULoadStoreSpec([0]))
REQUEST = RequestInfo("a", 33, chain_hashes(range(8)))


def multi(*children: Mapping[str, object]) -> MultiConnector:
    return MultiConnector(ConnectorConfig(FULL, {"connectors": children}))


def run(engine: Engine, names: Iterable[str]) -> None:
    for name in names:
        head = name.partition(".")[2]
        engine.add_request(Request(name, 33, 5, 4, chain_hashes(f"{head}.{i}" for i in range(8))))
    while engine.has_work():
        engine.step()


class Recorder(Connector):
    """Writes down every call to its scheduler half."""

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        self.calls: list[str] = []

    def make_scheduler(self) -> SchedulerConnector:
        calls = self.calls
        calls.append("made")

        class Half(SchedulerConnector):
            def __getattribute__(self, name: str) -> object:
                if not name.startswith("__"):
                    calls.append(name)
                return super().__getattribute__(name)

        return Half()


@pytest.mark.parametrize("num_children", [1, 2, 3])
def test_conn1_bind_is_the_first_event_of_every_child(num_children: int) -> None:
    connector = multi(*[{"connector": f"{__name__}:Recorder"}] * num_children)
    engine = Engine(FULL, connector, num_gpu_blocks=20, page_bytes=16)
    run(engine, ["0.0"])
    assert engine.shutdown() == {}
    assert len(connector.children) == num_children
    for child in connector.children:
        assert isinstance(child, Recorder)
        assert child.calls[:3] == ["made", "bind_gpu_block_pool_view", "on_engine_ready"]
        assert child.calls.count("bind_gpu_block_pool_view") == 1
        assert {"plan_step", "on_blocks_allocated", "on_request_finished"} <= set(child.calls)


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"connectors: .*at least 1 item"):
        multi()
    with pytest.raises(ConfigError, match=r"'nowhere:Nothing' does not import"):
        multi({"connector": "nowhere:Nothing"})


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


# --- jobs and plans ---


@dataclass(frozen=True)
class TaggedPlan(StepPlan):
    """A connector's own plan, with a field for its worker half."""

    tag: str = ""


class Stores(SchedulerConnector):
    """Stores under the same job id in every step."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def plan_step(self, step: StepInfo) -> StepPlan:
        return TaggedPlan([], [STORE], "mine")

    def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
        self.received += [result.job_id for result in results]


class Worker(WorkerConnector):
    def __init__(self, *reports: int) -> None:
        self.reports = reports
        self.plans: list[StepPlan] = []
        self.waited: list[list[int]] = []

    def start_plan(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def get_finished(self) -> list[TransferResult]:
        return [TransferResult(job_id, True) for job_id in self.reports]

    def wait(self, job_ids: Sequence[int]) -> None:
        self.waited.append(list(job_ids))


def test_conn5_a_child_gets_its_own_plan_with_its_own_job_ids() -> None:
    idle, *halves = SchedulerConnector(), Stores(), Stores()
    workers = [Worker(), Worker(7), Worker(7)]
    scheduler, worker = MultiScheduler([idle, *halves]), MultiWorker(workers)
    plan = scheduler.plan_step(StepInfo())
    job_ids = [job.job_id for job in plan.stores]
    assert len(set(job_ids)) == 2
    worker.start_plan(pickle.loads(pickle.dumps(plan)))
    assert [w.plans for w in workers] == [[], *[[TaggedPlan([], [STORE], "mine")]] * 2]
    worker.wait(job_ids[:1])
    assert [w.waited for w in workers] == [[[]], [[7]], [[]]]
    results = worker.get_finished()
    assert [result.job_id for result in results] == job_ids
    scheduler.on_transfers_finished(results)
    assert [half.received for half in halves] == [[7], [7]]


def test_conn3_a_child_that_reports_an_unknown_job_is_named() -> None:
    with pytest.raises(ConnectorError, match="Worker reported its job 7, which is not in flight"):
        MultiWorker([WorkerConnector(), Worker(7)]).get_finished()


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


# --- events ---


class Says(SchedulerConnector):
    def __init__(self) -> None:
        self.events: list[OffloadingEvent] = []

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self.events = self.events, []
        return events


moves_of_children = st.tuples(
    st.integers(0, 2), st.sampled_from(["A", "B"]), st.integers(0, 3), st.booleans()
)


@given(st.lists(moves_of_children))
def test_event1_event2_a_key_is_advertised_until_the_last_child_drops_it(
    moves: list[tuple[int, str, int, bool]],
) -> None:
    children = [Says(), Says(), Says()]
    scheduler = MultiScheduler(children)
    held: set[tuple[int, str, int]] = set()
    merged: list[OffloadingEvent] = []
    for child, medium, number, take in moves:
        removed = (child, medium, number) in held
        held ^= {(child, medium, number)}
        key = make_offload_key(bytes([number]), 0)
        children[child].events.append(OffloadingEvent([key], medium, removed))
        if take:
            merged += scheduler.take_events()
    merged += scheduler.take_events()
    folded = fold_events(merged)  # raises where EVENT-1 is broken
    assert {(medium, key[0]) for medium, keys in folded.items() for key in keys} == {
        (medium, number) for _, medium, number in held
    }


class Serves(Says):
    """Promises 4 tokens to the requests that it is for."""

    def __init__(self, *request_ids: str) -> None:
        super().__init__()
        self.request_ids = request_ids

    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int:
        return 4 * (request.request_id in self.request_ids)


def test_event2_only_promises_of_children_that_give_events_are_advertised() -> None:
    silent, says, both = (
        Serves("silent"),
        Serves("says"),
        [Serves("inner"), Serves("quiet")],
    )
    scheduler = MultiScheduler([silent, says, MultiScheduler(both)])

    def is_silent(request_id: str) -> bool:
        promised = scheduler.match_prefix(replace(REQUEST, request_id=request_id), 0)
        assert promised == (0 if request_id == "nobody" else 4)
        return scheduler.comes_from_silent_tier(request_id)

    names = ["silent", "says", "inner", "quiet", "nobody"]
    assert [is_silent(name) for name in names] == [True] * 5, "no event came yet"
    for child in (says, both[0]):
        child.events.append(OffloadingEvent([make_offload_key(b"k", 0)], "CPU", removed=False))
        assert len(list(scheduler.take_events())) == (child is says), "one key in one medium"
    assert list(scheduler.take_events()) == []
    assert [is_silent(name) for name in names] == [True, False, False, True, True]


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
