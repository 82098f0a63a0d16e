"""Cases of handoffs between two real engines, each with the law that it is about.

The tokens of a case are right if they are those that the consumer generates without a handoff. A
request that fails with an error is right as well, if the handoff was wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvview_vllm.handoff.real_pair import LEASE_SECONDS, RealEngine
from kvview_vllm.handoff.side_channel import FaultySideChannel, SideChannelFault
from kvview_vllm.inference.models import FIRST_TOKEN, VOCABULARY

NUM_TOKENS = 8
_PROMPT = 97  # tokens; three full blocks and one token


def prompt(number: int) -> list[int]:
    """Make a prompt that shares no block with any other."""
    return [
        FIRST_TOKEN + (7 * i * (number + 3) + i * i) % (VOCABULARY - FIRST_TOKEN)
        for i in range(_PROMPT)
    ]


@dataclass(frozen=True)
class RealCase:
    """The outcome of one case.

    Args:
        law: The law that it is about; empty for a positive control.
        name: The case, in a few words.
        outcome: The observation.
        is_right: Whether the law holds.
    """

    law: str
    name: str
    outcome: str
    is_right: bool


class RealHandoffs:
    """Plays all cases on two engines.

    Args:
        model: Folder of the model.
        config: ``kv_transfer_config`` of both.
        folder: Folder for logs.
        on_progress: Called with the name of each case.
    """

    def __init__(
        self,
        model: Path,
        config: dict[str, Any],
        folder: Path,
        on_progress: Callable[[str], None],
    ) -> None:
        self._on_progress = on_progress
        self._number = 0
        self._truth: dict[int, list[int]] = {}
        self.producer = RealEngine("P", model, config, folder)
        self.consumer = RealEngine("D", model, config, folder)

    def close(self) -> None:
        """End both engines."""
        self.producer.kill()
        self.consumer.kill()

    def play(self) -> Iterator[RealCase]:
        """Play all cases; the producer is killed by the last ones."""
        cases: list[tuple[str, str, Callable[[], tuple[str, bool]]]] = [
            ("HAND-9", "silent side channel", lambda: self.side_channel("silent")),
            ("HAND-9", "closed side channel", lambda: self.side_channel("closed")),
            ("HAND-6", "garbage from the side channel", lambda: self.side_channel("garbage")),
            ("HAND-10", "right handoff", self.right),
            ("", "control: KV overwritten before it is read", self.overwritten),
            ("HAND-5", "consumed handoff, at once", lambda: self.consumed(reuse=0)),
            ("HAND-5", "consumed handoff, blocks reused", lambda: self.consumed(reuse=5)),
            ("HAND-5", "expired handoff, blocks reused", self.expired),
            ("HAND-6", "handoff of another prompt", self.foreign),
            ("HAND-6", "blocks that do not exist", lambda: self.damaged(remote_block_ids=[[900]])),
            ("HAND-6", "engine that does not exist", lambda: self.damaged(remote_engine_id="X")),
            ("HAND-6", "no request id", lambda: self.damaged(remote_request_id=None)),
            ("HAND-3", "abort in the consumer's queue", self.aborted_decode),
            ("HAND-2", "aborted prefill", self.aborted_prefill),
            ("HAND-9", "killed producer", self.killed),
            ("HAND-6", "handoff of an older life", self.older_life),
            ("HAND-10", "right handoff after the restart", self.right),
        ]
        for law, name, case in cases:
            self._on_progress(name)
            outcome, is_right = case()
            yield RealCase(law, name, outcome, is_right)

    # --- cases ---

    def right(self) -> tuple[str, bool]:
        """Hand over three prompts."""
        for _ in range(3):
            number = self.new_prompt()
            outcome, is_right = self.decode(number, self.prefill(number), may_fail=False)
            if not is_right:
                return outcome, False
        held = self.producer.ask(steps=3)["held"]
        return f"3 prompts, {held} blocks held", not held

    def overwritten(self) -> tuple[str, bool]:
        """Overwrite the producer's KV: the tokens must change, or they would prove nothing."""
        number = self.new_prompt()
        params = self.prefill(number)
        self.producer.ask(fill=True)
        outcome, is_right = self.decode(number, params)
        return outcome, not is_right

    def consumed(self, reuse: int) -> tuple[str, bool]:
        """Route a handoff again after its end."""
        number = self.new_prompt()
        params = self.prefill(number)
        self.decode(number, params)
        self.reuse(reuse)
        return self.decode(number, params)

    def expired(self) -> tuple[str, bool]:
        """Route a handoff after its lease."""
        number = self.new_prompt()
        params = self.prefill(number)
        time.sleep(LEASE_SECONDS + 2)
        self.producer.ask(steps=3)
        self.reuse(5)
        return self.decode(number, params)

    def foreign(self) -> tuple[str, bool]:
        """Route the handoff of another prompt."""
        number, other = self.new_prompt(), self.new_prompt()
        return self.decode(number, self.prefill(other))

    def damaged(self, **changes: Any) -> tuple[str, bool]:
        """Route a handoff with a wrong entry."""
        number = self.new_prompt()
        params = {**self.prefill(number), **changes}
        return self.decode(number, {k: v for k, v in params.items() if v is not None})

    def aborted_decode(self) -> tuple[str, bool]:
        """Abort the consumer's request before its first step."""
        number = self.new_prompt()
        params = self.prefill(number)
        held = self.producer.ask()["held"]
        self.consumer.ask(ids=prompt(number), n=1, kv=params, abort_after=0)
        self.consumer.ask(steps=5)
        left = self.producer.ask(steps=5)["held"]
        return f"{held} blocks held before, {left} after", left == 0

    def aborted_prefill(self) -> tuple[str, bool]:
        """Abort the producer's request after one step of two."""
        self.producer.ask(ids=prompt(self.new_prompt()), n=5, kv=None, abort_after=1)
        held = self.producer.ask(steps=3)["held"]
        return f"{held} blocks held", held == 0

    def side_channel(self, fault: SideChannelFault) -> tuple[str, bool]:
        """Let the consumer's handshake reach a faulty server."""
        number = self.new_prompt()
        params = self.prefill(number)
        server = FaultySideChannel(fault)
        try:
            return self.decode(number, {**params, "remote_port": server.port})
        finally:
            server.close()

    def killed(self) -> tuple[str, bool]:
        """Kill the producer before the consumer reads."""
        number = self.new_prompt()
        params = self.prefill(number)
        self.producer.kill()
        return self.decode(number, params)

    def older_life(self) -> tuple[str, bool]:
        """Restart the producer, and route a handoff of its older life."""
        number = self.new_prompt()
        params = {**self._last_params}
        self.producer.start()
        self.reuse(1)
        self._truth[number] = self._truth[self._last_number]
        return self.decode(self._last_number, params)

    # --- parts of cases ---

    def new_prompt(self) -> int:
        """Choose a prompt, and let the consumer compute its tokens without a handoff."""
        self._number += 1
        truth = self.consumer.ask(ids=prompt(self._number), n=NUM_TOKENS)
        self._truth[self._number] = truth["tokens"]
        return self._number

    def prefill(self, number: int) -> dict[str, Any]:
        """Compute a prompt at the producer."""
        self._last_params = self.producer.prefill(prompt(number))
        self._last_number = number
        return self._last_params

    def reuse(self, num_prompts: int) -> None:
        """Let other prompts use the producer's blocks."""
        for place in range(num_prompts):
            self.producer.ask(ids=prompt(1000 + place), n=1)

    def decode(
        self, number: int, params: dict[str, Any], *, may_fail: bool = True
    ) -> tuple[str, bool]:
        """Generate tokens with a handoff, and compare them."""
        self.consumer.ask(forget=True)  # the KV must come from the producer
        got = self.consumer.ask(ids=prompt(number), n=NUM_TOKENS, kv=params)
        seconds = f"in {got['seconds']} s" if "seconds" in got else ""
        if got["error"]:
            return f"{got['error']} {seconds}", may_fail and "no answer" not in got["error"]
        if got["tokens"] == self._truth[number]:
            return f"right tokens {seconds}", True
        if not got["tokens"]:
            return f"no tokens {seconds}", may_fail
        return f"wrong tokens {seconds}", False
