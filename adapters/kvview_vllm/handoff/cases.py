"""Cases of handoffs between two real engines, each with the law that it tests.

The outcome of a case is right if the consumer generates the same tokens as without a handoff. If
the handoff was wrong, an error of the request is right as well.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvview import Connector
from kvview.targets import name_target
from kvview_vllm.handoff.real_pair import LEASE_SECONDS, RealEngine
from kvview_vllm.handoff.side_channel import FaultySideChannel, SideChannelFault
from kvview_vllm.inference.models import FIRST_TOKEN, VOCABULARY, make_model
from kvview_vllm.inference.server import prepare, require_vllm
from kvview_vllm.simulation.scheduler.cpu_scheduler import connector_config

NUM_TOKENS = 8
_WIRE = "kvview_reference.handoff.zmq_wire:ZmqWire"
_PROMPT = 97  # tokens; three full blocks and one token
_FAR = [900, 901, 902, 903]  # blocks beyond the producer's KV cache


@dataclass(frozen=True)
class RealCase:
    """The outcome of one case.

    Args:
        law: The law that the case tests; empty for a positive control.
        name: The case, in a few words.
        outcome: The observation.
        is_right: Whether the law holds.
    """

    law: str
    name: str
    outcome: str
    is_right: bool


@dataclass(frozen=True)
class Entries:
    """The entries of a connector's parameters that the cases change.

    Args:
        at_port: Returns the entries with another port.
        damaged: Wrong entries, by the name of their case; None for a missing entry.
    """

    at_port: Callable[[int], Mapping[str, Any]]
    damaged: Mapping[str, Mapping[str, Any]]


_OF_NIXL = Entries(
    lambda port: {"remote_port": port},
    {
        "blocks that do not exist": {"remote_block_ids": [_FAR]},
        "too few blocks": {"remote_block_ids": [_FAR[:1]]},
        "engine that does not exist": {"remote_engine_id": "X"},
        "no request id": {"remote_request_id": None},
    },
)
_OF_KVVIEW = Entries(
    lambda port: {"address": f"tcp://127.0.0.1:{port}"},
    {
        "tokens that do not exist": {"num_tokens": 64 * 900},
        "fewer tokens than the prefix": {"num_tokens": 64},
        "engine that does not exist": {"engine_id": "X"},
        "no handoff id": {"handoff_id": None},
        "pages of another layout": {"layout": "0"},
    },
)


def prompt(number: int) -> list[int]:
    """Make a prompt that shares no block with any other."""
    return [
        FIRST_TOKEN + (7 * i * (number + 3) + i * i) % (VOCABULARY - FIRST_TOKEN)
        for i in range(_PROMPT)
    ]


def _name(number: int) -> str:
    """Return the id of both requests of a prompt, because NixlPushConnector requires equal ids."""
    return f"prompt-{number}"


class RealHandoffs:
    """Runs all cases on two engines.

    Args:
        model: Folder of the model.
        config: ``kv_transfer_config`` of both engines.
        entries: Entries of the connector's parameters.
        folder: Folder for logs.
        on_progress: Called with the name of each case.
    """

    def __init__(
        self,
        model: Path,
        config: dict[str, Any],
        entries: Entries,
        folder: Path,
        on_progress: Callable[[str], None],
    ) -> None:
        self._entries, self._on_progress = entries, on_progress
        self._number = self._held_before = 0
        self._truth: dict[int, list[int]] = {}
        self.producer = RealEngine("P", model, config, folder)
        self.consumer = RealEngine("D", model, config, folder)

    def close(self) -> None:
        """End both engines."""
        self.producer.kill()
        self.consumer.kill()

    def play(self) -> Iterator[RealCase]:
        """Play all cases."""
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
            ("HAND-3", "abort in the consumer's queue", self.aborted_decode),
            *(
                ("HAND-6", name, partial(self.damaged, changes))
                for name, changes in self._entries.damaged.items()
            ),
            ("HAND-2", "aborted prefill", self.aborted_prefill),
            ("HAND-9", "killed producer", self.killed),
            ("HAND-10", "right handoffs after a restart of the producer", self.after_a_restart),
            ("HAND-6", "handoff of an older life", self.older_life),
        ]
        for law, name, case in cases:
            self._on_progress(name)
            self.settle()
            outcome, is_right = case()
            yield RealCase(law, name, outcome, is_right)

    def settle(self) -> None:
        """Wait until the producer holds no block, at most until all leases have expired."""
        end = time.monotonic() + LEASE_SECONDS + 2
        self._held_before = 1
        while self._held_before and time.monotonic() < end:
            self.consumer.ask(steps=1)
            self._held_before = self.producer.ask(steps=1)["held"]
            time.sleep(0.1)

    def num_held(self) -> int:
        """Count the producer's blocks that this case holds."""
        held: int = self.producer.ask(steps=3)["held"] - self._held_before
        return max(0, held)

    # --- cases ---

    def right(self) -> tuple[str, bool]:
        """Hand over the KV of three prompts."""
        for _ in range(3):
            number = self.new_prompt()
            outcome, is_right = self.decode(number, self.prefill(number), may_fail=False)
            if not is_right:
                return outcome, False
        held = self.num_held()
        return f"right tokens of 3 prompts, {held} blocks held", not held

    def overwritten(self) -> tuple[str, bool]:
        """Overwrite the producer's KV; unless this changes tokens, equal tokens prove nothing."""
        number = self.new_prompt()
        params = self.prefill(number)
        self.producer.ask(fill=True)
        outcome, is_right = self.decode(number, params)
        return outcome, not is_right

    def consumed(self, reuse: int) -> tuple[str, bool]:
        """Route a handoff a second time, after its end."""
        number = self.new_prompt()
        params = self.prefill(number)
        self.decode(number, params)
        self.reuse(reuse)
        return self.decode(number, params)

    def expired(self) -> tuple[str, bool]:
        """Route a handoff after its lease has expired."""
        number = self.new_prompt()
        params = self.prefill(number)
        time.sleep(LEASE_SECONDS + 2)
        self.producer.ask(steps=3)
        self.reuse(5)
        held = self.num_held()
        outcome, is_right = self.decode(number, params)
        return f"{outcome}, {held} blocks held after the lease", is_right and not held

    def foreign(self) -> tuple[str, bool]:
        """Route the handoff of another prompt."""
        number, other = self.new_prompt(), self.new_prompt()
        return self.decode(number, self.prefill(other))

    def damaged(self, changes: Mapping[str, Any]) -> tuple[str, bool]:
        """Route a handoff with a wrong entry."""
        number = self.new_prompt()
        params = {**self.prefill(number), **changes}
        return self.decode(number, {k: v for k, v in params.items() if v is not None})

    def aborted_decode(self) -> tuple[str, bool]:
        """Abort the consumer's request before its first step."""
        number = self.new_prompt()
        params = self.prefill(number)
        held = self.num_held()
        self.consumer.ask(ids=prompt(number), n=1, kv=params, id=_name(number), abort_after=0)
        left, end = held, time.monotonic() + LEASE_SECONDS / 2
        while left and time.monotonic() < end:
            self.consumer.ask(steps=1)
            left = self.num_held()
        return f"{held} blocks held before, {left} after", held > left == 0

    def aborted_prefill(self) -> tuple[str, bool]:
        """Abort the producer's request after the first of its two steps."""
        self.producer.ask(ids=prompt(self.new_prompt()), n=5, kv=None, abort_after=1)
        held = self.num_held()
        return f"{held} blocks held", held == 0

    def side_channel(self, fault: SideChannelFault) -> tuple[str, bool]:
        """Send the consumer's handshake to a faulty server."""
        number = self.new_prompt()
        params = self.prefill(number)
        server = FaultySideChannel(fault)
        try:
            return self.decode(number, {**params, **self._entries.at_port(server.port)})
        finally:
            server.close()

    def killed(self) -> tuple[str, bool]:
        """Kill a producer that the consumer has read from, before the consumer's next read."""
        self.right()
        number = self.new_prompt()
        params = self.prefill(number)
        self.producer.kill()
        outcome = self.decode(number, params)
        self.producer.start()
        return outcome

    def after_a_restart(self) -> tuple[str, bool]:
        """Hand over three prompts to a consumer that has read from the producer's older life."""
        failed = []
        for _ in range(3):
            number = self.new_prompt()
            outcome, is_right = self.decode(number, self.prefill(number), may_fail=False)
            failed += [outcome] * (not is_right)
        return f"{len(failed)} of 3: {failed[0]}" if failed else "right tokens", not failed

    def older_life(self) -> tuple[str, bool]:
        """Route a handoff of the producer's older life; the id and the port are the same."""
        number = self.new_prompt()
        params = self.prefill(number)
        self.producer.kill()
        self.producer.start()
        self.reuse(1)
        return self.decode(number, params)

    # --- parts of cases ---

    def new_prompt(self) -> int:
        """Choose a prompt, and let the consumer compute its tokens without a handoff."""
        self._number += 1
        truth = self.consumer.ask(ids=prompt(self._number), n=NUM_TOKENS)
        self._truth[self._number] = truth["tokens"]
        return self._number

    def prefill(self, number: int) -> dict[str, Any]:
        """Compute a prompt at the producer."""
        return self.producer.prefill(prompt(number), _name(number))

    def reuse(self, num_prompts: int) -> None:
        """Let other prompts use the producer's blocks."""
        for place in range(num_prompts):
            self.producer.ask(ids=prompt(1000 + place), n=1)

    def decode(
        self, number: int, params: dict[str, Any], *, may_fail: bool = True
    ) -> tuple[str, bool]:
        """Generate tokens with a handoff, and compare them with the tokens without a handoff."""
        forgot = self.consumer.ask(forget=True)  # the KV must come from the producer
        if not forgot["forgot"]:
            return "the consumer still holds blocks of earlier requests", False
        got = self.consumer.ask(ids=prompt(number), n=NUM_TOKENS, kv=params, id=_name(number))
        if "died" in got:
            return f"the consumer's engine died: {got['died']}", False
        seconds = f"in {got['seconds']} s"
        if got["error"]:
            return f"{got['error']} {seconds}", may_fail and "no answer" not in got["error"]
        if got["tokens"] == self._truth[number]:
            return f"right tokens {seconds}", True
        if not got["tokens"]:
            return f"no tokens {seconds}", may_fail
        return f"wrong tokens {seconds}", False


def play_handoffs(
    connector_class: type,
    options: Mapping[str, Any],
    on_progress: Callable[[str], None],
) -> Iterator[RealCase]:
    """Run all cases with a connector of vLLM or of kvview.

    Args:
        connector_class: The connector.
        options: Options of the connector; for a connector of vLLM, the option
            ``kv_transfer_config`` is a whole configuration.
        on_progress: Called with the name of each case.

    Raises:
        ConfigError: The installed vLLM cannot run, or an engine does not start.
    """
    prepare()
    require_vllm()
    is_kvview = issubclass(connector_class, Connector)
    config = (_kvview_config if is_kvview else _config)(connector_class, options)
    entries = _OF_KVVIEW if is_kvview else _OF_NIXL
    with tempfile.TemporaryDirectory(prefix="kvview-") as folder:
        model = make_model("llama", Path(folder, "model"))
        handoffs = RealHandoffs(model, config, entries, Path(folder), on_progress)
        try:
            yield from handoffs.play()
        finally:
            handoffs.close()


def _config(connector_class: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Make the ``kv_transfer_config`` of a connector of vLLM."""
    extra = {"kv_lease_duration": LEASE_SECONDS, **options}
    config = extra.pop("kv_transfer_config", {})
    return {
        "kv_connector": connector_class.__name__,
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": extra,
        **config,
    }


def _kvview_config(connector_class: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Make the ``kv_transfer_config`` of a connector of kvview, with a wire over TCP."""
    config = connector_config(name_target(connector_class), **options)
    config["kv_load_failure_policy"] = "recompute"
    config["kv_connector_extra_config"]["handoffs"] = {
        "wire": _WIRE,
        "address": "tcp://127.0.0.1:{port}",
        "lease_seconds": LEASE_SECONDS,
    }
    return config
