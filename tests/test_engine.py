"""The reference engine with connectors beside it: good ones, late ones, broken ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvview import (
    MEDIUM_CPU,
    CacheGeometry,
    CacheGroup,
    CanonicalKVCaches,
    ChunkedLocalAttention,
    ConfigError,
    Connector,
    ConnectorConfig,
    ConnectorError,
    CPULoadStoreSpec,
    EngineFacts,
    FullAttention,
    GPUBlockPoolView,
    GPULoadStoreSpec,
    GuardedView,
    Mamba,
    OffloadingEvent,
    OffloadKey,
    RequestInfo,
    RequestStep,
    SchedulerConnector,
    SlidingWindow,
    StepInfo,
    StepPlan,
    TransferJob,
    TransferResult,
    ViewClosedError,
    WorkerConnector,
    fold_events,
    make_offload_key,
)
from kvview_reference.connector import LazyOffloadConnector
from kvview_reference.engine import Engine
from kvview_reference.multi_connector import MultiConnector
from kvview_reference.request import Request, Status, chain_hashes

FULL = CacheGeometry.single(4)
GEOMETRIES = {
    "full": FULL,
    "coarse": CacheGeometry(16, 2, (FullAttention(4),)),
    "window": CacheGeometry(4, 4, (FullAttention(4), SlidingWindow(4, 10))),
    "chunked": CacheGeometry(4, 4, (FullAttention(4), ChunkedLocalAttention(4, 8))),
    "mamba": CacheGeometry(8, 4, (FullAttention(4), Mamba(8))),
    "mixed": CacheGeometry(
        24,
        2,
        (FullAttention(4), SlidingWindow(6, 9), ChunkedLocalAttention(4, 10), Mamba(12)),
    ),
}


# --- connectors whose transfers go as a script says ---


@dataclass
class Script:
    """How the transfers of a connector go.

    Args:
        delay: Polls that a job waits before it moves a byte.
        fails: Whether a job fails instead; told whether it is a load.
        lies: Loads report success and move nothing.
        crosses: Loads read another host block than they were told.
    """

    delay: int = 0
    fails: Callable[[bool], bool] = lambda is_load: False
    lies: bool = False
    crosses: bool = False


class ScriptedWorker(WorkerConnector):
    def __init__(self, inner: WorkerConnector, script: Script) -> None:
        self.inner = inner
        self.script = script
        self.queue: list[tuple[int, bool, TransferJob]] = []  # polls left, is a load, job
        self.results: list[TransferResult] = []

    def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
        self.inner.register_kv_caches(kv_caches)

    def start_plan(self, plan: StepPlan) -> None:
        delay = self.script.delay
        self.queue += [(delay, True, job) for job in plan.loads]
        self.queue += [(delay, False, job) for job in plan.stores]
        self._move(lambda polls, job: polls <= 0)

    def get_finished(self) -> list[TransferResult]:
        results, self.results = self.results, []
        self.queue = [(polls - 1, is_load, job) for polls, is_load, job in self.queue]
        self._move(lambda polls, job: polls <= 0)
        return results

    def wait(self, job_ids: Sequence[int]) -> None:
        self._move(lambda polls, job: job.job_id in job_ids)

    def shutdown(self) -> None:
        self.inner.shutdown()

    def _move(self, is_due: Callable[[int, TransferJob], bool]) -> None:
        due = [item for item in self.queue if is_due(item[0], item[2])]
        self.queue = [item for item in self.queue if item not in due]
        for _, is_load, job in due:
            if self.script.fails(is_load):
                self.results.append(TransferResult(job.job_id, False, error="as the script says"))
            elif is_load and self.script.lies:
                self.results.append(TransferResult(job.job_id, True))
            else:
                if is_load and self.script.crosses and isinstance(job.src, CPULoadStoreSpec):
                    job = replace(job, src=CPULoadStoreSpec([i ^ 1 for i in job.src.block_ids]))
                self.inner.start_plan(StepPlan([job]) if is_load else StepPlan([], [job]))
                self.inner.wait([job.job_id])
                self.results += self.inner.get_finished()


class Scripted(LazyOffloadConnector):
    """The lazy connector over a :class:`ScriptedWorker`."""

    script = Script()

    def make_worker(self) -> WorkerConnector:
        return ScriptedWorker(super().make_worker(), self.script)


def lazy(geometry: CacheGeometry, script: Script | None = None, **options: object) -> Scripted:
    options = {"cpu_blocks": 200, "enable_events": True, **options}
    connector = Scripted(ConnectorConfig(geometry, options))
    connector.script = script or Script()
    return connector


def multi(geometry: CacheGeometry, *scripts: Script, **options: object) -> MultiConnector:
    child = {
        "connector": f"{__name__}:Scripted",
        "options": {"cpu_blocks": 200, "enable_events": True, **options},
    }
    connector = MultiConnector(ConnectorConfig(geometry, {"connectors": [child] * len(scripts)}))
    for made, script in zip(connector.children, scripts, strict=True):
        assert isinstance(made, Scripted)
        made.script = script
    return connector


# --- running ---


def build(
    connector: Connector | None,
    geometry: CacheGeometry = FULL,
    num_gpu_blocks: int = 60,
    **options: Any,
) -> Engine:
    return Engine(
        geometry, connector, num_gpu_blocks=num_gpu_blocks, **{"page_bytes": 16, **options}
    )


def build_small(connector: Connector | None, **options: Any) -> Engine:
    """A pool that a few requests of 33 tokens fill."""
    return build(connector, num_gpu_blocks=20, max_tokens_per_step=16, **options)


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
        check_blocks(engine)
    pytest.fail(f"still at work after {max_steps} steps: {engine.stats}")


def check_blocks(engine: Engine) -> None:
    """Free and referenced blocks are all blocks, and a request never lags behind itself."""
    pool = engine.kv_cache.pool
    in_use = sum(pool.ref_cnt(block) > 0 for block in range(1, pool.num_blocks))
    assert pool.num_free_blocks() + in_use == pool.num_blocks - 1
    for request in engine.running:
        if request.num_computed_tokens >= request.num_prompt_tokens:
            assert request.num_computed_tokens <= request.num_tokens - 1


def free_blocks(engine: Engine) -> int:
    """How many usable blocks are not free."""
    return engine.kv_cache.pool.num_blocks - 1 - engine.kv_cache.pool.num_free_blocks()


def run(engine: Engine, *requests: Request) -> None:
    for request in requests:
        engine.add_request(request)
    drain(engine)
    for request in requests:
        if request.status is not Status.ABORTED:
            assert request.status is Status.FINISHED
            assert request.num_generated_tokens == request.num_output_tokens


def end(engine: Engine) -> None:
    """Nothing is held, nothing was wrong."""
    assert free_blocks(engine) == 0
    assert engine.stats.mismatches == 0
    assert engine.shutdown() == {}
    assert engine.shutdown() == {}


def to_loading(engine: Engine, name: str = "again", head: int = 0) -> Request:
    """Bring a request to where its load is in flight."""
    run(engine, prompt("first", head, 33))
    # Others push it out of the GPU; it is in host memory then.
    run(engine, *[prompt(f"filler{i}", 100 + i, 33) for i in range(8)])
    request = prompt(name, head, 33)
    engine.add_request(request)
    engine.step()
    assert request.status is Status.LOADING
    return request


CONNECTORS: dict[str, Callable[[CacheGeometry], Connector | None]] = {
    "none": lambda geometry: None,
    "default": lambda geometry: Connector(ConnectorConfig(geometry)),
    "lazy": lazy,
    "late": lambda geometry: lazy(geometry, Script(delay=3)),
    "multi": lambda geometry: multi(geometry, Script(), Script(delay=2)),
}


@pytest.mark.parametrize("kind", sorted(CONNECTORS))
@pytest.mark.parametrize("name", sorted(GEOMETRIES))
def test_everything_finishes_and_every_byte_is_right(name: str, kind: str) -> None:
    geometry = GEOMETRIES[name]
    engine = build(
        CONNECTORS[kind](geometry),
        geometry,
        num_gpu_blocks=24 * len(geometry.groups),
        max_tokens_per_step=24,
        num_layers=2,
    )
    for wave in range(3):
        run(engine, *[prompt(f"{wave}.{i}", i, 50 + i % 3, i, geometry=geometry) for i in range(8)])
    run(engine, prompt("x", 0, 50, geometry=geometry), prompt("y", 0, 50, geometry=geometry))
    stats = engine.stats
    assert stats.finished == stats.requests == 26
    assert stats.bytes_verified > 0
    if kind in ("none", "default"):
        assert stats.loaded_blocks == stats.offloaded_blocks == stats.cpu_hit_blocks == 0
    else:
        assert min(stats.loaded_blocks, stats.offloaded_blocks, stats.cpu_hit_blocks) > 0
    end(engine)


def test_preemption_when_the_pool_is_full() -> None:
    engine = build_small(lazy(FULL, Script(delay=2)), decode_tokens=4)
    run(engine, *[prompt(str(i), i, 20, 40) for i in range(4)])
    assert engine.stats.preemptions > 0
    assert engine.stats.finished == 4
    end(engine)


@pytest.mark.parametrize(("num_tokens", "decode"), [(33, 4), (33, 7), (17, 1), (34, 16)])
def test_tokens_are_computed_one_step_after_they_are_generated(
    num_tokens: int, decode: int
) -> None:
    """Also when one token of the prompt is left over for a step of its own."""
    engine = build_small(lazy(FULL), decode_tokens=decode)
    for wave in range(3):
        run(engine, *[prompt(f"{wave}.{i}", i, num_tokens, 13) for i in range(3)])
    assert engine.stats.cpu_hit_blocks > 0
    end(engine)


@pytest.mark.parametrize("num_output", [0, 1])
def test_requests_of_no_or_one_output_token(num_output: int) -> None:
    engine = build(lazy(FULL))
    run(engine, prompt("a", 0, 1, num_output), prompt("b", 1, 40, num_output))
    end(engine)


# --- what fits ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_running": 0}, "max_running must be at least 1, got 0"),
        ({"page_bytes": 12}, "positive multiple of 8 bytes, got 12"),
        ({"num_gpu_blocks": 1}, "num_blocks must be an int of at least 2"),
    ],
)
def test_impossible_sizes(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(None, **options)


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
def test_a_request_that_was_accepted_finishes(
    mix: list[tuple[int, int, int]], blocks: int, num: int, out: int, budget: int, decode: int
) -> None:
    """Alone, it never asks for more blocks than ``add_request`` reckoned with."""
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


# --- abort, and ids that come again ---


def test_abort_while_waiting() -> None:
    engine = build(lazy(FULL), max_running=1)
    first, second = prompt("a", 0, 20), prompt("b", 1, 20)
    engine.add_request(first)
    engine.add_request(second)
    engine.step()
    assert engine.abort("b")
    assert second.status is Status.ABORTED
    drain(engine)
    assert (engine.stats.finished, engine.stats.aborted) == (1, 1)
    end(engine)


def test_abort_while_running_and_after_a_preemption() -> None:
    engine = build_small(lazy(FULL))
    requests = [prompt(str(i), i, 20, 40) for i in range(4)]
    for request in requests:
        engine.add_request(request)
    while not engine.stats.preemptions:
        engine.step()
    assert engine.abort("0")  # runs
    preempted = next(r for r in requests if r.status is Status.WAITING and r.was_started)
    assert engine.abort(preempted.request_id)
    drain(engine)
    assert engine.stats.aborted == 2
    end(engine)


def test_abort_of_an_unknown_request() -> None:
    engine = build(lazy(FULL))
    run(engine, prompt("a", 0, 20))
    assert not engine.abort("a")
    assert not engine.abort("nobody")
    assert engine.stats.aborted == 0


def test_abort_while_loading_keeps_the_blocks_until_the_load_has_ended() -> None:
    engine = build_small(lazy(FULL, Script(delay=4)))
    request = to_loading(engine)
    held = engine.kv_cache.block_ids("again")
    assert engine.abort("again")
    assert request.status is Status.ABORTED
    assert not engine.abort("again")
    assert engine.kv_cache.block_ids("again") == held
    assert engine.has_work()
    drain(engine)
    assert engine.stats.aborted == 1
    end(engine)


@pytest.mark.parametrize("success", [True, False])
def test_conn5_the_id_comes_again_while_its_first_life_loads(success: bool) -> None:
    script = Script(delay=4)
    engine = build_small(lazy(FULL, script))
    to_loading(engine)
    engine.abort("again")
    script.fails = lambda is_load: is_load and not success
    second = prompt("again", 5, 29)
    run(engine, second)
    assert second.status is Status.FINISHED
    end(engine)


def test_conn5_abort_of_the_second_life_leaves_the_blocks_of_the_first() -> None:
    engine = build_small(lazy(FULL, Script(delay=4)))
    to_loading(engine)
    engine.abort("again")
    held = engine.kv_cache.block_ids("again")
    assert any(held)
    engine.add_request(prompt("again", 5, 29))
    engine.step()
    assert engine.abort("again")
    assert engine.kv_cache.block_ids("again") == held  # the first load still writes there
    drain(engine)
    assert engine.stats.aborted == 2
    end(engine)


# --- transfers that fail ---


def test_a_failed_load_is_computed_anew() -> None:
    script = Script(delay=1)
    engine = build_small(lazy(FULL, script))
    request = to_loading(engine)
    script.fails = lambda is_load: is_load
    hits = engine.stats.gpu_hit_blocks
    drain(engine)
    assert request.status is Status.FINISHED
    assert engine.stats.failed_transfers == 1
    assert engine.stats.loaded_blocks == engine.stats.cpu_hit_blocks == 0
    assert engine.stats.gpu_hit_blocks == hits == 0
    end(engine)


def test_a_failed_load_counts_its_gpu_hit_once() -> None:
    """A prefix half on the GPU and half in host memory, whose load fails."""
    script = Script(delay=1)
    engine = build_small(lazy(FULL, script))
    to_loading(engine)
    drain(engine)
    (tail,) = [
        engine.kv_cache.pool.find_cached_block(
            make_offload_key(prompt("", 0, 20).block_hashes[4], 0)
        )
    ]  # noqa: E501
    assert tail is not None
    engine.kv_cache.pool.evict_blocks([tail])  # of eight blocks the first four are left
    before = engine.stats.gpu_hit_blocks
    script.fails = lambda is_load: is_load
    request = prompt("last", 0, 33)
    run(engine, request)
    assert not request.use_connector
    assert engine.stats.gpu_hit_blocks - before == 4
    end(engine)


def test_event4_a_failed_store_leaves_no_key() -> None:
    engine = build_small(lazy(FULL, Script(fails=lambda is_load: not is_load)))
    for wave in range(2):
        run(engine, *[prompt(f"{wave}.{i}", i, 33) for i in range(8)])
    assert engine.stats.failed_transfers > 0
    assert engine.stats.offloaded_blocks == engine.stats.cpu_hit_blocks == 0
    assert engine.take_offloading_events() == []
    end(engine)


def test_a_job_that_the_worker_refuses_is_reported_as_failed() -> None:
    worker = lazy(FULL).make_worker()
    engine = build(None)
    worker.register_kv_caches(engine.kv_bytes.caches)
    worker.shutdown()  # from here on the transfer worker accepts nothing
    job = TransferJob(7, GPULoadStoreSpec([1], [1], [0]), CPULoadStoreSpec([0]))
    worker.start_plan(StepPlan([], [job]))
    (result,) = worker.get_finished()
    assert (result.job_id, result.success) == (7, False)
    assert worker.get_finished() == []


# --- events, reset, pending work ---


def longest_loadable(geometry: CacheGeometry, request: Request, keys: set[OffloadKey]) -> int:
    """From the advertised keys alone: the longest prefix of which each read block is there."""
    best = 0
    for num in range(0, request.num_prompt_tokens, geometry.scheduler_block_size):
        needed = [
            make_offload_key(request.block_hashes[geometry.block_hash_index(index, block)], index)
            for index, group in enumerate(geometry.groups)
            for block in group.required_blocks(num)
        ]
        if keys.issuperset(needed):
            best = num
    return best


@pytest.mark.parametrize("name", sorted(GEOMETRIES))
def test_event2_what_is_advertised_can_be_loaded_and_nothing_else(name: str) -> None:
    geometry = GEOMETRIES[name]
    engine = build(lazy(geometry, cpu_blocks=60), geometry, 24 * len(geometry.groups))
    events: list[OffloadingEvent] = []
    for i in range(30):
        run(engine, prompt(str(i), i * 7 % 12, 50, geometry=geometry))
        events += engine.take_offloading_events()
        held = fold_events(events).get(MEDIUM_CPU, set())
        assert len(held) <= 60
        for head in range(12):
            probe = prompt("probe", head, 50, geometry=geometry)
            promised = engine.scheduler_connector.match_prefix(probe.info(), 0)
            assert promised == longest_loadable(geometry, probe, held)
    assert any(event.removed for event in events)
    assert engine.reset_cache()
    events += engine.take_offloading_events()
    assert fold_events(events) == {MEDIUM_CPU: set()}  # EVENT-5
    end(engine)


def test_pool9_reset_is_refused_while_blocks_are_in_use() -> None:
    engine = build_small(lazy(FULL, Script(delay=4)))
    engine.add_request(prompt("a", 0, 40))
    engine.step()
    assert not engine.reset_cache()  # a request runs
    drain(engine)
    request = to_loading(engine)
    assert not engine.reset_cache()  # a load is in flight
    drain(engine)
    assert request.status is Status.FINISHED
    assert engine.reset_cache()
    hits = engine.stats.gpu_hit_blocks + engine.stats.cpu_hit_blocks
    run(engine, prompt("b", 0, 40))
    assert engine.stats.gpu_hit_blocks + engine.stats.cpu_hit_blocks == hits
    end(engine)


def test_pool9_reset_is_refused_while_a_store_is_in_flight() -> None:
    engine = build_small(lazy(FULL, Script(delay=10)))
    run(engine, prompt("a", 0, 40))
    engine.add_request(prompt("b", 1, 40))
    while engine.has_unfinished_requests() or not engine.view.held_blocks():
        engine.step()
    assert not engine.reset_cache()
    drain(engine)
    assert engine.reset_cache()
    end(engine)


def test_pending_work_keeps_the_engine_stepping() -> None:
    engine = build_small(lazy(FULL, Script(delay=6)))
    run(engine, prompt("a", 0, 40))
    engine.add_request(prompt("b", 1, 40))
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.view.held_blocks()
    assert engine.has_work()
    drain(engine)
    assert not engine.view.held_blocks()
    end(engine)


# --- connectors that do nothing, or less than they could ---


def test_conn1_bind_is_opt_in() -> None:
    """A connector that overrides nothing runs; it holds and loads nothing."""
    half, worker = SchedulerConnector(), WorkerConnector()
    engine = build(None)
    half.bind_gpu_block_pool_view(engine.view)
    assert half.match_prefix(prompt("a", 0, 20).info(), 0) == 0
    assert half.plan_step(StepInfo()) == StepPlan()
    assert not StepPlan()
    assert list(half.take_events()) == []
    assert worker.get_finished() == []
    assert half.reset_cache()
    assert not half.has_pending_work()
    run(engine, prompt("a", 0, 20))
    end(engine)


def test_a_lazy_connector_that_was_never_bound_offloads_nothing() -> None:
    half = lazy(FULL).make_scheduler()
    assert not half.plan_step(StepInfo([RequestStep(prompt("a", 0, 8).info(), ([],), 0, 8)]))
    half.shutdown()


def test_a_pin_budget_is_not_an_error_for_the_lazy_connector() -> None:
    engine = build_small(lazy(FULL))
    guard = GuardedView(engine.kv_cache.pool.view("small"), pin_budget=0.1)
    engine.scheduler_connector.bind_gpu_block_pool_view(guard)
    for wave in range(2):
        run(engine, *[prompt(f"{wave}.{i}", i, 33) for i in range(8)])
    assert guard.stats.refused > 0
    end(engine)


def test_facts_of_the_engine() -> None:
    seen: list[EngineFacts] = []

    class Half(SchedulerConnector):
        def on_engine_ready(self, facts: EngineFacts) -> None:
            seen.append(facts)

    build(custom(Half), num_gpu_blocks=33, page_bytes=64, num_layers=3)
    (facts,) = seen
    assert (facts.num_gpu_blocks, facts.page_bytes) == (33, (192,))


def test_pool10_the_view_is_closed_at_shutdown_and_tells_what_was_held() -> None:
    engine = build(None)
    engine.view.touch_blocks([3, 3, 4])
    assert engine.shutdown() == {3: 2, 4: 1}
    with pytest.raises(ViewClosedError):
        engine.view.touch_blocks([3])


# --- broken connectors ---


def custom(
    scheduler: Callable[[], SchedulerConnector],
    worker: Callable[[], WorkerConnector] = WorkerConnector,
) -> Connector:
    """A connector of the two halves given."""
    connector = Connector(ConnectorConfig(FULL))
    connector.make_scheduler = scheduler  # type: ignore[method-assign]
    connector.make_worker = worker  # type: ignore[method-assign]
    return connector


class Promises(SchedulerConnector):
    def __init__(self, num_tokens: int | None) -> None:
        self.num_tokens = num_tokens

    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int | None:
        return self.num_tokens


class Holds(SchedulerConnector):
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def bind_gpu_block_pool_view(self, view: GPUBlockPoolView) -> None:
        view.touch_blocks(range(1, self.num_blocks + 1))


class Plans(SchedulerConnector):
    """Plans these jobs in the first step, and is never done."""

    def __init__(
        self, loads: Sequence[TransferJob] = (), stores: Sequence[TransferJob] = ()
    ) -> None:
        self.plan = StepPlan(loads, stores)

    def plan_step(self, step: StepInfo) -> StepPlan:
        plan, self.plan = self.plan, StepPlan()
        return plan

    def has_pending_work(self) -> bool:
        return True


class Reports(WorkerConnector):
    """Reports every job so many times, and these from the start."""

    def __init__(self, times: int = 1, unknown: Sequence[int] = ()) -> None:
        self.times = times
        self.results = [TransferResult(job_id, True) for job_id in unknown]

    def start_plan(self, plan: StepPlan) -> None:
        for job in (*plan.loads, *plan.stores):
            self.results += [TransferResult(job.job_id, True)] * self.times

    def get_finished(self) -> list[TransferResult]:
        results, self.results = self.results, []
        return results


GPU, CPU = GPULoadStoreSpec([1], [1], [0]), CPULoadStoreSpec([0])
STORE = TransferJob(7, GPU, CPU)
BAD_PROMISE = r"match_prefix promised {} tokens beyond 0 to request 'a' of 33 tokens: .* of 4 and"
UNKNOWN = "job 7 was reported and is not in flight"
BROKEN: dict[str, tuple[Any, Any, str]] = {  # the halves' factories, and what is said
    "less than nothing": (lambda: Promises(-4), Reports, BAD_PROMISE.format(-4)),
    "half a block": (lambda: Promises(3), Reports, BAD_PROMISE.format(3)),
    "more than the prompt": (lambda: Promises(400), Reports, BAD_PROMISE.format(400)),
    "all of the prompt": (lambda: Promises(36), Reports, BAD_PROMISE.format(36)),
    "no load": (lambda: Promises(16), Reports, "promised 16 tokens to request 'a' and planned no"),
    "no answer": (lambda: Promises(None), Reports, "1 requests wait.* never answers match_prefix"),
    "holds all": (lambda: Holds(59), Reports, "1 requests wait.* holds 59 of 59 blocks"),
    "unknown job": (SchedulerConnector, lambda: Reports(1, [7]), UNKNOWN),
    "reported twice": (lambda: Plans([], [STORE]), lambda: Reports(2), UNKNOWN),
    "never reported": (lambda: Plans([], [STORE]), lambda: Reports(0), r"jobs \[7\] were never r"),
    "id in flight": (lambda: Plans([], [STORE] * 2), Reports, "job id 7 is in flight"),
    "never done": (Plans, Reports, "has_pending_work was true for 1000 steps"),
    "load for nobody": (
        lambda: Plans([TransferJob(7, CPU, GPU, "nobody")]),
        Reports,
        "load job 7 names request 'nobody', which waits for no load",
    ),
    "load without request": (
        lambda: Plans([TransferJob(7, CPU, GPU)]), Reports, "load job 7 names request None"
    ),
    "store from the host": (
        lambda: Plans([], [TransferJob(7, CPU, GPU)]),
        Reports,
        "a store begins at a GPULoadStoreSpec, got CPULoadStoreSpec",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_connector_is_named_and_hangs_nothing(name: str) -> None:
    scheduler, worker, message = BROKEN[name]
    engine = build(custom(scheduler, worker), max_tokens_per_step=8)
    with pytest.raises(ConnectorError, match=message) as caught:
        run(engine, prompt("a", 0, 33))
    assert "\n" not in str(caught.value)


def test_conn4_a_request_that_is_preempted_for_ever_is_not_a_hang() -> None:
    """Three blocks are left: a prefix too short to be a hit is computed again and again."""
    geometry = CacheGeometry(16, 4, (FullAttention(4),))
    engine = build(custom(lambda: Holds(56)), geometry, max_tokens_per_step=8)
    with pytest.raises(ConnectorError, match=r"preempted 1000 times: .* holds 56 of 59 blocks"):
        run(engine, prompt("a", 0, 33))


# --- the negative control: wrong bytes are seen ---


@pytest.mark.parametrize("script", [Script(lies=True), Script(crosses=True)])
@pytest.mark.parametrize("name", sorted(GEOMETRIES))
def test_wrong_bytes_are_seen(name: str, script: Script) -> None:
    geometry = GEOMETRIES[name]
    engine = build(lazy(geometry, script), geometry, 24 * len(geometry.groups))
    for wave in range(2):
        run(engine, *[prompt(f"{wave}.{i}", i, 50, geometry=geometry) for i in range(8)])
    assert engine.stats.loaded_blocks > 0
    assert engine.stats.mismatches > 0


def test_a_stale_block_on_the_gpu_is_seen() -> None:
    engine = build(None)
    run(engine, prompt("a", 0, 20))
    engine.kv_bytes.poison([2])
    run(engine, prompt("b", 0, 20))
    assert engine.stats.mismatches == 1
