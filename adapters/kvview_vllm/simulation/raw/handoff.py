"""Two schedulers of vLLM with an unmodified NIXL connector, connected by the simulated network.

Both roles of the connector are vLLM's own. The NIXL library, the side channel and the clock are
replaced (:mod:`~kvview_vllm.simulation.raw.nixl_agents`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kvview import BlockIds, ConfigError
from kvview.handoff import Handoff
from kvview.testing.connector.scenario import Scenario
from kvview.testing.handoff.harness import EngineLife, TwoEngines
from kvview.testing.handoff.network import Fault, Network
from kvview_vllm.releases import engine_version
from kvview_vllm.simulation import scheduler as cpu_scheduler
from kvview_vllm.simulation.engine import reads_vllm
from kvview_vllm.simulation.handoff import HandoffEvents
from kvview_vllm.simulation.raw.fit import RawEngines
from kvview_vllm.simulation.raw.harness import RawHarness
from kvview_vllm.simulation.raw.nixl_agents import Fabric
from kvview_vllm.simulation.raw.stand_ins import StandIns
from kvview_vllm.simulation.raw.target import split_options
from kvview_vllm.simulation.raw.token_bytes import RequestInStep, Wrong
from kvview_vllm.simulation.raw.watched import Watch

if TYPE_CHECKING:
    from kvview.testing.handoff.harness import PDHarness

_GARBAGE = 0x1BAD
_STEPS_LATER = 4  # seconds


@reads_vllm
class RawPDHarness(HandoffEvents, RawHarness):
    """One scheduler and one worker with a NIXL connector.

    Args:
        scenario: Sizes, as fitted.
        connector_class: The connector.
        transfer_config: Arguments of ``KVTransferConfig`` besides its class.
        life: Identity, wire and clock of the engine.
        fabric: The NIXL agents of the process.
    """

    def __init__(
        self,
        scenario: Scenario,
        connector_class: type,
        transfer_config: Mapping[str, Any],
        life: EngineLife,
        fabric: Fabric,
    ) -> None:
        self._fabric = fabric
        self._load_of: dict[str, RequestInStep] = {}
        self._num_wrong_reads = 0
        self._loaded: set[str] = set()  # requests whose load was right
        self._steps_until = 0.0
        extra = transfer_config.get("kv_connector_extra_config", {})
        config = {
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "recompute",
            **transfer_config,
            "engine_id": f"{life.me.engine_id}, {life.me.life}",  # vLLM's default is new per life
            "kv_connector_extra_config": {"kv_lease_duration": int(life.lease_seconds), **extra},
        }
        with fabric.building(life):
            super().__init__(scenario, connector_class, config, Watch(), StandIns(()))
            metadata = self.worker.handshake_metadata()
            self._scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): metadata})

    @override
    def _make_config(self, scenario: Scenario, transfer_config: dict[str, Any] | None) -> Any:
        config = super()._make_config(scenario, transfer_config)
        config.model_config.model = "kvview"  # a handshake compares the models of both engines
        return config

    # --- queries ---

    @override
    def take_offered(self) -> Mapping[str, tuple[Mapping[str, Any], BlockIds]]:
        """Return the offers, with only the blocks that their requests still have."""
        offered = super().take_offered()
        return {
            name: (params, self._manager.get_block_ids(name))
            for name, (params, _) in offered.items()
        }

    @override
    def engine_refs(self) -> Any:
        """Return the references except those of finished prompts, which the connector holds."""
        refs = super().engine_refs()
        for name in self.finished_requests():
            if name in self._prefills:
                for table in self._manager.get_block_ids(name):
                    refs.subtract(block for block in table if block)
        return +refs

    def num_wrong_blocks(self) -> int:
        """Count the reads of wrong bytes by requests without a successful load."""
        return self._num_wrong_reads

    @override
    def has_work(self) -> bool:
        """Whether the engine must step; it also steps for a while after its work has ended."""
        now = self._fabric.network.now
        if super().has_work() or self._has_requests():
            self._steps_until = now + _STEPS_LATER
        return now < self._steps_until

    @override
    def shutdown(self) -> Mapping[int, int]:
        """Shut both roles down; the blocks of open offers do not count as leaked."""
        super().shutdown()
        refs = {block.block_id: block.ref_cnt for block in self._pool.blocks[1:]}
        return +(Counter(refs) - super().engine_refs())

    # --- one step ---

    @override
    def step(self) -> None:
        self._fabric.run_handshakes()
        super().step()

    @override
    def _overwrite(self, block_ids: Sequence[int]) -> None:
        """Overwrite blocks, as another request would after their allocation."""
        for slots in self.worker.caches.slots:
            slots[list(block_ids)] = _GARBAGE

    @override
    def _loads(self) -> list[RequestInStep]:
        loads = super()._loads()
        self._load_of |= {load.request_id: load for load in loads}
        return loads

    @override
    def _take_in(self) -> None:
        super()._take_in()
        self._loaded &= {*self.unfinished()}

    @override
    def _check_loads(self, transfers: Any) -> None:
        invalid = {*cpu_scheduler.invalid_blocks(transfers)}
        failed = cpu_scheduler.failed_requests(transfers)
        for name in (transfers and transfers.finished_recving) or ():
            load = self._load_of.pop(name)
            blocks = {block for table in load.tables for block in table}
            if name in failed or name not in self.unfinished() or not invalid.isdisjoint(blocks):
                continue
            self.num_loaded_blocks += len(blocks)
            self._loaded.add(name)
            self.stats.mismatches += not self.worker.holds(load)

    @override
    def _raise_wrong(self, wrong: Wrong) -> None:
        if wrong.request_id in self._loaded:  # of a block that the load does not have
            self.stats.mismatches += 1
        else:
            self._num_wrong_reads += 1


class RawPair(TwoEngines):
    """Two engines with a NIXL connector.

    Args:
        connector_class: The connector.
        options: Options of the connector, as for the simulation of one engine.
    """

    capabilities = frozenset()
    faults: Sequence[Fault] = ("lose", "late", "slow")
    names_are_unique = True
    serves_itself = False
    renews_leases = True
    laws_of_errors: Mapping[str, str] = {}  # an exception of a method
    replaced = (
        "the NIXL library, the side channel and the clock (no message is cut, changed or repeated)",
    )

    def __init__(self, connector_class: type, options: Mapping[str, Any]) -> None:
        super().__init__(connector_class, None, options)
        if "NixlPullConnector" not in {kind.__name__ for kind in connector_class.__mro__}:
            raise ConfigError(
                f"{connector_class.__name__} is a connector of vLLM, of which two schedulers play "
                f"NixlConnector only, because the simulated network replaces only NIXL; check it "
                f"with --pd --inference"
            )
        self._config = split_options(options)
        self._engines: Any = RawEngines(f"vllm {engine_version()}")
        self._stack = ExitStack()

    @override
    def fit(self, scenario: Scenario) -> Scenario:
        fitted: Scenario = self._engines.fit(replace(scenario, ranks=()))[0]
        return fitted

    @override
    def start(
        self, scenarios: Mapping[str, Scenario], network: Network, lease_seconds: float
    ) -> None:
        self._fabric = Fabric(network)
        self._stack.enter_context(self._fabric.installed())
        super().start(scenarios, network, lease_seconds)

    @override
    def build(self, scenario: Scenario, life: EngineLife) -> PDHarness:
        return RawPDHarness(scenario, self._class, self._config, life, self._fabric)

    @override
    def close(self) -> None:
        self._stack.close()

    @override
    def address(self, name: str) -> str:
        return f"{name}:{1 + ord(name)}"

    @override
    def read_handoff(self, params: Mapping[str, Any], num_tokens: int) -> Handoff:
        """Read vLLM's parameters, which contain neither the prefix nor the layout."""
        engine, _, life = params["remote_engine_id"].partition(", ")
        address = f"{params['remote_host']}:{params['remote_port']}"
        return Handoff(engine, life, address, 0, num_tokens, "", "")

    @override
    def offered_blocks(self, handoff: object, geometry: object, tables: BlockIds) -> set[int]:
        """Return all blocks of the offer, because vLLM frees the blocks of a request together."""
        return {block for table in tables for block in table if block}

    @override
    def entries(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: value for name, value in params.items() if name.startswith("remote_")}
