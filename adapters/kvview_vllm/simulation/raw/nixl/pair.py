"""Two schedulers of vLLM with an unmodified NIXL connector, connected by the simulated network.

Both roles of the connector are vLLM's own. The NIXL library, the side channel and the clock are
replaced (:mod:`~kvview_vllm.simulation.raw.nixl.agents`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kvview import BlockIds, ConfigError
from kvview.handoff import Handoff
from kvview.testing.connector.scenario.scenario import Scenario
from kvview.testing.handoff.harness import EngineLife, TwoEngines
from kvview.testing.handoff.network import Fault, Network
from kvview_vllm.simulation.raw.call_recorder import CallRecorder
from kvview_vllm.simulation.raw.nixl.agents import Fabric
from kvview_vllm.simulation.raw.raw_engine import RawHarness, RawSettings
from kvview_vllm.simulation.raw.raw_scenarios import RawEngines
from kvview_vllm.simulation.raw.stand_ins import StandIns
from kvview_vllm.simulation.raw.transfer_config import split_options
from kvview_vllm.simulation.scheduler import capabilities

if TYPE_CHECKING:
    from kvview.testing.handoff.harness import PDHarness

_STEPS_LATER = 4.0  # seconds


def _name_the_model(config: Any) -> None:
    """Give both engines one model, because a handshake compares the models."""
    config.model_config.model = "kvview"


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
                f"{connector_class.__name__} cannot run in two simulated engines, because their "
                "network only replaces NIXL; check it with --pd --inference"
            )
        self._config = split_options(options)
        self._engines: Any = RawEngines(capabilities.engine_name())
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
        given = self._config
        extra = given.get("kv_connector_extra_config", {})
        config = {
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "recompute",
            **given,
            "engine_id": f"{life.me.engine_id}, {life.me.life}",  # vLLM's default is new per life
            "kv_connector_extra_config": {"kv_lease_duration": int(life.lease_seconds), **extra},
        }
        fabric = self._fabric
        settings = RawSettings(
            adjust=_name_the_model,
            clock=lambda: fabric.network.now,
            steps_after_work=_STEPS_LATER,
            plays_handoffs=True,
        )
        stand_ins = StandIns((), before_step=fabric.run_handshakes)
        with fabric.building(life):
            engine = RawHarness(scenario, self._class, config, CallRecorder(), stand_ins, settings)
            metadata = engine.worker.handshake_metadata()
            connector = engine.scheduler.real.connector
            connector.set_xfer_handshake_metadata_pp_aware({(0, 0): metadata})
        return engine

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
