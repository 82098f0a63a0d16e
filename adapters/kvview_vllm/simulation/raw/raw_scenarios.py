"""Scenarios for raw connectors, made from the suitable parts of the kit's scenarios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvview import (
    CacheGeometry,
    CacheGroup,
    ChunkedLocalAttention,
    FullAttention,
    Mamba,
    SlidingWindow,
)
from kvview.testing.connector.scenario.scenario import Add, Event, HoldBlocks, Reset, Scenario
from kvview_vllm.releases.compat.calls import (
    can_name_groups,
    ended_requests_take_no_output,
    has_draft_models,
    preemptions_drop_drafts,
    states_are_hit_with_the_rest,
    states_take_loads,
    windows_outlive_drafts,
)
from kvview_vllm.releases.cpu.worker_caches import BLOCK_SIZE, NUM_LAYERS, can_allocate_states
from kvview_vllm.simulation.fitting import Fitting
from kvview_vllm.simulation.raw.worker.ranks import sizes_of_ranks
from kvview_vllm.simulation.scheduler import capabilities

_MOST_BLOCKS = 300
# Two resets with no step between them end many connectors, and hide other faults.
_DOUBLE_RESETS_EVERY = 8
_FULL = FullAttention(BLOCK_SIZE)
_LONGEST_WINDOW = 4 * BLOCK_SIZE
_NEVER_PLAYED = (
    "decode-context and data parallelism",
    "hits of different lengths in the groups",
    "kv_load_tiers of a request",
    "handshake metadata of the workers",
    "layers with other names in the forward context than at their registration",
    "a forward pass that still runs when a transfer starts",
)


class RawEngines:
    """Fits scenarios to full attention, alone or with other groups, in GPU-sized blocks.

    Args:
        name: Name of the engine.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def fit(self, scenario: Scenario) -> tuple[Scenario, Sequence[str]]:
        """Remove the parts that raw runs do not simulate, and name all parts that are missing."""
        left_out = [*_NEVER_PLAYED]
        groups = _played_groups(scenario, left_out)
        if groups != scenario.geometry.groups:
            scenario = _scaled(scenario, groups)
        fitting = Fitting(scenario)
        fitting.change(pin_budget=None)
        fitting.limit_pool(_MOST_BLOCKS)
        fitting.drop(
            scenario.num_connectors > 1,
            "two connectors side by side: name MultiConnector and its children",
            num_connectors=1,
        )
        fitting.drop(
            scenario.worker_half == "whole_plans",
            "delayed copies in a raw worker: its threads are unknown",
            worker_half="in_a_process",
        )
        fitting.drop(
            scenario.compute_lags and fitting.scenario.worker_half != "in_a_process",
            "a worker behind its scheduler, in one process",
            compute_lags=False,
        )
        most = capabilities.most_steps_in_flight() if ended_requests_take_no_output() else 1
        number = "several" if most == 1 else f"more than {most}"
        fitting.drop(
            scenario.steps_in_flight > most, f"{number} steps in flight", steps_in_flight=most
        )
        fitting.drop_lookahead(has_draft_models())
        if fitting.scenario.lookahead_tokens and not capabilities.saves_after_drafts(scenario):
            left_out.append("layers of a draft model: vLLM saves a step before them")
        fitting.drop(
            scenario.drafts and not preemptions_drop_drafts(),
            "draft tokens: a preempted request keeps its own",
            drafts=(),
            lookahead_tokens=0,
        )
        fitting.drop(
            len(groups) > 1
            and fitting.scenario.drafts
            and fitting.scenario.steps_in_flight > 1
            and not windows_outlive_drafts(),
            "draft tokens with several groups and steps in flight: vLLM frees blocks of a window "
            "that a rejected draft still needs",
            drafts=(),
            lookahead_tokens=0,
        )
        if scenario.ranks:
            fitting.change(ranks=_fitted_ranks(scenario.ranks), worker_half="in_a_process")
            is_split = sizes_of_ranks(fitting.scenario.ranks)[1] > 1
            part = "draft tokens with several stages: V1 never saves the steps of the others"
            fitting.drop(is_split and scenario.drafts, part, drafts=(), lookahead_tokens=0)
        fitting.drop(
            scenario.ends_abruptly and not scenario.ranks,
            "an end with transfers in flight, unless a rank is killed",
            ends_abruptly=False,
        )
        fitting.drop_aliases()
        fitting.drop(not can_name_groups(), "events of the connector")
        resets = any(isinstance(event, Reset) for event in scenario.events)
        fitting.drop(resets and not capabilities.can_reset_connectors(), "resets of the connector")
        return fitting.scenario, [*left_out, *fitting.left_out]


def _fitted_ranks(ranks: Sequence[int]) -> tuple[int, ...]:
    """Return ranks with all layers, two stages, or two stages of two ranks each."""
    if sum(ranks) == NUM_LAYERS:
        return tuple(ranks)
    return (NUM_LAYERS // 2,) * 4 if len({*ranks}) > 1 else (NUM_LAYERS,) * len(ranks)


def can_load_in_groups() -> bool:
    """Whether vLLM serves any connector with several groups (0.24.0)."""
    return capabilities.can_load_between_steps() and capabilities.can_load_after_hits(2)


def can_load_states() -> bool:
    """Whether a Mamba group can be simulated, besides full attention."""
    return (
        can_load_in_groups()
        and can_allocate_states()
        and states_take_loads()
        and states_are_hit_with_the_rest()
    )


def _played_groups(scenario: Scenario, left_out: list[str]) -> tuple[CacheGroup, ...]:
    """Return full attention and, if the scenario has several groups, its windows, chunks, Mamba."""
    groups = scenario.geometry.groups
    if len(groups) == 1:
        if not isinstance(groups[0], FullAttention):
            left_out.append(f"a {type(groups[0]).__name__} group: full attention is played")
        return (_FULL,)
    if not can_load_in_groups():
        left_out.append("several KV-cache groups: no load after a hit, or none between steps")
        return (_FULL,)
    played = dict.fromkeys([_FULL, *filter(None, map(_scaled_group, groups))])
    has_states = any(isinstance(group, Mamba) for group in groups)
    if has_states and Mamba(BLOCK_SIZE) not in played:
        left_out.append("a Mamba group among several")
    return tuple(played)


def _scaled_group(group: CacheGroup) -> CacheGroup | None:
    """Return a group in blocks of the GPU; None for one that the release cannot run."""
    match group:
        case SlidingWindow():
            window = group.sliding_window * BLOCK_SIZE // group.block_size
            return SlidingWindow(BLOCK_SIZE, min(max(2, window), _LONGEST_WINDOW))
        case ChunkedLocalAttention():
            return ChunkedLocalAttention(BLOCK_SIZE, 2 * BLOCK_SIZE)
        case Mamba():
            return Mamba(BLOCK_SIZE) if can_load_states() else None
    return _FULL


def _scaled(scenario: Scenario, groups: tuple[CacheGroup, ...]) -> Scenario:
    """Return the same scenario with other groups, and with as many blocks for each group."""
    before = scenario.geometry.scheduler_block_size
    old = scenario.num_gpu_blocks

    def tokens(number: int) -> int:
        blocks, rest = divmod(number, before)
        return blocks * BLOCK_SIZE + (rest * BLOCK_SIZE) // before + (rest > 0 and before > 16)

    longest = max(
        (
            tokens(event.num_prompt_tokens) + event.num_output_tokens
            for event in scenario.events
            if isinstance(event, Add)
        ),
        default=BLOCK_SIZE,
    )
    # As scarce as before, because the generator has 1.2 to 2.8 times the blocks of the longest
    # request.
    share = sum(-(-before // group.block_size) for group in scenario.geometry.groups)
    share_now = len(groups)
    num_blocks = max(
        3 + share_now * -(-longest // BLOCK_SIZE), 2 + share_now * ((old - 2) // share)
    )

    def fitted(event: Event) -> Event:
        if isinstance(event, Add):
            num_prompt_tokens = tokens(event.num_prompt_tokens)
            num_tokens = event.num_prompt_tokens + event.num_output_tokens
            if num_tokens % before == 0:  # then the last token ends a block as before
                num_prompt_tokens = tokens(num_tokens) - event.num_output_tokens
            return replace(event, num_prompt_tokens=max(1, num_prompt_tokens))
        if isinstance(event, HoldBlocks):
            left = old - event.num_blocks
            if left <= 5:
                return HoldBlocks(num_blocks - left)
            return HoldBlocks(event.num_blocks * num_blocks // old)
        return event

    events = scenario.events
    if len(events) % _DOUBLE_RESETS_EVERY:
        events = tuple(
            event
            for last, event in zip((None, *events), events, strict=False)
            if not (isinstance(event, Reset) and isinstance(last, Reset))
        )
    return replace(
        scenario,
        geometry=CacheGeometry(BLOCK_SIZE, BLOCK_SIZE, groups),
        num_gpu_blocks=num_blocks,
        events=tuple(map(fitted, events)),
        max_tokens_per_step=max(
            scenario.max_running, scenario.max_tokens_per_step * BLOCK_SIZE // before
        ),
    )
