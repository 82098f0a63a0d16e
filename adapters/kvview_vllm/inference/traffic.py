"""The traffic of a seed: conversations, shared prefixes, aborts, full caches and resets."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvview.testing.connector.judge.invariants import InvariantBroken
from kvview_vllm.inference.models import FIRST_TOKEN, VOCABULARY
from kvview_vllm.inference.server import BLOCK_SIZE, MAX_TOKENS, Server

NUM_TOKENS = 12
"""Tokens of an answer, unless it is long."""

STEPS_AHEAD = "steps launched ahead of an output"
REJECTED_DRAFTS = "draft tokens rejected"

_PATIENCE = 20.0  # seconds without an output
_FEWEST_STEPS = 400  # of any duration
_NUDGES = 100


@dataclass
class Served:
    """The results of one engine.

    Args:
        answers: Tokens of each answer, by its name in the traffic.
        coverage: Counts of events.
        law: The law that the run broke, if any.
        message: Description of the failure.
        left_out: Parts of the traffic that were not sent, each with the reason.
        lost: Names of requests that ended without an answer.
        is_up: Whether the engine has started.
        is_refused: Whether the connector refused its configuration.
        first_error: Error of the first job that failed, as its worker half reported it.
    """

    answers: dict[str, list[int]] = field(default_factory=dict)
    coverage: Counter[str] = field(default_factory=Counter)
    law: str = ""
    message: str = ""
    left_out: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    is_up: bool = False
    is_refused: bool = False
    first_error: str = ""


class SeededTraffic:
    """The traffic of one seed, for one server.

    The prompts depend only on the seed and on the answers of an engine without a connector, so a
    wrong answer does not change later prompts.

    Args:
        server: The engine.
        served: Receives the results, whose names start with the seed.
        seed: Seed of all random choices.
        truth: Answers without a connector; None in the run without a connector.
        resets: Whether the connector can be reset.
        reuses_ids: Whether the id of a dropped request is reused.
        on_progress: Called at short intervals, with a text about the progress.
    """

    def __init__(
        self,
        server: Server,
        served: Served,
        seed: int,
        truth: Mapping[str, Sequence[int]] | None,
        resets: bool,
        reuses_ids: bool,
        on_progress: Callable[[str], None],
    ) -> None:
        self.server = server
        self.served = served
        self.prompts: dict[str, list[int]] = {}
        self.on_step: Callable[[], None] = lambda: None
        self._on_progress = on_progress
        self._seed = seed
        self._truth = truth
        self._resets = resets
        self._reuses_ids = reuses_ids
        self._draw = random.Random(seed)

    def ask(self, name: str, prompt: Sequence[int], num_tokens: int = NUM_TOKENS) -> None:
        """Send a request, and record its answer under the given name."""
        self.prompts[name] = list(prompt)
        self.served.coverage["requests"] += 1
        self.server.add(name, list(prompt), num_tokens)

    def step(self, count: int = 1) -> bool:
        """Step the engine; return whether any request received a token."""
        has_output = False
        for _ in range(count):
            self._on_progress("a step")
            self.on_step()
            for output in self.server.engine.step():
                has_output = True
                if output.finished:
                    self.served.answers[output.request_id] = list(output.outputs[0].token_ids)
        return has_output

    def until(self, is_so: Callable[[], bool]) -> None:
        """Step until a condition is true; raise an error if it does not become true."""
        last, num_steps = time.monotonic(), 0
        while not is_so():
            num_steps += 1
            if self.step():
                last, num_steps = time.monotonic(), 0
            elif num_steps > _FEWEST_STEPS and time.monotonic() - last > _PATIENCE:
                requests = self.server.scheduler.requests.values()
                waiting = {r.request_id: r.status.name for r in requests}
                raise InvariantBroken(
                    "CONN-3",
                    f"the engine never becomes idle; {waiting or 'work is pending forever'}",
                )
            else:
                time.sleep(0.002)  # because a thread may still have to copy

    def rest(self) -> None:
        """Step until the engine is idle and no copy holds a block."""
        self.until(lambda: not self.server.scheduler.has_requests())
        for number in range(_NUDGES):
            if not self.server.leaked_blocks():
                break
            time.sleep(0.02)  # vLLM only polls a connector in steps, and makes none when idle
            self.server.add(f"nudge {number}", [FIRST_TOKEN], 1)
            self.until(lambda: not self.server.scheduler.has_requests())
            self.served.answers.pop(f"nudge {number}", None)  # no other engine has it

    def drop(self, name: str) -> None:
        """Abort a request, whose id may be reused once vLLM has released it."""
        request = self.server.scheduler.requests.get(name)
        if request is not None:
            how = "loading" if "REMOTE" in request.status.name else request.status.name.lower()
            self.served.coverage[f"aborted while {how}"] += 1
        self.server.engine.abort_request([name])
        self.prompts.pop(name)
        self.until(lambda: name not in self.server.scheduler.requests)
        self.served.answers.pop(name, None)

    def forget(self) -> None:
        """Drop the prefix cache and overwrite every byte of the KV cache."""
        self.rest()
        if not self.server.forget():
            raise InvariantBroken(
                "CONN-4",
                f"{self.server.leaked_blocks()} blocks of the KV cache are held although every "
                f"request has ended, so the prefix cache cannot be reset",
            )
        self.served.coverage["KV caches overwritten"] += 1

    def play(self) -> None:
        """Send all parts of the traffic; later parts continue conversations of earlier parts."""
        system = self._tokens(self._draw.choice((64, 70, 96)))
        talks = []
        for number in range(4):
            prefix = system if number < 2 else []
            talks.append(self._name(f"talk {number}"))
            self.ask(talks[-1], [*prefix, *self._tokens(self._length(100 - len(prefix), 4))])
        self.rest()
        talks = self._next_turns(talks)  # with hits on the GPU
        self.rest()
        self.forget()
        before = talks
        talks = self._next_turns(talks)  # no block is on the GPU
        branch = [*self._text(before[0])[:-5], *self._tokens(20)]
        self.ask(self._name("branch"), branch, 20)
        self.ask(self._name("the same again"), self.prompts[talks[1]])
        self.rest()
        self._aborts(talks)
        self._pressure()
        self._weights(talks)
        self._ends(talks)

    def _next_turns(self, talks: Sequence[str]) -> list[str]:
        names = []
        for talk in talks:
            names.append(f"{talk}, on")
            text = self._text(talk)
            most = MAX_TOKENS - 3 * NUM_TOKENS - len(text)
            self.ask(names[-1], [*text, *self._tokens(self._length(min(most, 30)))])
        return names

    def _aborts(self, talks: Sequence[str]) -> None:
        """Abort requests while they load, while they compute and while they wait."""
        for number, talk in enumerate(talks):
            self.forget()
            name = self._dropped(number)
            self.ask(name, [*self._text(talk), *self._tokens(9)])
            self.step(self._draw.randint(1, 3))
            self.drop(name)
        self.ask(self._name("dropped"), [*self._text(talks[2]), *self._tokens(11)])
        self.ask(self._dropped(4), self._tokens(200), 30)
        self.step(2)
        self.drop(self._dropped(4))
        self.ask(self._dropped(5), self._tokens(150))
        self.drop(self._dropped(5))
        self.rest()

    def _dropped(self, number: int) -> str:
        return self._name("dropped" if self._reuses_ids and number < 4 else f"dropped {number}")

    def _pressure(self) -> None:
        """Send more requests than fit, twice, to cause preemptions and to evict from both tiers."""
        prompts = [self._tokens(self._length(180, 140)) for _ in range(6)]
        for part in range(2):
            for number, prompt in enumerate(prompts):
                self.ask(self._name(f"long answer {number}.{part}"), prompt, 50)
            self.rest()
            for number, prompt in enumerate(prompts):
                short = [*prompt[: self._length(100, 40)], FIRST_TOKEN + number]
                self.ask(self._name(f"prefix {number}.{part}"), short)
            self.rest()
            self.forget()
        for number, prompt in enumerate(prompts[3:]):
            self.ask(self._name(f"one at a time {number}"), [*prompt, *self._tokens(7)])
            self.rest()
            self.forget()

    def _weights(self, talks: Sequence[str]) -> None:
        """Change the weights, then restore them; KV of the one is wrong under the other."""
        if not self._resets:
            return
        for shift in (1, -1):
            self.rest()
            if not self.server.reset_connector() and self._truth is not None:
                self.served.left_out.append("other weights: the connector refused the reset")
                return
            self.server.change_weights(shift)
            self.forget()
            for turn in range(2):
                for number, talk in enumerate(talks):
                    prompt = self.prompts[talk]
                    self.ask(self._name(f"weights {shift:+d}.{number}.{turn}"), prompt)
                self.rest()
                self.forget()
        self.served.coverage["weights changed"] += 2

    def _ends(self, talks: Sequence[str]) -> None:
        self.forget()
        for talk in talks:
            self.ask(f"{talk}, at last", [*self._text(talk), FIRST_TOKEN])
            self.rest()

    def _text(self, name: str) -> list[int]:
        """Return the tokens of a conversation: its last prompt and the correct answer."""
        answers = self.served.answers if self._truth is None else self._truth
        return [*self.prompts[name], *answers[name]]

    def _name(self, part: str) -> str:
        return f"{self._seed}: {part}"

    def _tokens(self, number: int) -> list[int]:
        return self._draw.choices(range(FIRST_TOKEN, VOCABULARY), k=number)

    def _length(self, most: int, fewest: int = 1) -> int:
        """Draw a length; half of the lengths end at or near the end of a block."""
        length = self._draw.randint(fewest, most)
        if self._draw.random() < 0.5:
            length -= (length + self._draw.choice((-1, 0, 1, NUM_TOKENS))) % BLOCK_SIZE
        return min(max(length, fewest), most)
