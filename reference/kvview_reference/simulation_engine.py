"""The engine of a simulated run: what the simulation asks of one, and the reference's.

Any engine that can say these values can be simulated. An engine of another floor is
built by a factory of its own, which it brings to ``check_connector``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvview import Connector, OffloadKey, make_offload_key
from kvview_reference.engine import Engine
from kvview_reference.pool import NULL_BLOCK_ID
from kvview_reference.request import Status, chain_hashes
from kvview_reference.simulation_scenario import Add, Scenario, make_request

PAGE_BYTES = 64
NUM_LAYERS = 2


class SimulationStats(Protocol):
    """Counters since the engine was built."""

    @property
    def requests(self) -> int:
        """Requests queued."""

    @property
    def finished(self) -> int:
        """Requests that ended by themselves."""

    @property
    def aborted(self) -> int:
        """Requests that were aborted."""

    @property
    def preemptions(self) -> int:
        """Times that a request lost its blocks."""

    @property
    def steps(self) -> int:
        """Scheduler steps."""

    @property
    def mismatches(self) -> int:
        """Blocks that a request read and that held other bytes than their hashes stand for."""


class SimulatedEngine(Protocol):
    """An engine under simulation.

    1. A full block that is computed holds the bytes that follow from its hash; what is
       loaded is overwritten before the load starts; what a request reads is compared.
    2. What the connector raises comes through unchanged.
    """

    @property
    def stats(self) -> SimulationStats:
        """Counters since the engine was built."""

    # --- what happens to it ---

    def add(self, add: Add, serial: int) -> None:
        """Queue a request.

        Args:
            add: What comes.
            serial: Tells what it generates from what others do.

        Raises:
            ConfigError: No engine would queue it: it can never fit, or its id is not
                free yet. Nothing changed.
        """

    def abort(self, request_id: str) -> None:
        """End an unfinished request early."""

    def step(self) -> None:
        """Run one scheduler step."""

    def squeeze(self, num_blocks: int) -> None:
        """Give back what was squeezed out before, and allocate this many, if as many are free."""

    def alias(self) -> bool:
        """Give the first cached block of a running request a second hash, if there is one."""

    def reset(self) -> bool:
        """Reset the caches; False when refused."""

    def shutdown(self) -> Mapping[int, int]:
        """Stop the connectors.

        Returns:
            References that they never gave back, ``{block_id: count}``.
        """

    # --- what is asked ---

    def unfinished(self) -> Mapping[str, str]:
        """Requests that are not finished, ``{request_id: "waiting", "loading" or "running"}``.

        Those that load come in the order in which they began to.
        """

    def has_work(self) -> bool:
        """Whether ``step`` has anything to do, the connectors' pending work included."""

    def expected_keys(self, request_id: str) -> dict[int, OffloadKey]:
        """Per block of a request that waits for loads, what must come into it.

        One that was aborted meanwhile is a request as well; empty for any other.
        """

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block included."""

    def ref_count(self, block_id: int) -> int:
        """References to a block, whoever has them."""

    def block_hashes(self, block_id: int) -> tuple[OffloadKey, ...]:
        """What a block holds."""

    def free_block_ids(self) -> Sequence[int]:
        """The free queue, next victim first."""

    def engine_refs(self) -> Counter[int]:
        """References by block of the requests and of what is squeezed out."""

    def held_blocks(self) -> Mapping[int, int]:
        """References by block that the connectors' views count."""


class EngineFactory(Protocol):
    """Builds the engine of each run."""

    @property
    def runs_side_by_side(self) -> bool:
        """Whether it takes several connectors; else they are joined to one before."""

    def fit(self, scenario: Scenario) -> tuple[Scenario, Sequence[str]]:
        """The nearest scenario that the engine can play.

        Returns:
            The scenario, and what was left out of it, in a few words each.
        """

    def build(
        self,
        scenario: Scenario,
        connectors: Sequence[Connector],
        *,
        owner: str,
        clock: Callable[[], float],
    ) -> SimulatedEngine:
        """Build an engine.

        Args:
            scenario: As fitted.
            connectors: What it runs; one when it does not take several.
            owner: Named in reports of the view.
            clock: Seconds, by which leases expire where the engine has them.
        """


class ReferenceEngines:
    """Builds reference engines."""

    runs_side_by_side = False

    def fit(self, scenario: Scenario) -> tuple[Scenario, Sequence[str]]:
        return scenario, ()

    def build(
        self,
        scenario: Scenario,
        connectors: Sequence[Connector],
        *,
        owner: str,
        clock: Callable[[], float],
    ) -> SimulatedEngine:
        (connector,) = connectors
        return ReferenceEngine(scenario, connector, owner, clock)


class ReferenceEngine:
    """The reference engine, with what the simulation does to it."""

    def __init__(
        self, scenario: Scenario, connector: Connector, owner: str, clock: Callable[[], float]
    ) -> None:
        self._geometry = scenario.geometry
        self._engine = Engine(
            scenario.geometry,
            connector,
            num_gpu_blocks=scenario.num_gpu_blocks,
            page_bytes=PAGE_BYTES,
            num_layers=NUM_LAYERS,
            max_running=scenario.max_running,
            max_tokens_per_step=scenario.max_tokens_per_step,
            decode_tokens=scenario.decode_tokens,
        )
        # Leases expire by steps, not by the clock of the machine.
        self._engine.view.now = clock
        self._engine.view.owner = owner
        self._pool = self._engine.kv_cache.pool
        self._squeezed: list[int] = []
        self._num_aliases = 0
        self.stats = self._engine.stats
        self.num_blocks = self._pool.num_blocks
        self.step = self._engine.step
        self.reset = self._engine.reset_cache
        self.shutdown = self._engine.shutdown
        self.has_work = self._engine.has_work
        self.ref_count = self._pool.ref_cnt
        self.block_hashes = self._pool.block_hashes
        self.free_block_ids = self._pool.free_block_ids
        self.held_blocks = self._engine.view.held_blocks

    def add(self, add: Add, serial: int) -> None:
        self._engine.add_request(make_request(add, self._geometry, serial))

    def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    def squeeze(self, num_blocks: int) -> None:
        pool = self._pool
        pool.free_blocks(self._squeezed)
        self._squeezed = pool.allocate_blocks(min(num_blocks, pool.num_free_blocks()))

    def alias(self) -> bool:
        for request in self._engine.running:
            for index, table in enumerate(self._engine.kv_cache.block_tables(request.request_id)):
                for block_id in table:
                    if block_id != NULL_BLOCK_ID and len(self.block_hashes(block_id)) == 1:
                        self._num_aliases += 1
                        self._pool.cache_blocks(
                            [block_id],
                            chain_hashes([f"alias {self._num_aliases}"]),
                            group_idx=index,
                            block_size=self._geometry.groups[index].block_size,
                        )
                        return True
        return False

    def unfinished(self) -> Mapping[str, str]:
        engine = self._engine
        requests = [*engine.waiting, *engine.running]
        for request_id in list(engine._loads):
            request = engine.loading_request(request_id)
            if request is not None and request.status is Status.LOADING:
                requests.append(request)
        return {request.request_id: request.status.name.lower() for request in requests}

    def expected_keys(self, request_id: str) -> dict[int, OffloadKey]:
        request = self._engine.loading_request(request_id)
        expected: dict[int, OffloadKey] = {}
        if request is None:
            return expected
        for index, table in enumerate(self._engine.kv_cache.block_tables(request_id)):
            for number, block_id in enumerate(table):
                if block_id != NULL_BLOCK_ID:
                    position = self._geometry.block_hash_index(index, number)
                    expected[block_id] = make_offload_key(request.block_hashes[position], index)
        return expected

    def engine_refs(self) -> Counter[int]:
        refs = Counter(self._engine.held_blocks())
        refs.update(self._squeezed)
        return refs
