"""The real ``Scheduler`` of the installed vLLM, run by the seeded simulation of connectors.

    from kvview.testing.connector import check_connector
    report = check_connector(MyConnector, engines=VLLMEngines())

The scheduler, its pool, ``MultiConnector`` and ``KVViewConnector`` are real and unmodified.

- VSIM-2 If the installed release cannot simulate a part of a scenario, this part **must** be named,
  and never dropped silently.

Source: :mod:`kvview_vllm.simulation.engine_core`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvview import Connector, FullAttention, KVViewError
from kvview.connector.hook_errors import watch_hooks
from kvview_vllm.releases import refusal
from kvview_vllm.releases.compat.versions import importing
from kvview_vllm.simulation.kvview.kvview_engine import Configs, KVViewHarness
from kvview_vllm.simulation.kvview.release_fit import KVViewFit
from kvview_vllm.simulation.scheduler import capabilities, cpu_scheduler

if TYPE_CHECKING:
    from kvview.testing.connector.result import SimulationResult
    from kvview.testing.connector.run.compute_stream import StepStream
    from kvview.testing.connector.run.engine import EngineFactory, SimulatedEngine
    from kvview.testing.connector.scenario.scenario import Scenario
    from kvview.testing.handoff.harness import EngineLife, PDHarness, TwoEngines
    from kvview.testing.repetition import Replay
    from kvview.testing.token_runs import TokenCheck
    from kvview_vllm.handoff.cases import RealCase


class VLLMEngines:
    """Builds a fresh scheduler of the installed vLLM for each run.

    Raises:
        VLLMNotInstalledError: No vLLM is installed.
        UnsupportedEngineError: The simulation cannot configure the installed vLLM.
    """

    laws_of_own = (
        *("CONN-2", "CONN-3", "CONN-4", "CONN-5", "CONN-10", "EVENT-1", "EVENT-2"),
        *("POOL-1", "POOL-2", "POOL-4", "XFER-1"),
    )

    def __init__(self) -> None:
        cpu_scheduler.prepare()
        self.name = capabilities.engine_name()
        try:
            with importing():
                Configs([FullAttention(16)])
        except KVViewError:
            raise
        except Exception as error:
            found = " ".join(f"{type(error).__name__}: {error}".split())
            raise refusal("configuration", found, "a VllmConfig for the CPU") from error
        self._fit = KVViewFit()

    @staticmethod
    def token_check() -> TokenCheck:
        """The check that runs real inference in the installed vLLM."""
        from kvview_vllm.inference import check_tokens

        return check_tokens

    @staticmethod
    def read_replay(path: str) -> Replay:
        """Make the scenarios of an incident that a recorder in a server wrote."""
        from kvview_vllm.recorder.incident import read_incident
        from kvview_vllm.recorder.played import make_replay

        return make_replay(read_incident(path))

    @staticmethod
    def play_handoffs(
        connector_class: type, options: Mapping[str, Any], on_progress: Callable[[str], None]
    ) -> Iterator[RealCase]:
        """Run handoffs between two engines of the installed vLLM."""
        from kvview_vllm.handoff.cases import play_handoffs

        return play_handoffs(connector_class, options, on_progress)

    def fit(self, scenario: Scenario) -> tuple[Scenario, Sequence[str]]:
        """Remove the parts of a scenario that this release cannot simulate (VSIM-2)."""
        return self._fit.fit(scenario)

    def simulate_own(
        self, connector_class: type, scenario: Scenario, options: Mapping[str, Any]
    ) -> SimulationResult:
        """Run an unmodified ``KVConnectorBase_V1`` (:mod:`kvview_vllm.simulation.raw`)."""
        from kvview_vllm.simulation.raw import RawRun

        return RawRun(connector_class, scenario, options).run()

    def judge_own(
        self, connector_class: type, result: SimulationResult, options: Mapping[str, Any]
    ) -> SimulationResult:
        """Determine whether the connector caused a failure (VSIM-6)."""
        from kvview_vllm.simulation.raw import judge

        return judge(connector_class, result, options)

    def build(
        self,
        scenario: Scenario,
        connectors: Sequence[Connector],
        *,
        owner: str,
        stream: StepStream | None = None,
    ) -> SimulatedEngine:
        """Build an engine."""
        return KVViewHarness(scenario, connectors, stream)

    def fit_for_handoffs(self, scenario: Scenario) -> Scenario:
        """Keep only the first group, unless the release supports failed loads of several."""
        geometry = scenario.geometry
        if not capabilities.can_fail_loads(len(geometry.groups)):
            size = geometry.groups[0].block_size
            geometry = replace(geometry, scheduler_block_size=size, groups=geometry.groups[:1])
        fitted, _ = self.fit(replace(scenario, geometry=geometry))
        return fitted

    def build_for_handoffs(
        self, scenario: Scenario, connector: Connector, life: EngineLife
    ) -> PDHarness:
        """Build an engine that hands KV to others."""
        watch_hooks(connector)  # other exceptions are vLLM's (VSIM-1)
        return KVViewHarness(scenario, [connector], life=life)

    def pair_of_own(self, connector_class: type, options: Mapping[str, Any]) -> TwoEngines:
        """Make two engines with an unmodified connector of vLLM."""
        from kvview_vllm.simulation.raw.nixl.pair import RawPair

        return RawPair(connector_class, options)


if TYPE_CHECKING:
    _: type[EngineFactory] = VLLMEngines
