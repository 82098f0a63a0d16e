"""A scenario that loses the parts that an engine cannot simulate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvview.testing.connector.scenario.scenario import Add, Scenario, SecondHash
from kvview_vllm.simulation.scheduler import capabilities


class Fitting:
    """A scenario, and the names of the parts that were removed from it.

    Args:
        scenario: The scenario, of which no engine of vLLM plays decode steps of several tokens and
            pages that differ by group, and some releases have no other model runner.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = replace(
            scenario,
            decode_tokens=1,
            group_pages=(),
            other_runner=scenario.other_runner and capabilities.has_two_runners(),
        )
        self.left_out: list[str] = []

    def change(self, **changes: Any) -> None:
        """Change fields, without a loss."""
        self.scenario = replace(self.scenario, **changes)

    def drop(self, when: object, part: str, **changes: Any) -> None:
        """Remove a part, if it cannot be simulated."""
        if when:
            self.change(**changes)
            self.left_out.append(part)

    def limit_pool(self, most: int) -> None:
        """Limit the number of blocks, and the prompts to a quarter of these."""
        if self.scenario.num_gpu_blocks <= most:
            return
        geometry = self.scenario.geometry
        size = geometry.scheduler_block_size
        longest = size * (most // sum(4 * size // group.block_size for group in geometry.groups))
        events = tuple(
            replace(one, num_prompt_tokens=min(one.num_prompt_tokens, longest + 1))
            if isinstance(one, Add)
            else one
            for one in self.scenario.events
        )
        part = f"a pool of more than {most} blocks: it takes long"
        self.drop(True, part, num_gpu_blocks=most, events=events)

    def drop_lookahead(self, has_draft_models: bool) -> None:
        """Remove slots for the next step's draft tokens, if no draft model needs them."""
        is_impossible = self.scenario.lookahead_tokens and not has_draft_models
        self.drop(is_impossible, "slots for lookahead", lookahead_tokens=0)

    def drop_aliases(self) -> None:
        """Remove second hashes of blocks."""
        events = tuple(one for one in self.scenario.events if not isinstance(one, SecondHash))
        self.drop(events != self.scenario.events, "a second hash of a block", events=events)
