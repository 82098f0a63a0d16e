"""Scenarios for raw connectors: what of the kit's scenarios they are played."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvview import CacheGeometry
from kvview.testing.connector.scenario import Add, Alias, Event, Reset, Scenario, Squeeze
from kvview_vllm.releases.worker_caches import BLOCK_SIZE
from kvview_vllm.simulation import scheduler as cpu_scheduler

_MOST_BLOCKS = 300
# Two resets with no step between them end many connectors; other things are to be seen too.
_DOUBLE_RESETS_EVERY = 8
_GEOMETRY = CacheGeometry.single(BLOCK_SIZE)


class RawEngines:
    """Fits scenarios to one group of full attention, with blocks of a size that GPUs serve.

    Args:
        name: Of the engine.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def fit(self, scenario: Scenario) -> tuple[Scenario, Sequence[str]]:
        """Leave out what is not played, and name it."""
        left_out: list[str] = []
        if scenario.geometry != _GEOMETRY:
            left_out += _unplayed_groups(scenario)
            scenario = _scaled(scenario)

        def leave_out(when: bool, what: str, **changes: object) -> None:
            nonlocal scenario
            if when:
                left_out.append(what)
                scenario = replace(scenario, **changes)  # type: ignore[arg-type]

        scenario = replace(scenario, decode_tokens=1, group_pages=())
        leave_out(
            scenario.num_gpu_blocks > _MOST_BLOCKS,
            f"a pool of more than {_MOST_BLOCKS} blocks: it takes long",
            num_gpu_blocks=_MOST_BLOCKS,
        )
        leave_out(
            scenario.num_connectors > 1,
            "two connectors side by side: name MultiConnector and its children",
            num_connectors=1,
        )
        if scenario.worker_half == "as_it_is":
            left_out.append("copies held up in a raw worker: where its threads are is not known")
            scenario = replace(scenario, worker_half="in_a_process")
        leave_out(
            scenario.compute_lags and scenario.worker_half != "in_a_process",
            "a worker behind its scheduler, in one process",
            compute_lags=False,
        )
        most = cpu_scheduler.most_steps_in_flight()
        leave_out(
            scenario.steps_in_flight > most,
            f"more than {most} steps in flight",
            steps_in_flight=most,
        )
        leave_out(scenario.ends_abruptly, "an end with transfers in flight", ends_abruptly=False)
        events = tuple(event for event in scenario.events if not isinstance(event, Alias))
        leave_out(events != scenario.events, "a second hash of a block", events=events)
        resets = [event for event in scenario.events if isinstance(event, Reset)]
        leave_out(
            bool(resets) and not cpu_scheduler.can_reset_connectors(), "resets of the connector"
        )
        return scenario, left_out


def _unplayed_groups(scenario: Scenario) -> list[str]:
    groups = scenario.geometry.groups
    if len(groups) > 1:
        return ["several KV-cache groups: one of full attention is played"]
    kind = type(groups[0]).__name__
    return [] if kind == "FullAttention" else [f"a {kind} group: full attention is played"]


def _scaled(scenario: Scenario) -> Scenario:
    """The same scenario in blocks of another size, in as many of them."""
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
    # As tight as it was: the generator gives the longest request its blocks 1.2 to 2.8 times.
    share = sum(-(-before // group.block_size) for group in scenario.geometry.groups)
    num_blocks = max(3 + -(-longest // BLOCK_SIZE), 2 + (old - 2) // share)

    def fitted(event: Event) -> Event:
        if isinstance(event, Add):
            return replace(
                event,
                num_prompt_tokens=max(1, tokens(event.num_prompt_tokens)),
                num_output_tokens=event.num_output_tokens,
            )
        if isinstance(event, Squeeze):
            left = old - event.num_blocks
            if left <= 5:
                return Squeeze(num_blocks - left)
            return Squeeze(event.num_blocks * num_blocks // old)
        return event

    events = scenario.events
    if len(events) % _DOUBLE_RESETS_EVERY:
        events = tuple(
            event
            for before_it, event in zip((None, *events), events, strict=False)
            if not (isinstance(event, Reset) and isinstance(before_it, Reset))
        )
    return replace(
        scenario,
        geometry=_GEOMETRY,
        num_gpu_blocks=num_blocks,
        events=tuple(map(fitted, events)),
        max_tokens_per_step=max(
            scenario.max_running, scenario.max_tokens_per_step * BLOCK_SIZE // before
        ),
    )
