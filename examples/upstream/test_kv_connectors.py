"""Tests the behaviour of vLLM that KV connectors rely on. See docs/upstream.md.

    pip install 'kvview[reference,testing]'
    pytest test_kv_connectors.py

The tests need a CPU, vLLM's Python files and less than a minute, but no GPU, server, model or
network. They test only behaviour, and no signature or private name. Each check of right behaviour
has a control, in which an injected fault must be detected. A test that is known to fail names its
issue.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvview import CacheGeometry, CPULoadStoreSpec, LookupResult, fold_events, make_offload_key
from kvview.testing import Capability, Outcome, run_checks
from kvview.testing.connector import (
    Abort,
    Add,
    Reset,
    Scenario,
    SimulationResult,
    Squeeze,
    Step,
    generate_scenario,
    simulate,
)
from kvview_reference.store_connector import StoreConnector
from kvview_vllm.offloading.translated import TranslatedManager, make_cpu_manager
from kvview_vllm.pool import view as view_of
from kvview_vllm.simulation import VLLMEngines

with warnings.catch_warnings():  # of vLLM's imports
    warnings.simplefilter("ignore")
    ENGINES = VLLMEngines()
    V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
    base: Any = importlib.import_module(f"{V1}.base")
    block_pool: Any = importlib.import_module("vllm.v1.core.block_pool")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
logging.getLogger("vllm").setLevel(logging.ERROR)

Copies = list[tuple[bytes, int]]  # (key of a block, its place on the GPU) pairs
SEEDS = (0, 1, 2, 3, 5, 6, 7)  # each of them loads


# --- a right connector, the base of the faults below ---


@dataclass
class Meta(base.KVConnectorMetadata):  # type: ignore[misc]
    """The jobs that the scheduler's half passes to the worker's half."""

    stores: dict[str, Copies] = field(default_factory=dict)
    loads: dict[str, Copies] = field(default_factory=dict)


class HostConnector(base.KVConnectorBase_V1):  # type: ignore[misc]
    """Keeps the blocks of finished requests in host memory; copies end some steps later."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.block_size = int(vllm_config.cache_config.block_size)
        self.meta = Meta()
        self.stored: set[bytes] = set()
        self.storing: dict[str, tuple[int, Copies]] = {}
        self.first: dict[str, int] = {}
        self.loading: set[str] = set()
        self.num_resets = self.step = self.num_jobs = 0
        self.host: dict[bytes, list[Any]] = {}
        self.jobs: list[tuple[int, str, bool, Copies]] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> tuple[int, bool]:
        first = last = num_computed // self.block_size
        hashes = request.block_hashes[: (request.num_tokens - 1) // self.block_size]
        while last < len(hashes) and hashes[last] in self.stored:
            last += 1
        self.first[request.request_id] = first
        return (last - first) * self.block_size, last > first

    def update_state_after_alloc(self, request: Any, blocks: Any, num_tokens: int) -> None:
        if num_tokens:
            first, table = self.first[request.request_id], blocks.get_block_ids()[0]
            numbers = range(first, first + num_tokens // self.block_size)
            copies = [(request.block_hashes[n], table[n]) for n in numbers]
            self.meta.loads[request.request_id] = copies
            self.loading.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta, self.meta = self.meta, Meta()
        return meta

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, None]:
        num_full = min(request.num_computed_tokens, request.num_tokens - 1) // self.block_size
        copies = [
            (name, block)
            for name, block in zip(request.block_hashes[:num_full], block_ids, strict=False)
            if name not in self.stored and block
        ]
        if request.request_id in self.loading or not copies:
            return False, None
        self.meta.stores[request.request_id] = copies
        self.storing[request.request_id] = self.num_resets, copies
        return True, None

    def update_connector_output(self, connector_output: Any) -> None:
        for request_id in connector_output.finished_sending or ():
            began, copies = self.storing.pop(request_id, (-1, []))
            self.stored.update(name for name, _ in copies if began == self.num_resets)
        self.loading.difference_update(connector_output.finished_recving or ())

    def reset_cache(self) -> bool:
        self.stored.clear()
        self.num_resets += 1
        return True

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.layers = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request_id, copies in self._get_connector_metadata().loads.items():
            self.put(request_id, True, copies)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def put(self, request_id: str, is_load: bool, copies: Copies) -> None:
        self.num_jobs += 1
        self.jobs.append((self.step + self.num_jobs % 4, request_id, is_load, copies))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        for request_id, copies in self._get_connector_metadata().stores.items():
            self.put(request_id, False, copies)
        self.step += 1
        ended: dict[bool, set[str]] = {True: set(), False: set()}
        for job in [job for job in self.jobs if job[0] < self.step]:
            self.jobs.remove(job)
            _, request_id, is_load, copies = job
            for name, block in copies:
                if is_load:
                    for layer, page in zip(self.layers, self.host[name], strict=True):
                        layer[block] = page
                else:
                    self.host[name] = [layer[block].clone() for layer in self.layers]
            ended[is_load].add(request_id)
        return ended[False] or None, ended[True] or None


class ForgetsStores(HostConnector):
    """A faulty connector that announces its stores and never reports their end."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, super().get_finished(finished_req_ids)[1]


class LoadsTheNextBlock(HostConnector):
    """A faulty connector that loads each page into the next block."""

    def put(self, request_id: str, is_load: bool, copies: Copies) -> None:
        names = [name for name, _ in copies]
        blocks = [block for _, block in copies]
        turned = blocks[1:] + blocks[:1] if is_load else blocks
        super().put(request_id, is_load, list(zip(names, turned, strict=True)))


class StoresAgain(HostConnector):
    """The other child of a MultiConnector, which loads nothing and stores the blocks again."""

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> tuple[int, bool]:
        return 0, False

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, None]:
        self.stored.clear()
        return super().request_finished(request, block_ids)


class FreesWhatItStores(HostConnector):
    """A faulty connector that releases blocks to the engine before they are stored."""

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, None]:
        if super().request_finished(request, block_ids)[0]:
            _, copies = self.storing.pop(request.request_id)
            self.stored.update(name for name, _ in copies)
        return False, None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, super().get_finished(finished_req_ids)[1]


class StoresHalf(HostConnector):
    """A child that stores only the first half of the blocks, and so less than the other."""

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, None]:
        return super().request_finished(request, block_ids[: (len(block_ids) + 1) // 2])


def shipped(module: str, name: str) -> type[Any]:
    """Return one of vLLM's own connectors."""
    kind: type[Any] = getattr(importlib.import_module(f"{V1}.{module}"), name)
    return kind


def promising_more(kind: type[Any]) -> type[Any]:
    """Return a subclass with a fault, which promises one block more than it has."""

    class Broken(kind):  # type: ignore[misc]
        def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> Any:
            found, is_async = super().get_num_new_matched_tokens(request, num_computed)
            return (found + 16 if found else found), is_async

    return Broken


def multi(*children: str) -> dict[str, Any]:
    """Return the options of a MultiConnector over connectors of this file."""
    connectors = [
        {"kv_connector": name, "kv_connector_module_path": __name__, "kv_role": "kv_both"}
        for name in children
    ]
    return {"kv_transfer_config": {"kv_connector_extra_config": {"connectors": connectors}}}


def play(
    kind: type[Any], scenario: Scenario | int, options: dict[str, Any] | None = None
) -> SimulationResult:
    """Run a scenario, or the scenario of a seed, in vLLM's scheduler."""
    scenario = generate_scenario(scenario) if isinstance(scenario, int) else scenario
    return simulate(kind, scenario, options or {}, engines=ENGINES)


def require_right(
    kind: type[Any], scenario: Scenario | int, options: dict[str, Any] | None = None
) -> None:
    """Require a run without a failure in which the connector has loaded blocks."""
    result = play(kind, scenario, options)
    assert result.failure is None, result.failure
    assert result.coverage.get("loads"), "the connector never loaded, so the run proves nothing"


def turns(*between: Any, prompt: int = 66, **changes: Any) -> Scenario:
    """Return a scenario: a prompt, some events, its eviction from the GPU, and the prompt again."""
    events = (Add("first", 1, prompt, 2), Step(12), *between, Squeeze(100), Squeeze(0))
    return replace(
        Scenario(
            CacheGeometry.single(16),
            num_gpu_blocks=20,
            events=(*events, Add("again", 1, prompt, 2), Step(1)),
            max_tokens_per_step=128,
            decode_tokens=1,
        ),
        **changes,
    )


# --- the scheduler: requests start, end, are preempted and aborted, caches are reset ---


@pytest.mark.parametrize("seed", SEEDS)
def test_a_right_connector_runs_to_the_end(seed: int) -> None:
    require_right(HostConnector, seed)


@pytest.mark.parametrize("fault", [ForgetsStores, LoadsTheNextBlock, FreesWhatItStores])
def test_a_wrong_connector_is_seen(fault: type[Any]) -> None:
    assert any(play(fault, seed).failure for seed in SEEDS)


def test_an_abort_while_loading_frees_the_blocks() -> None:
    scenario = turns()
    require_right(HostConnector, scenario)
    for steps in (0, 1, 2):
        events = (*scenario.events, Step(steps), Abort("again"), Step(9))
        result = play(HostConnector, replace(scenario, events=events))
        assert result.failure is None, result.failure


def test_blocks_that_are_being_loaded_are_not_hit() -> None:
    """Control: an equal prompt hits them after the load has ended."""
    scenario = turns()
    for steps, hits in ((0, False), (6, True)):
        events = (*scenario.events, Step(steps), Add("twin", 1, 66, 2), Step(12))
        result = play(HostConnector, replace(scenario, events=events))
        assert result.failure is None, result.failure
        assert bool(result.coverage.get("tokens hit on the GPU")) is hits


def test_a_reset_removes_every_key() -> None:
    result = play(HostConnector, turns(Reset(), Step(2)))
    assert result.failure is None, result.failure
    assert not result.coverage.get("loads"), "keys from before the reset are removed"
    require_right(HostConnector, turns(Step(2)))


# --- several KV-cache groups, several steps in flight: kvview's own connector in vLLM ---


class LosesReports(StoreConnector):
    """A faulty connector that does not report the first copy that has ended."""

    def make_worker(self) -> Any:
        worker: Any = super().make_worker()
        get_finished = worker.get_finished
        worker.get_finished = lambda: list(get_finished())[1:]
        return worker


@pytest.mark.parametrize("seed", [2, 3, 6, 7])  # seeds with loads
def test_a_connector_of_several_groups_runs_to_the_end(seed: int) -> None:
    require_right(StoreConnector, seed)


def test_a_lost_report_is_seen() -> None:
    assert play(LosesReports, 0).failure is not None


# --- the connectors that vLLM ships ---

SHIPPED = [
    pytest.param(
        shipped("offloading_connector", "OffloadingConnector"),
        {"cpu_bytes_to_use": 1_000_000, "num_cpu_blocks": 30},
        id="OffloadingConnector",
    ),
    pytest.param(
        shipped("simple_cpu_offload_connector", "SimpleCPUOffloadConnector"),
        {"cpu_bytes_to_use": 1_000_000},
        id="SimpleCPUOffloadConnector",
    ),
    pytest.param(
        shipped("simple_cpu_offload_connector", "SimpleCPUOffloadConnector"),
        {"cpu_bytes_to_use": 1_000_000, "lazy_offload": True},
        id="SimpleCPUOffloadConnector-lazy",
    ),
    pytest.param(
        shipped("multi_connector", "MultiConnector"),
        multi("StoresHalf", "HostConnector"),
        id="MultiConnector",
    ),
]


@pytest.mark.parametrize(("kind", "options"), SHIPPED)
@pytest.mark.parametrize("seed", [0, 1, 3])
def test_a_shipped_connector_runs_to_the_end(
    kind: type[Any], options: dict[str, Any], seed: int
) -> None:
    require_right(kind, seed, options)


@pytest.mark.parametrize(("kind", "options"), SHIPPED)
def test_a_fault_in_a_shipped_connector_is_seen(kind: type[Any], options: dict[str, Any]) -> None:
    assert any(play(promising_more(kind), seed, options).failure for seed in range(4))


@pytest.mark.parametrize("between", [(), (Reset(),)], ids=["without a reset", "reset"])
def test_a_reset_with_jobs_in_flight(between: tuple[Any, ...]) -> None:  # vLLM #48090
    """Control: the same without the reset."""
    kind, options = SHIPPED[0].values
    scenario = turns(Add("second", 2, 66, 2), Step(3), *between, Step(6), Step(6))
    result = play(kind, scenario, options)  # type: ignore[arg-type]
    assert result.failure is None, result.failure


@pytest.mark.parametrize(
    "chunk",
    [
        pytest.param(128, id="whole"),
        pytest.param(
            32, id="chunked", marks=pytest.mark.xfail(strict=True, reason="vLLM #16928, PR 53314")
        ),
    ],
)
def test_the_example_connector_loads_the_whole_prefill(chunk: int) -> None:
    """Control: a prefill in one step."""
    kind = shipped("example_connector", "ExampleConnector")
    scenario = turns(prompt=75, max_tokens_per_step=chunk)
    events = (*scenario.events, Step(4))
    result = play(kind, replace(scenario, events=events), {"shared_storage_path": "{tmp}"})
    assert result.failure is None, result.failure
    assert result.coverage.get("tokens to load")


@pytest.mark.parametrize(
    "children",
    [
        pytest.param(["HostConnector"], id="one child"),
        pytest.param(
            ["HostConnector", "StoresAgain"],
            id="one loads, one stores",
            marks=pytest.mark.xfail(strict=True, reason="vLLM #46240"),
        ),
    ],
)
def test_an_abort_under_a_multi_connector(children: list[str]) -> None:
    """Control: the same abort with the child that loads, alone."""
    scenario = turns(Add("other", 2, 34, 2), Step(8), max_tokens_per_step=64)
    scenario = replace(scenario, events=(*scenario.events, Abort("again"), Step(9)))
    kind = shipped("multi_connector", "MultiConnector")
    result = play(kind, scenario, multi(*children))
    assert result.failure is None, result.failure
    assert result.coverage.get("hits")


# --- the block pool ---


class Pool:
    """vLLM's pool, called by its own public methods, for the checks of kvview."""

    null_block_id = 0
    capabilities = (
        *(Capability.CACHE, Capability.EVICT, Capability.RESET, Capability.CLOSE),
        *(Capability.IS_FREE, Capability.FREE_COUNT, Capability.FIND_CACHED, Capability.FREE_ORDER),
    )

    def __init__(self, num_blocks: int = 24) -> None:
        self.num_blocks = num_blocks
        self.pool = block_pool.BlockPool(num_blocks, True, hash_block_size=16)
        self.view = view_of(self.pool)

    def allocate(self, num_blocks: int) -> list[int]:
        return [block.block_id for block in self.pool.get_new_blocks(num_blocks)]

    def release(self, block_ids: Sequence[int]) -> None:
        self.pool.free_blocks([self.pool.blocks[number] for number in block_ids])

    def cache(self, block_ids: Sequence[int], hashes: Sequence[bytes], group_idx: int) -> None:
        for number, name in zip(block_ids, hashes, strict=True):
            request, block = SimpleNamespace(block_hashes=[name]), self.pool.blocks[number]
            self.pool.cache_full_blocks(request, [block], 0, 1, 16, group_idx)

    def evict(self, block_ids: Sequence[int]) -> None:
        self.pool.evict_blocks(set(block_ids))

    def reset(self) -> bool:
        return bool(self.pool.reset_prefix_cache())

    def close(self) -> Any:
        return self.view.close()


class ForgetfulPool(Pool):
    """A faulty pool, which frees all blocks of a call except the last."""

    def release(self, block_ids: Sequence[int]) -> None:
        super().release(block_ids[:-1] or block_ids)


LAWS = [f"POOL-{number}" for number in (1, 2, 3, 5, 6, 7, 10)]


def test_the_pool_counts_holds_and_has_a_fixed_order() -> None:
    """This includes a block that occurs twice in one free (vLLM #42571)."""
    report = run_checks(Pool, select=LAWS)
    assert not report.failures, [str(one.failure) for one in report.failures]
    passed = {one.check.law for one in report if one.outcome is Outcome.PASSED}
    assert passed >= set(LAWS)


def test_a_pool_that_forgets_is_seen() -> None:
    assert run_checks(ForgetfulPool, select=LAWS).failures


# --- the offloading manager ---

KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(6)]
HIT, MISS = LookupResult.HIT, LookupResult.MISS


class Manager:
    """vLLM's manager with four pages, called in the same way for every release."""

    def __init__(self) -> None:
        self.own = TranslatedManager(make_cpu_manager(4, "lru", enable_events=True))

    def store(self, *keys: Any, success: bool = True) -> list[Any] | None:
        """Return the evicted keys; None if the store is refused."""
        with self.own.lock:
            output = self.own.prepare_store(keys)
            if output is not None:
                self.own.complete_store(output.keys_to_store, success=success)
        return None if output is None else list(output.evicted_keys)

    def found(self) -> list[Any]:
        with self.own.lock:
            return [key for key in KEYS if self.own.lookup(key) is HIT]


def test_stored_keys_are_found_and_failed_ones_are_not() -> None:
    manager = Manager()
    manager.store(*KEYS[:2])
    assert manager.found() == KEYS[:2]  # vLLM #53498
    manager.store(KEYS[2], success=False)
    assert manager.found() == KEYS[:2]


def test_the_least_recently_used_key_is_evicted_first() -> None:
    manager = Manager()
    manager.store(*KEYS[:4])
    assert manager.store(KEYS[4]) == KEYS[:1]
    assert manager.found() == KEYS[1:5]


def test_keys_that_are_being_loaded_stay() -> None:
    manager = Manager()
    manager.store(*KEYS[:4])
    with manager.own.lock:
        spec = manager.own.prepare_load(KEYS[:4])
    assert isinstance(spec, CPULoadStoreSpec)
    assert len(set(spec.block_ids)) == 4, "each key has a page"
    assert manager.store(KEYS[4]) is None, "no page may be taken"
    with manager.own.lock:
        manager.own.complete_load(KEYS[:4])
    assert manager.store(KEYS[4]) is not None, "control: afterwards one may"


def test_events_advertise_the_keys_that_are_found() -> None:
    manager = Manager()
    events: list[Any] = []
    for keys in (KEYS[:3], KEYS[3:5], KEYS[5:], KEYS[:1]):
        manager.store(*keys)
        with manager.own.lock:
            events += manager.own.take_events()
        (advertised,) = fold_events(events).values()
        assert sorted(advertised) == manager.found()
