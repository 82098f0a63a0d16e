"""Scenarios for connectors of kvview, without the parts that the installed release cannot simulate.

A part whose support no table states is tried once, with connectors that do nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from kvview.testing.connector.judge.invariants import InvariantBroken
from kvview.testing.connector.scenario.scenario import NUM_LAYERS, SecondHash
from kvview_vllm.releases import installed, probe_pool, reading
from kvview_vllm.releases.compat.calls import (
    has_draft_models,
    make_block_pool,
    preemptions_drop_drafts,
    states_are_hit_with_the_rest,
    states_take_loads,
)
from kvview_vllm.simulation.fitting import Fitting
from kvview_vllm.simulation.kvview.kvview_engine import Configs, KVViewHarness
from kvview_vllm.simulation.scheduler import capabilities
from kvview_vllm.simulation.scheduler.vllm_scheduler import named

if TYPE_CHECKING:
    from kvview.testing.connector.scenario.scenario import Scenario

_MOST_BLOCKS = 500


class KVViewFit:
    """Fits scenarios to the installed release, and remembers the results of trials."""

    def __init__(self) -> None:
        self._problems: dict[tuple[Any, ...], str | None] = {}

    def fit(self, scenario: Scenario) -> tuple[Scenario, Sequence[str]]:
        """Remove the parts of a scenario that this release cannot simulate (VSIM-2)."""
        fitting = Fitting(scenario)
        groups = self._fit_groups(scenario, fitting.left_out)
        several = "several KV-cache groups" if len(groups) > 1 else "one KV-cache group"
        hash_size = scenario.geometry.hash_block_size
        is_pipeline = len({*scenario.ranks}) > 1 or 0 < sum(scenario.ranks) <= NUM_LAYERS
        fitting.change(
            geometry=Configs(groups, hash_block_size=hash_size).geometry,
            ranks=(1, NUM_LAYERS - 1) if is_pipeline else (NUM_LAYERS,) * len(scenario.ranks),
        )
        fitting.limit_pool(_MOST_BLOCKS)
        fitting.drop(scenario.decode_tokens > 1, "decode steps of several tokens")
        fewest = capabilities.fewest_tokens_per_step(groups)
        fitting.drop(
            scenario.max_tokens_per_step < fewest,
            f"steps of fewer than {fewest} tokens, with windows or chunks: not all of their blocks "
            f"are counted",
            max_tokens_per_step=fewest,
        )
        if scenario.num_connectors > 1:
            why = self._why_not(fitting.scenario, num_connectors=2)
            fitting.drop(why, f"two connectors with {several}: {why}", num_connectors=1)
        fitting.drop(
            not capabilities.can_load_after_hits(len(groups)),
            f"loads after a GPU hit, with {several}: one block may become two groups'",
            loads_after_hits=False,
        )
        self._fit_steps(fitting, several)
        self._fit_drafts(fitting, several)
        if any(isinstance(event, SecondHash) for event in scenario.events) and not _can_alias():
            fitting.drop_aliases()
        fitting.drop(
            scenario.loads_may_fail and not capabilities.can_fail_loads(len(groups)),
            f"loads that fail, with {several}",
            loads_may_fail=False,
        )
        fitting.drop(not capabilities.can_reset_connectors(), "resets of the connector")
        return fitting.scenario, fitting.left_out

    def _fit_steps(self, fitting: Fitting, several: str) -> None:
        """Remove several steps in flight, or loads between steps, if the release has neither."""
        scenario = fitting.scenario
        if not capabilities.can_load_between_steps():
            within = "a load within a step waits for it"
            has_plans = scenario.worker_half == "whole_plans"
            fitting.drop(scenario.steps_in_flight > 1, "several steps in flight", steps_in_flight=1)
            fitting.drop(scenario.compute_lags, f"compute that lags: {within}", compute_lags=False)
            fitting.drop(
                has_plans, f"the unmodified worker half: {within}", worker_half="job_by_job"
            )
            fitting.drop(
                scenario.loads_may_be_late,
                "loads that take longer than a step",
                loads_may_be_late=False,
            )
            fitting.drop(
                scenario.loads_may_fail and scenario.rounds > 1,
                "loads that fail within a step in long runs: vLLM takes a block that another "
                "request computes again for computed (#49250)",
                loads_may_fail=False,
            )
            return
        most = min(scenario.steps_in_flight, capabilities.most_steps_in_flight())
        fitting.drop(
            most < scenario.steps_in_flight,
            f"more than {most} steps in flight",
            steps_in_flight=most,
        )
        if most > 1:
            why = self._why_not(fitting.scenario, steps_in_flight=most)
            fitting.drop(why, f"{most} steps in flight with {several}: {why}", steps_in_flight=1)

    def _fit_drafts(self, fitting: Fitting, several: str) -> None:
        """Remove speculative decoding, or only its extra slots, if the release cannot run them."""
        scenario = fitting.scenario
        steps, drafts = scenario.steps_in_flight, scenario.drafts
        fitting.drop_lookahead(has_draft_models())
        if not drafts:
            return
        why: str | None = "a preempted request keeps its own"
        if preemptions_drop_drafts():
            why = self._why_not(scenario, steps_in_flight=steps, drafts=drafts)
        part = f"draft tokens with {steps} steps in flight and {several}: {why}"
        fitting.drop(why, part, drafts=(), lookahead_tokens=0)

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
        if key not in self._problems:
            self._problems[key] = _known_problem(tried.geometry.groups) or _try(tried)
        return self._problems[key]


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
    from kvview.testing.connector.scenario.scenario import Add

    try:
        groups, steps_in_flight = scenario.geometry.groups, scenario.steps_in_flight
        with named("its configuration"):
            given = scenario.geometry.hash_block_size
            geometry = Configs(groups, hash_block_size=given).geometry
        size = geometry.hash_block_size
        if any(isinstance(group, Mamba) and group.block_size > size for group in groups):
            return "its blocks have several hashes, and vLLM copies states between blocks"
        connectors = [Connector(ConnectorConfig(geometry))] * scenario.num_connectors
        fewest = capabilities.fewest_tokens_per_step(groups)
        tried = replace(
            scenario,
            geometry=geometry,
            num_gpu_blocks=200,
            max_tokens_per_step=max(scenario.max_tokens_per_step, fewest),
        )
        engine = KVViewHarness(tried, connectors)
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
