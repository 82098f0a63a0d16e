"""The reference engine with connectors: correct, late and wrong ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvview import (
    CacheGeometry,
    CacheGroup,
    CanonicalKVCaches,
    ChunkedLocalAttention,
    ConfigError,
    Connector,
    ConnectorConfig,
    CPULoadStoreSpec,
    FullAttention,
    GPULoadStoreSpec,
    GuardedView,
    Mamba,
    OffloadingEvent,
    SlidingWindow,
    StepPlan,
    TransferJob,
    TransferResult,
    ViewClosedError,
    WorkerConnector,
    fold_events,
    make_offload_key,
)
from kvview_reference.connector import MultiConnector
from kvview_reference.connector.offload import OffloadConnector, OffloadScheduler
from kvview_reference.engine import Engine
from kvview_reference.engine.request import Request, Status, chain_hashes

FULL = CacheGeometry.single(4)
GEOMETRIES = {
    "full": FULL,
    "coarse": CacheGeometry(16, 2, (FullAttention(4),)),
    "window": CacheGeometry(4, 4, (FullAttention(4), SlidingWindow(4, 10))),
    "mixed": CacheGeometry(
        24,
        2,
        (FullAttention(4), SlidingWindow(6, 9), ChunkedLocalAttention(4, 10), Mamba(12)),
    ),
}
ENDED = {Status.FINISHED, Status.ABORTED}


@dataclass
class Script:
    """The course of a connector's transfers.

    Args:
        delay: Polls that a job waits before it moves a byte.
        fails: Whether a job fails instead; called with whether the job is a load.
        lies: Whether loads report success and move nothing.
        crosses: Whether loads read another host block.
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
                self.results.append(TransferResult(job.job_id, False, error="scripted"))
            elif is_load and self.script.lies:
                self.results.append(TransferResult(job.job_id, True))
            else:
                if is_load and self.script.crosses and isinstance(job.src, CPULoadStoreSpec):
                    job = replace(job, src=CPULoadStoreSpec([i ^ 1 for i in job.src.block_ids]))
                self.inner.start_plan(StepPlan([job]) if is_load else StepPlan([], [job]))
                self.inner.wait([job.job_id])
                self.results += self.inner.get_finished()


class Scripted(OffloadConnector):
    """The default connector over a :class:`ScriptedWorker`."""

    script = Script()

    def make_worker(self) -> WorkerConnector:
        return ScriptedWorker(super().make_worker(), self.script)


def scripted(geometry: CacheGeometry, script: Script | None = None, **options: object) -> Scripted:
    options = {"cpu_blocks": 500, "enable_events": True, **options}
    connector = Scripted(ConnectorConfig(geometry, options))
    connector.script = script or Script()
    return connector


def multi(geometry: CacheGeometry, *scripts: Script, **options: object) -> MultiConnector:
    child = {"connector": f"{__name__}:Scripted"}
    child["options"] = {"cpu_blocks": 500, "enable_events": True, **options}  # type: ignore[assignment]
    connector = MultiConnector(ConnectorConfig(geometry, {"connectors": [child] * len(scripts)}))
    for made, script in zip(connector.children, scripts, strict=True):
        assert isinstance(made, Scripted)
        made.script = script
    return connector


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
    """An engine whose pool is full with a few requests of 33 tokens."""
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
    """Free and referenced blocks are all blocks; no token is computed before it is known."""
    pool = engine.kv_cache.pool
    assert in_use(engine) == sum(pool.ref_cnt(block) > 0 for block in range(1, pool.num_blocks))
    for request in engine.running:
        assert request.num_computed_tokens <= max(request.num_prompt_tokens, request.num_tokens - 1)


def in_use(engine: Engine) -> int:
    return engine.kv_cache.pool.num_blocks - 1 - engine.kv_cache.pool.num_free_blocks()


def run(engine: Engine, *requests: Request) -> None:
    for request in requests:
        engine.add_request(request)
    drain(engine)
    for request in requests:
        if request.status is not Status.ABORTED:
            assert request.status is Status.FINISHED
            assert request.num_generated_tokens == request.num_output_tokens


def run_waves(engine: Engine, num_waves: int, num_tokens: int = 33, num_output: int = 5) -> None:
    geometry = engine.geometry
    for wave in range(num_waves):
        names = [f"{wave}.{i}" for i in range(8)]
        run(
            engine,
            *[prompt(n, i, num_tokens + i % 3, num_output, geometry) for i, n in enumerate(names)],
        )


def end(engine: Engine) -> None:
    """Nothing is held, and no byte was wrong."""
    if isinstance(engine.scheduler_connector, OffloadScheduler):
        assert engine.scheduler_connector._manager.num_protected_blocks() == 0
    assert in_use(engine) == 0
    assert engine.stats.mismatches == 0
    assert engine.shutdown() == {}
    assert engine.shutdown() == {}


def to_loading(engine: Engine, name: str = "again", head: int = 0) -> Request:
    """Bring a request to the state in which its load is in flight."""
    run(engine, prompt("first", head, 33))
    # Further requests evict its blocks from the GPU; host memory has them.
    run(engine, *[prompt(f"filler{i}", 100 + i, 33) for i in range(8)])
    request = prompt(name, head, 33)
    engine.add_request(request)
    engine.step()
    assert request.status is Status.LOADING
    return request


CONNECTORS: dict[str, Callable[[CacheGeometry], Connector | None]] = {
    "none": lambda geometry: None,
    "default": lambda geometry: Connector(ConnectorConfig(geometry)),
    "offload": scripted,
    "late": lambda geometry: scripted(geometry, Script(delay=3)),
    "multi": lambda geometry: multi(geometry, Script(), Script(delay=2)),
}


@pytest.mark.parametrize("kind", sorted(CONNECTORS))
@pytest.mark.parametrize("name", sorted(GEOMETRIES))
def test_every_request_finishes_and_every_byte_is_right(name: str, kind: str) -> None:
    geometry = GEOMETRIES[name]
    engine = build(
        CONNECTORS[kind](geometry),
        geometry,
        num_gpu_blocks=24 * len(geometry.groups),
        max_tokens_per_step=24,
        num_layers=2,
    )
    run_waves(engine, 3, 50)
    run(engine, *[prompt(name, 0, 50, geometry=geometry) for name in "xy"])
    stats = engine.stats
    assert stats.finished == stats.requests == 26
    assert stats.bytes_verified > 0
    if kind in ("none", "default"):
        assert stats.loaded_blocks == stats.offloaded_blocks == stats.cpu_hit_blocks == 0
    else:
        assert min(stats.loaded_blocks, stats.offloaded_blocks, stats.cpu_hit_blocks) > 0
    end(engine)


@pytest.mark.parametrize(
    ("num_tokens", "num_output", "decode"),
    [(33, 13, 4), (33, 13, 7), (17, 13, 1), (34, 13, 16), (1, 0, 4), (40, 1, 4), (20, 40, 4)],
)
def test_lengths_that_leave_a_token_for_a_step_of_its_own(
    num_tokens: int, num_output: int, decode: int
) -> None:
    engine = build_small(scripted(FULL, Script(delay=2)), decode_tokens=decode)
    run_waves(engine, 3, num_tokens, num_output)
    assert engine.stats.preemptions > 0 or num_output < 40
    end(engine)


# --- sizes ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_running": 0}, "max_running must be at least 1, got 0"),
        ({"page_bytes": 12}, "positive multiple of 8 bytes, got 12"),
        ({"num_gpu_blocks": 1}, "num_blocks must be an int of at least 2"),
    ],
)
def test_impossible_sizes(options: dict[str, Any], message: str) -> None:
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


# --- aborts and reused ids ---


def test_abort_while_waiting_running_and_preempted() -> None:
    engine = build_small(scripted(FULL), max_running=5)
    requests = [prompt(str(i), i, 20, 40) for i in range(6)]
    for request in requests:
        engine.add_request(request)
    while not engine.stats.preemptions:
        engine.step()
    preempted = next(r for r in requests if r.status is Status.WAITING and r.was_started)
    for name in ("0", preempted.request_id, "5"):
        assert engine.abort(name)
        assert not engine.abort(name)
    assert not engine.abort("unknown")
    drain(engine)
    assert not engine.abort("1")
    assert (engine.stats.finished, engine.stats.aborted) == (3, 3)
    end(engine)


def test_an_abort_while_loading_keeps_the_blocks_until_the_load_has_ended() -> None:
    engine = build_small(scripted(FULL, Script(delay=4)))
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
def test_conn5_an_id_is_reused_while_its_first_request_loads(success: bool) -> None:
    script = Script(delay=4)
    engine = build_small(scripted(FULL, script))
    to_loading(engine)
    engine.abort("again")
    script.fails = lambda is_load: is_load and not success
    run(engine, prompt("again", 5, 29))
    end(engine)


def test_conn5_an_abort_of_a_reused_id_keeps_the_blocks_of_the_first_request() -> None:
    engine = build_small(scripted(FULL, Script(delay=4)))
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


# --- failed transfers ---


def test_a_failed_load_is_recomputed_and_its_gpu_hit_counts_once() -> None:
    script = Script(delay=1)
    engine = build_small(scripted(FULL, script))
    to_loading(engine)
    drain(engine)
    fifth = make_offload_key(prompt("", 0, 20).block_hashes[4], 0)
    tail = engine.kv_cache.pool.find_cached_block(fifth)
    assert tail is not None
    engine.kv_cache.pool.evict_blocks([tail])  # the first four of eight blocks remain
    before = replace(engine.stats)
    script.fails = lambda is_load: is_load
    request = prompt("last", 0, 33)
    run(engine, request)
    assert not request.use_connector
    assert engine.stats.gpu_hit_blocks - before.gpu_hit_blocks == 4
    assert engine.stats.cpu_hit_blocks == before.cpu_hit_blocks
    assert engine.stats.failed_transfers == 1
    end(engine)


def test_event4_a_failed_store_advertises_no_key() -> None:
    engine = build_small(scripted(FULL, Script(fails=lambda is_load: not is_load)))
    run_waves(engine, 2)
    assert engine.stats.failed_transfers > 0
    assert engine.stats.offloaded_blocks == engine.stats.cpu_hit_blocks == 0
    assert engine.take_offloading_events() == []
    end(engine)


def test_a_job_that_the_worker_refuses_is_reported_as_failed() -> None:
    worker = scripted(FULL).make_worker()
    worker.register_kv_caches(build(None).kv_bytes.caches)
    worker.shutdown()  # from here on the transfer worker accepts nothing
    job = TransferJob(7, GPULoadStoreSpec([1], [1], [0]), CPULoadStoreSpec([0]))
    worker.start_plan(StepPlan([], [job]))
    (result,) = worker.get_finished()
    assert (result.job_id, result.success) == (7, False)
    assert worker.get_finished() == []


# --- resets, budgets and the view ---


def test_pool9_a_reset_is_refused_while_blocks_are_in_use() -> None:
    engine = build_small(scripted(FULL, Script(delay=4)))
    engine.add_request(prompt("a", 99, 40))
    engine.step()
    assert not engine.reset_cache()  # a request runs
    drain(engine)
    request = to_loading(engine)
    assert engine.scheduler_connector.match_prefix(request.info(), 0) == 32
    assert not engine.reset_cache()  # a load is in flight
    assert engine.scheduler_connector.match_prefix(request.info(), 0) == 0  # its part was reset
    drain(engine)
    assert request.status is Status.FINISHED
    assert engine.reset_cache()
    hits = engine.stats.gpu_hit_blocks + engine.stats.cpu_hit_blocks
    run(engine, prompt("b", 0, 40))
    assert engine.stats.gpu_hit_blocks + engine.stats.cpu_hit_blocks == hits
    end(engine)


def test_pool9_a_store_in_flight_keeps_the_engine_stepping_and_refuses_a_reset() -> None:
    engine = build_small(scripted(FULL, Script(delay=10)))
    run(engine, prompt("a", 0, 40))
    engine.add_request(prompt("b", 1, 40))
    while engine.has_unfinished_requests() or not engine.view.held_blocks():
        engine.step()
    assert engine.has_work()
    assert not engine.reset_cache()
    drain(engine)
    assert not engine.view.held_blocks()
    assert engine.reset_cache()
    end(engine)


def test_the_default_connector_respects_a_pin_budget() -> None:
    engine = build_small(scripted(FULL))
    guard = GuardedView(engine.kv_cache.pool.view("small"), pin_budget=0.1)
    engine.scheduler_connector.bind_gpu_block_pool_view(guard)
    run_waves(engine, 2)
    assert guard.stats.refused == 0
    end(engine)


def test_pool10_shutdown_closes_the_view_and_returns_the_holds() -> None:
    engine = build(None)
    engine.view.touch_blocks([3, 3, 4])
    assert engine.shutdown() == {3: 2, 4: 1}
    with pytest.raises(ViewClosedError):
        engine.view.touch_blocks([3])


# --- random scenarios ---


MOVES = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 5), st.integers(1, 60)),
    st.tuples(st.just("abort"), st.integers(0, 5), st.just(0)),
    st.tuples(st.just("step"), st.integers(1, 6), st.just(0)),
    st.tuples(st.just("reset"), st.just(0), st.just(0)),
)


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(sorted(GEOMETRIES)),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), min_size=1, max_size=2),
    st.lists(MOVES, max_size=60),
    st.integers(0, 99),
)
def test_any_mix_of_requests_aborts_resets_and_failures_drains(
    name: str, workers: list[tuple[int, int]], scenario: list[tuple[str, int, int]], seed: int
) -> None:
    """Ids are reused at once, transfers are late or fail, and the host tier is small."""
    geometry, random = GEOMETRIES[name], Random(seed)
    scripts = [
        Script(delay, lambda is_load, often=often: random.randrange(4) < often)  # type: ignore[misc]
        for delay, often in workers
    ]
    connector: Connector = multi(geometry, *scripts, cpu_blocks=12)
    if len(scripts) == 1:
        connector = connector.children[0]  # type: ignore[attr-defined]
    size = 20 * len(geometry.groups)
    engine = build(connector, geometry, size, max_tokens_per_step=24, max_running=4)
    alive: dict[str, Request] = {}
    events: list[OffloadingEvent] = []
    for move, number, num_tokens in scenario:
        request_id = f"r{number}"
        is_alive = request_id in alive and alive[request_id].status not in ENDED
        if move == "add" and not is_alive:
            alive[request_id] = prompt(request_id, number % 3, num_tokens, 7, geometry)
            engine.add_request(alive[request_id])
        elif move == "abort":
            assert engine.abort(request_id) == is_alive
        elif move == "step":
            for _ in range(number):
                engine.step()
                check_blocks(engine)
        elif move == "reset":
            was_idle = in_use(engine) == 0
            assert engine.reset_cache() == was_idle
        events += engine.take_offloading_events()
    drain(engine)
    events += engine.take_offloading_events()
    assert {request.status for request in alive.values()} <= ENDED
    assert engine.stats.finished + engine.stats.aborted == engine.stats.requests
    assert all(len(keys) <= 12 * len(scripts) for keys in fold_events(events).values())
    end(engine)


# --- the negative control: wrong bytes are detected ---


@pytest.mark.parametrize("script", [Script(lies=True), Script(crosses=True)])
@pytest.mark.parametrize("name", sorted(GEOMETRIES))
def test_wrong_bytes_are_detected(name: str, script: Script) -> None:
    geometry = GEOMETRIES[name]
    engine = build(scripted(geometry, script), geometry, 40 * len(geometry.groups))
    run_waves(engine, 2, 50)
    assert engine.stats.loaded_blocks > 0
    assert engine.stats.mismatches > 0


def test_a_load_that_moves_nothing_is_detected_over_the_right_bytes() -> None:
    engine, request = build_small(scripted(FULL, Script(lies=True))), prompt("a", 0, 5)
    run(engine, request)
    engine.step()  # an idle step, in which the connector offloads
    drain(engine)
    assert engine.kv_cache.reset_prefix_cache()  # the host keeps its blocks
    engine.kv_bytes.write(range(1, 20), [make_offload_key(request.block_hashes[0], 0)] * 19)
    run(engine, prompt("b", 0, 5))
    assert engine.stats.loaded_blocks == engine.stats.mismatches == 1


def test_a_stale_block_on_the_gpu_is_detected() -> None:
    engine = build(None)
    run(engine, prompt("a", 0, 20))
    engine.kv_bytes.poison([2])
    run(engine, prompt("b", 0, 20))
    assert engine.stats.mismatches == 1
