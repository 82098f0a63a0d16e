"""The real ``Scheduler`` of the installed vLLM, run by the seeded simulation of connectors.

    from kvview.testing.connector import check_connector
    report = check_connector(MyConnector, engines=VLLMEngines())

The scheduler, its pool, ``MultiConnector`` and ``KVViewConnector`` are real and unmodified.

- VSIM-2 If the installed release cannot simulate a part of a scenario, this part **must** be named,
  and never dropped silently.

Source: :mod:`kvview_vllm.simulation.harness`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvview import (
    CacheGroup,
    ChunkedLocalAttention,
    Connector,
    ConnectorConfig,
    FullAttention,
    KVViewError,
    Mamba,
)
from kvview.connector.hook_errors import watch_hooks
from kvview.testing.connector.invariants import InvariantBroken
from kvview.testing.connector.scenario import NUM_LAYERS
from kvview_vllm.releases import engine_version, installed, probe_pool, reading, refusal
from kvview_vllm.releases.calls import (
    has_draft_models,
    make_block_pool,
    preemptions_drop_drafts,
    states_are_hit_with_the_rest,
    states_take_loads,
)
from kvview_vllm.releases.versions import importing
from kvview_vllm.simulation import scheduler as cpu_scheduler
from kvview_vllm.simulation.kvview.harness import Configs, KVViewHarness
from kvview_vllm.simulation.vllm_scheduler import named

if TYPE_CHECKING:
    from kvview.testing.connector.harness import ConnectorHarness, EngineFactory
    from kvview.testing.connector.result import SimulationResult
    from kvview.testing.connector.scenario import Scenario
    from kvview.testing.connector.stream import StepStream
    from kvview.testing.handoff.harness import EngineLife, PDHarness, TwoEngines
    from kvview.testing.handoff.tokens import RealCase
    from kvview.testing.token_runs import TokenCheck

_MOST_BLOCKS = 500


class VLLMEngines:
    """Builds a fresh scheduler of the installed vLLM for each run.

    Raises:
        VLLMNotInstalledError: No vLLM is installed.
        UnsupportedEngineError: The simulation cannot configure the installed vLLM.
    """

    def __init__(self) -> None:
        cpu_scheduler.prepare()
        self.name = f"vllm {engine_version()}"
        try:
            with importing():
                Configs([FullAttention(16)])
        except KVViewError:
            raise
        except Exception as error:
            found = " ".join(f"{type(error).__name__}: {error}".split())
            raise refusal("configuration", found, "a VllmConfig for the CPU") from error
        self._answers: dict[tuple[Any, ...], str | None] = {}

    @staticmethod
    def token_check() -> TokenCheck:
        """The check that runs real inference in the installed vLLM."""
        from kvview_vllm.inference import check_tokens

        return check_tokens

    @staticmethod
    def play_handoffs(
        connector_class: type, options: Mapping[str, Any], on_progress: Callable[[str], None]
    ) -> Iterator[RealCase]:
        """Run handoffs between two engines of the installed vLLM."""
        from kvview_vllm.handoff.cases import play_handoffs

        return play_handoffs(connector_class, options, on_progress)

    def fit(self, scenario: Scenario) -> tuple[Scenario, Sequence[str]]:
        """Remove the parts of a scenario that this release cannot simulate (VSIM-2)."""
        left_out: list[str] = []
        groups = self._fit_groups(scenario, left_out)
        several = "several KV-cache groups" if len(groups) > 1 else "one KV-cache group"
        hash_size = scenario.geometry.hash_block_size
        geometry = Configs(groups, hash_block_size=hash_size).geometry
        is_pipeline = len({*scenario.ranks}) > 1 or 0 < sum(scenario.ranks) <= NUM_LAYERS
        ranks = (1, NUM_LAYERS - 1) if is_pipeline else (NUM_LAYERS,) * len(scenario.ranks)
        fitted = replace(scenario, geometry=geometry, decode_tokens=1, group_pages=(), ranks=ranks)

        def leave_out(part: str, **changes: Any) -> None:
            nonlocal fitted
            fitted = replace(fitted, **changes)
            left_out.append(part)

        if scenario.num_gpu_blocks > _MOST_BLOCKS:
            part = f"a pool of more than {_MOST_BLOCKS} blocks: it takes long"
            leave_out(part, num_gpu_blocks=_MOST_BLOCKS)
        if scenario.decode_tokens > 1:
            leave_out("decode steps of several tokens")
        fewest = cpu_scheduler.fewest_tokens_per_step(groups)
        if scenario.max_tokens_per_step < fewest:
            part = f"steps of fewer than {fewest} tokens, with windows or chunks"
            leave_out(f"{part}: not all of their blocks are counted", max_tokens_per_step=fewest)
        if scenario.num_connectors > 1 and (why := self._why_not(fitted, num_connectors=2)):
            leave_out(f"two connectors with {several}: {why}", num_connectors=1)
        if not cpu_scheduler.can_load_after_hits(len(groups)):
            part = f"loads after a GPU hit, with {several}: one block may become two groups'"
            leave_out(part, loads_after_hits=False)
        self._fit_steps(fitted, several, leave_out)
        self._fit_drafts(fitted, several, leave_out)
        events = tuple(event for event in scenario.events if type(event).__name__ != "Alias")
        if len(events) < len(scenario.events) and not _can_alias():
            leave_out("a second hash of a block", events=events)
        if scenario.loads_may_fail and not cpu_scheduler.can_fail_loads(len(groups)):
            leave_out(f"loads that fail, with {several}", loads_may_fail=False)
        if not cpu_scheduler.can_reset_connectors():
            leave_out("resets of the connector")
        return fitted, left_out

    def _fit_steps(self, scenario: Scenario, several: str, leave_out: Callable[..., None]) -> None:
        """Remove several steps in flight, or loads between steps, if the release has neither."""
        if not cpu_scheduler.can_load_between_steps():
            within = "a load within a step waits for it"
            if scenario.steps_in_flight > 1:
                leave_out("several steps in flight", steps_in_flight=1)
            if scenario.compute_lags:
                leave_out(f"compute that lags: {within}", compute_lags=False)
            if scenario.worker_half == "whole_plans":
                leave_out(f"the unmodified worker half: {within}", worker_half="job_by_job")
            if scenario.loads_may_be_late:
                leave_out("loads that take longer than a step", loads_may_be_late=False)
            return
        most = min(scenario.steps_in_flight, cpu_scheduler.most_steps_in_flight())
        if most < scenario.steps_in_flight:
            leave_out(f"more than {most} steps in flight", steps_in_flight=most)
        if most > 1 and (why := self._why_not(scenario, steps_in_flight=most)):
            leave_out(f"{most} steps in flight with {several}: {why}", steps_in_flight=1)

    def _fit_drafts(self, scenario: Scenario, several: str, leave_out: Callable[..., None]) -> None:
        """Remove speculative decoding, or only its extra slots, if the release cannot run them."""
        if scenario.lookahead_tokens and not has_draft_models():
            leave_out("slots for lookahead", lookahead_tokens=0)
        steps, drafts = scenario.steps_in_flight, scenario.drafts
        if not drafts:
            return
        why: str | None = "a preempted request keeps its own"
        if preemptions_drop_drafts():
            why = self._why_not(scenario, steps_in_flight=steps, drafts=drafts)
        if why:
            part = f"draft tokens with {steps} steps in flight and {several}: {why}"
            leave_out(part, drafts=(), lookahead_tokens=0)

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
        clock: Callable[[], float],
        stream: StepStream | None = None,
    ) -> ConnectorHarness:
        """Build an engine."""
        return KVViewHarness(scenario, connectors, clock, stream)

    def fit_for_handoffs(self, scenario: Scenario) -> Scenario:
        """Keep only the first group, unless the release supports failed loads of several."""
        geometry = scenario.geometry
        if not cpu_scheduler.can_fail_loads(len(geometry.groups)):
            size = geometry.groups[0].block_size
            geometry = replace(geometry, scheduler_block_size=size, groups=geometry.groups[:1])
        fitted, _ = self.fit(replace(scenario, geometry=geometry))
        return fitted

    def build_for_handoffs(
        self, scenario: Scenario, connector: Connector, life: EngineLife
    ) -> PDHarness:
        """Build an engine that hands KV to others."""
        watch_hooks(connector)  # other exceptions are vLLM's (VSIM-1)
        return KVViewHarness(scenario, [connector], life.clock, life=life)

    def pair_of_own(self, connector_class: type, options: Mapping[str, Any]) -> TwoEngines:
        """Make two engines with an unmodified connector of vLLM."""
        from kvview_vllm.simulation.raw.nixl.pair import RawPair

        return RawPair(connector_class, options)

    def _fit_groups(self, scenario: Scenario, left_out: list[str]) -> tuple[CacheGroup, ...]:
        """Return the groups that this release serves, and record why others are excluded."""
        groups = scenario.geometry.groups
        if not self._why_not(scenario):
            return groups
        kept: list[int] = []
        # Full attention first: every release serves it.
        for index in sorted(range(len(groups)), key=lambda i: type(groups[i]) is not FullAttention):
            tried = sorted([*kept, index])
            geometry = replace(scenario.geometry, groups=tuple(groups[i] for i in tried))
            if why := self._why_not(scenario, geometry=geometry):
                left_out.append(f"{type(groups[index]).__name__} group: {why}")
            else:
                kept = tried
        return tuple(groups[i] for i in kept) or (FullAttention(groups[0].block_size),)

    def _why_not(self, scenario: Scenario, **changes: Any) -> str | None:
        """Return the problem that occurs with a scenario's groups; None without a problem.

        Args:
            scenario: The scenario, which is tried with one connector, one step in flight and no
                drafts.
            **changes: Fields that differ in the tried scenario.
        """
        plain: dict[str, Any] = {"num_connectors": 1, "steps_in_flight": 1, "drafts": ()}
        tried = replace(scenario, **plain | changes)
        has_slots = bool(tried.drafts and tried.lookahead_tokens)
        key = (
            *(tried.geometry.groups, tried.geometry.hash_block_size, tried.num_connectors),
            *(tried.steps_in_flight, tried.most_drafts, has_slots),
        )
        if key not in self._answers:
            self._answers[key] = _known_problem(tried.geometry.groups) or _try(tried)
        return self._answers[key]


def _known_problem(groups: Sequence[CacheGroup]) -> str | None:
    """Return the reason why this release does not serve these groups, if known."""
    chunked = [group for group in groups if isinstance(group, ChunkedLocalAttention)]
    if any(group.attention_chunk_size % group.block_size for group in chunked):
        return "a chunk ends inside a block, and vLLM hits prefixes that it cannot read"
    if any(type(group) is not FullAttention for group in groups) and (
        not installed().connector.cache_config_argument
    ):
        return "a connector gets no groups, and takes them for full attention"
    if not any(isinstance(group, Mamba) for group in groups):
        return None
    if not states_take_loads():
        return "no connector may load next to it in this release"
    if not states_are_hit_with_the_rest():
        return "with a connector vLLM takes the longest hit of one group for all groups"
    return None


def _try(scenario: Scenario) -> str | None:
    """Serve some requests with connectors that do nothing, and return the problem, if any."""
    from kvview.testing.connector.scenario import Add

    try:
        groups, steps_in_flight = scenario.geometry.groups, scenario.steps_in_flight
        with named("its configuration"):
            given = scenario.geometry.hash_block_size
            geometry = Configs(groups, hash_block_size=given).geometry
        size = geometry.hash_block_size
        if any(isinstance(group, Mamba) and group.block_size > size for group in groups):
            return "its blocks have several hashes, and vLLM copies states between blocks"
        connectors = [Connector(ConnectorConfig(geometry))] * scenario.num_connectors
        fewest = cpu_scheduler.fewest_tokens_per_step(groups)
        tried = replace(
            scenario,
            geometry=geometry,
            num_gpu_blocks=200,
            max_tokens_per_step=max(scenario.max_tokens_per_step, fewest),
        )
        engine = KVViewHarness(tried, connectors, clock=lambda: 0.0)
        size = geometry.scheduler_block_size
        for request_id in ("one", "two"):
            engine.add(Add(request_id, 1, 4 * size + 1, 2 * steps_in_flight), 1)
            while engine.has_work():
                engine.step()
        # A prefix whose first blocks are in use in some groups, and evicted in others.
        engine.add(Add("long", 1, 6 * size + 1, 3 * size), 1)
        for _ in range(4 * steps_in_flight):
            engine.step()
        engine.squeeze(200)
        engine.squeeze(0)
        for number in range(1, 5):
            engine.add(Add(f"part {number}", 1, number * size + 1, 2), 1)
        while engine.has_work():
            engine.step()
    except (InvariantBroken, KVViewError) as error:
        # Without numbers, because they differ from geometry to geometry.
        return " ".join(str(error.__cause__ or error).rpartition(": ")[2].split())[:160]
    if engine.stats.most_in_flight < steps_in_flight:
        return "it waits for each"
    return "a request reads wrong bytes" if engine.stats.mismatches else None


def _can_alias() -> bool:
    with reading("simulation", "a block pool"):
        return probe_pool(make_block_pool(2)).several_hashes


if TYPE_CHECKING:
    _: type[EngineFactory] = VLLMEngines
