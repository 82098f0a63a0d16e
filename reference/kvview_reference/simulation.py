"""The reference engine in the simulation of ``kvview check``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kvview import (
    BlockIds,
    CacheGeometry,
    CanonicalKVCaches,
    ConfigError,
    Connector,
    OffloadKey,
    SchedulerConnector,
    StepPlan,
    TransferResult,
    WorkerConnector,
    make_offload_key,
)
from kvview.connector.job_tracker import JobTracker
from kvview.handoff import HandoffWorker, Peer, Wire
from kvview.testing.connector.scenario.scenario import (
    NUM_LAYERS,
    PAGE_BYTES,
    Add,
    Scenario,
)
from kvview_reference.connector import SideBySide
from kvview_reference.engine import Engine
from kvview_reference.engine.request import Request, Status, chain_hashes
from kvview_reference.free_queue import NULL_BLOCK_ID
from kvview_reference.handoff.engine import PDEngine

if TYPE_CHECKING:
    from kvview.testing import OffloadingConformance
    from kvview.testing.connector.run.compute_stream import StepStream
    from kvview.testing.connector.run.engine import EngineFactory, SimulatedEngine
    from kvview.testing.handoff.harness import EngineLife, PDHarness
    from kvview_reference.offloading import CachePolicy


class ReferenceEngines:
    """Builds reference engines."""

    name = "reference"

    def fit(self, scenario: Scenario) -> tuple[Scenario, Sequence[str]]:
        """Return the nearest scenario that the engine can simulate."""
        return replace(scenario, other_runner=False), ()

    def build(
        self,
        scenario: Scenario,
        connectors: Sequence[Connector],
        *,
        owner: str,
        stream: StepStream | None = None,
    ) -> SimulatedEngine:
        """Build an engine."""
        connector = connectors[0] if len(connectors) == 1 else SideBySide(connectors)
        if scenario.ranks:
            connector = _OnRanks(connector, scenario.ranks)
        return ReferenceConnectorHarness(scenario, connector, owner, stream)

    def fit_for_handoffs(self, scenario: Scenario) -> Scenario:
        """Return the nearest scenario that two engines can simulate."""
        return scenario

    def build_for_handoffs(
        self, scenario: Scenario, connector: Connector, life: EngineLife
    ) -> PDHarness:
        """Build an engine that passes KV to other engines."""
        return ReferencePDHarness(scenario, connector, life)

    def suite_of_policy(self, policy: type[CachePolicy]) -> type[OffloadingConformance]:
        """Make the suite of a manager with a cache policy."""
        from kvview_reference.harness import PolicyManager
        from kvview_reference.offloading.policies import register_policy

        name = f"{policy.__module__}:{policy.__qualname__}"
        register_policy(name, policy, replace=True)
        return type("OfPolicy", (PolicyManager,), {"policy": name})


class _OnRanks(Connector):
    """A wrapper of a built connector that makes a worker half for each rank.

    Args:
        connector: The connector.
        ranks: Number of tensors of each rank.
    """

    def __init__(self, connector: Connector, ranks: Sequence[int]) -> None:
        super().__init__(connector.config)
        self._connector = connector
        self._ranks = ranks

    @override
    def make_scheduler(self) -> SchedulerConnector:
        return self._connector.make_scheduler()

    @override
    def make_worker(self) -> WorkerConnector:
        return _RankedWorker(self._make_halves(), self._ranks)

    def _make_halves(self) -> Sequence[WorkerConnector]:
        return [self._connector.make_worker() for _ in self._ranks]


class _RankedWorker(WorkerConnector):
    """The worker halves of all ranks, with separate tensors; a job must end on each rank."""

    def __init__(self, halves: Sequence[WorkerConnector], ranks: Sequence[int]) -> None:
        self._halves = halves
        self._ranks = ranks
        self._jobs = JobTracker(len(halves))

    @override
    def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
        first = 0
        for rank, (half, number) in enumerate(zip(self._halves, self._ranks, strict=True)):
            own = range(first, first + number)
            refs = [
                [replace(r, tensor_idx=r.tensor_idx - first) for r in group if r.tensor_idx in own]
                for group in kv_caches.group_data_refs
            ]
            tensors = kv_caches.tensors[own.start : own.stop]
            half.register_kv_caches(
                replace(kv_caches, tensors=tensors, group_data_refs=refs, rank=rank)
            )
            first = own.stop

    @override
    def start_plan(self, plan: StepPlan) -> None:
        self._jobs.begin(plan)
        for half in self._halves:
            half.start_plan(plan)

    @override
    def get_finished(self) -> list[TransferResult]:
        return [
            ended.result
            for rank, half in enumerate(self._halves)
            for result in half.get_finished()
            if (ended := self._jobs.end(result, rank)) is not None
        ]

    @override
    def wait(self, job_ids: Sequence[int]) -> None:
        for half in self._halves:
            half.wait(job_ids)

    @override
    def shutdown(self) -> None:
        for half in self._halves:
            half.shutdown()


class _HandoffsOnRanks(_OnRanks):
    """A wrapper like :class:`_OnRanks`, for handoffs, with a wire for each rank."""

    def __init__(self, connector: Connector, ranks: Sequence[int], wires: Sequence[Wire]) -> None:
        super().__init__(connector, ranks)
        self._wires = wires

    @override
    def make_worker(self) -> WorkerConnector:
        return _RankedHandoffs(self._make_halves(), self._ranks, self._wires)


class _RankedHandoffs(_RankedWorker, HandoffWorker):
    def __init__(
        self, halves: Sequence[WorkerConnector], ranks: Sequence[int], wires: Sequence[Wire]
    ) -> None:
        super().__init__(halves, ranks)
        self._wires = wires

    @override
    def bind_wire(self, me: Peer, wire: Wire, lease_seconds: float) -> None:
        for half, own in zip(self._halves, self._wires, strict=True):
            assert isinstance(half, HandoffWorker), "it has the hooks for handoffs"
            half.bind_wire(me, own, lease_seconds)


class ReferenceConnectorHarness:
    """The reference engine, with interventions such as resets, squeezes and second hashes."""

    engine_class: type[Engine] = Engine

    def __init__(
        self,
        scenario: Scenario,
        connector: Connector,
        owner: str,
        stream: StepStream | None,
    ) -> None:
        self._geometry = scenario.geometry
        self._engine = self.engine_class(
            scenario.geometry,
            connector,
            num_gpu_blocks=scenario.num_gpu_blocks,
            page_bytes=PAGE_BYTES,
            num_layers=NUM_LAYERS,
            group_pages=scenario.group_pages,
            max_running=scenario.max_running,
            max_tokens_per_step=scenario.max_tokens_per_step,
            decode_tokens=scenario.decode_tokens,
            drafts=scenario.drafts,
            lookahead_tokens=scenario.lookahead_tokens,
            steps_in_flight=scenario.steps_in_flight,
            stream=stream,
            pin_budget=scenario.pin_budget,
        )
        self._engine.view.owner = owner
        self._pool = self._engine.kv_cache.pool
        self._squeezed: list[int] = []
        self._num_aliases = 0
        self._added: dict[str, Request] = {}  # the last request with each id
        self.stats = self._engine.stats
        self.num_blocks = self._pool.num_blocks
        self.step = self._engine.step
        self.shutdown = self._engine.shutdown
        self.has_work = self._engine.has_work
        self.ref_counts = self._pool.ref_counts
        self.block_keys = self._pool.block_keys
        self.free_block_ids = self._pool.free_block_ids
        self.held_blocks = self._engine.view.held_blocks

    def add(self, add: Add, serial: int) -> None:
        """Queue a request."""
        before = None
        if add.continues is not None and (before := self._added.get(add.continues)) is None:
            raise ConfigError(f"request {add.continues!r} was never added, so it has no next turn")
        request = _make_request(add, self._geometry, serial, before)
        self._engine.add_request(request)
        self._added[add.request_id] = request

    def abort(self, request_id: str) -> None:
        """End an unfinished request early."""
        self._engine.abort(request_id)

    def reset(self, *, after_reports: bool = False) -> bool:
        """Reset the caches, and return whether the engine accepted the reset."""
        if after_reports:
            self._engine.take_reports()
        return self._engine.reset_cache()

    def squeeze(self, num_blocks: int) -> None:
        """Free the blocks of the last squeeze, then allocate up to this number of free blocks."""
        pool = self._pool
        pool.free_blocks(self._squeezed)
        self._squeezed = pool.allocate_blocks(min(num_blocks, pool.num_free_blocks()))

    def alias(self) -> bool:
        """Give a second hash to the first cached block of a running request, if there is any."""
        for request in self._engine.running:
            for index, table in enumerate(self._engine.kv_cache.block_tables(request.request_id)):
                for block_id in table:
                    if block_id != NULL_BLOCK_ID and len(self.block_keys([block_id])[0]) == 1:
                        self._num_aliases += 1
                        self._pool.cache_blocks(
                            [block_id],
                            chain_hashes([f"alias {self._num_aliases}"]),
                            group_idx=index,
                            block_size=self._geometry.groups[index].block_size,
                        )
                        return True
        return False

    @property
    def mismatch(self) -> str:
        """Describe the latest block with wrong bytes: the first difference and the KV's key."""
        return self._engine.kv_bytes.mismatch

    @property
    def wrong_block(self) -> tuple[int, OffloadKey] | None:
        """The block that ``mismatch`` describes, and its key; None if it is not known."""
        return self._engine.kv_bytes.wrong_block

    def unfinished(self) -> Mapping[str, str]:
        """Return unfinished requests, ``{request_id: "waiting", "loading" or "running"}``."""
        engine = self._engine
        requests = [*engine.waiting, *engine.running]
        for request_id in list(engine._loads):
            request = engine.loading_request(request_id)
            if request is not None and request.status is Status.LOADING:
                requests.append(request)
        return {request.request_id: request.status.name.lower() for request in requests}

    def expected_keys(self, request_id: str) -> dict[int, OffloadKey]:
        """Return the key to load into each block of a request that waits for loads."""
        request = self._engine.loading_request(request_id)
        expected: dict[int, OffloadKey] = {}
        if request is None:
            return expected
        for index, table in enumerate(self._engine.kv_cache.block_tables(request_id)):
            for number, block_id in enumerate(table):
                position = self._geometry.block_hash_index(index, number)
                if block_id != NULL_BLOCK_ID and position < len(request.block_hashes):
                    expected[block_id] = make_offload_key(request.block_hashes[position], index)
        return expected

    def engine_refs(self) -> Counter[int]:
        """Return the references of requests and of the squeeze, by block."""
        refs = Counter(self._engine.held_blocks())
        refs.update(self._squeezed)
        return refs


class ReferencePDHarness(ReferenceConnectorHarness):
    """The engine in both roles, with the interventions of the simulation."""

    engine_class = PDEngine
    _engine: PDEngine

    def __init__(self, scenario: Scenario, connector: Connector, life: EngineLife) -> None:
        name = type(connector).__name__
        if scenario.ranks:
            connector = _HandoffsOnRanks(connector, scenario.ranks, life.wires)
        super().__init__(scenario, connector, name, None)
        self._engine.bind_handoffs(life.me, life.wires[0], life.lease_seconds)

    def add_prefill(self, add: Add, serial: int) -> None:
        """Queue a request whose KV is offered when it has finished."""
        self._engine.add_prefill(_make_request(add, self._geometry, serial, None))

    def add_decode(self, add: Add, serial: int, params: Mapping[str, Any]) -> None:
        """Queue a request with the parameters of a handoff."""
        self._engine.add_decode(_make_request(add, self._geometry, serial, None), params)

    def take_offered(self) -> dict[str, tuple[Mapping[str, Any], BlockIds]]:
        """Return the handoffs offered since the last call, by request id."""
        offered, self._engine.offered = self._engine.offered, {}
        return offered

    @property
    def num_loaded_blocks(self) -> int:
        """Return the number of blocks that requests have loaded."""
        return self._engine.stats.cpu_hit_blocks

    def num_wrong_blocks(self) -> int:
        """Count the blocks whose bytes their owner has not written.

        The expected bytes of a cached block are derived from its key, and those of a squeezed block
        are the bytes that the squeeze wrote.
        """
        blocks = range(1, self.num_blocks)
        keys = zip(blocks, self.block_keys(blocks), strict=True)
        cached = [(block, of_block[0]) for block, of_block in keys if of_block]
        kv_bytes = self._engine.kv_bytes
        num_wrong = kv_bytes.count_mismatches([b for b, _ in cached], [key for _, key in cached])
        return num_wrong + kv_bytes.count_not_poisoned(self._squeezed)

    @override
    def squeeze(self, num_blocks: int) -> None:
        """Allocate blocks for another owner, and overwrite them."""
        super().squeeze(num_blocks)
        self._engine.kv_bytes.poison(self._squeezed)


def _make_request(
    add: Add, geometry: CacheGeometry, serial: int, before: Request | None
) -> Request:
    """Make the request that an event adds.

    Args:
        add: The event.
        geometry: The geometry, for the hash block size.
        serial: Number that makes the generated tokens differ from the tokens of other requests.
        before: The previous turn, if the request continues a conversation.
    """
    size = geometry.hash_block_size
    if before is not None:
        new_ids = (f"{add.family}/{i}" for i in count())
        request = before.next_turn(
            add.request_id,
            add.num_prompt_tokens,
            add.num_output_tokens,
            new_ids,
            serial,
            add.any_params,
        )
        request.stops_after = add.stops_after
        return request
    full = add.num_prompt_tokens // size
    ids = [i if i < add.num_shared_blocks else f"{add.family}/{i}" for i in range(full)]
    return Request(
        add.request_id,
        add.num_prompt_tokens,
        add.num_output_tokens,
        size,
        chain_hashes(ids),
        stops_after=add.stops_after,
        transfer_params=add.any_params,
        _serial=serial,
    )


if TYPE_CHECKING:
    _: type[EngineFactory] = ReferenceEngines
