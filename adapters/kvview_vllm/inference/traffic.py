"""What is served: conversations, shared prefixes, aborts, pressure, resets; from a seed."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvview.testing.connector.invariants import InvariantBroken
from kvview_vllm.inference.models import FIRST_TOKEN, VOCABULARY
from kvview_vllm.inference.server import BLOCK_SIZE, MAX_TOKENS, Server

NUM_TOKENS = 12
"""Of an answer, unless it is to be long."""

_PATIENCE = 20.0  # seconds without an output
_FEWEST_STEPS = 400  # however long they take
_NUDGES = 100


@dataclass
class Served:
    """What one engine showed.

    Args:
        answers: Tokens of each answer, by its name in the traffic.
        coverage: What happened how often.
        law: Number of the law that was broken, if the engine's own run broke one.
        message: What happened then.
        left_out: What was not played, in a few words each.
        lost: Names of requests that ended without an answer.
        is_up: Whether the engine started.
        is_refused: Whether the connector refused its configuration.
    """

    answers: dict[str, list[int]] = field(default_factory=dict)
    coverage: Counter[str] = field(default_factory=Counter)
    law: str = ""
    message: str = ""
    left_out: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    is_up: bool = False
    is_refused: bool = False


class Traffic:
    """Sends requests to one server, and writes down what comes out.

    Args:
        server: The engine.
        served: Filled as it goes.
        on_progress: Told what is done, often.
    """

    def __init__(
        self,
        server: Server,
        served: Served,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.server = server
        self.served = served
        self.prompts: dict[str, list[int]] = {}
        self._tell = on_progress
        self.on_step: Callable[[], None] = lambda: None

    def ask(self, name: str, prompt: Sequence[int], num_tokens: int = NUM_TOKENS) -> None:
        """Send a request; its answer is written down under its name."""
        self.prompts[name] = list(prompt)
        self.served.coverage["requests"] += 1
        self.server.add(name, list(prompt), num_tokens)

    def step(self, count: int = 1) -> bool:
        """Step the engine; whether any request got a token."""
        came = False
        for _ in range(count):
            self._tell("a step")
            self.on_step()
            for output in self.server.engine.step():
                came = True
                if output.finished:
                    self.served.answers[output.request_id] = list(output.outputs[0].token_ids)
        return came

    def until(self, is_so: Callable[[], bool]) -> None:
        """Step until something is so; for ever is a failure."""
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
                    f"the engine never comes to rest: {waiting or 'work is pending for ever'}",
                )
            else:
                time.sleep(0.002)  # a thread may have to copy

    def rest(self) -> None:
        """Step until nobody has anything to do and no copy holds a block."""
        self.until(lambda: not self.server.scheduler.has_requests())
        for number in range(_NUDGES):
            if not self.server.leaked_blocks():
                break
            time.sleep(0.02)  # vLLM polls a connector in steps alone, and has none to make
            self.server.add(f"nudge {number}", [FIRST_TOKEN], 1)
            self.until(lambda: not self.server.scheduler.has_requests())

    def drop(self, name: str) -> None:
        """Abort a request, whose id may come again once vLLM has let go of it."""
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
                f"{self.server.leaked_blocks()} blocks of the KV cache are held when every request "
                f"has ended: the prefix cache can not be reset",
            )
        self.served.coverage["KV caches overwritten"] += 1


class SeededTraffic(Traffic):
    """The traffic of one seed.

    What is asked follows from the seed, and from the answers that an engine without a
    connector gave: a wrong answer makes no other prompt.

    Args:
        server: The engine.
        served: Filled as it goes; names begin with the seed.
        seed: Of everything random.
        truth: Answers without a connector; None when this is that run.
        resets: Whether the connector can be reset.
        ids_again: Whether the id of a request that was dropped comes again.
        on_progress: Told what is done, often.
    """

    def __init__(
        self,
        server: Server,
        served: Served,
        seed: int,
        truth: Mapping[str, Sequence[int]] | None,
        resets: bool,
        ids_again: bool,
        on_progress: Callable[[str], None],
    ) -> None:
        super().__init__(server, served, on_progress)
        self._seed = seed
        self._truth = truth
        self._resets = resets
        self._ids_again = ids_again
        self._draw = random.Random(seed)

    def play(self) -> None:
        """All of it; each part leaves what it asked to the next."""
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
        talks = self._next_turns(talks)  # nothing is on the GPU
        branch = [*self._said(before[0])[:-5], *self._tokens(20)]
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
            most = MAX_TOKENS - 3 * NUM_TOKENS - len(self._said(talk))
            self.ask(names[-1], [*self._said(talk), *self._tokens(self._length(min(most, 30)))])
        return names

    def _aborts(self, talks: Sequence[str]) -> None:
        """While it loads, while it computes, while it waits."""
        for number, talk in enumerate(talks):
            self.forget()
            name = self._dropped(number)
            self.ask(name, [*self._said(talk), *self._tokens(9)])
            self.step(self._draw.randint(1, 3))
            self.drop(name)
        self.ask(self._name("dropped"), [*self._said(talks[2]), *self._tokens(11)])
        self.ask(self._dropped(4), self._tokens(200), 30)
        self.step(2)
        self.drop(self._dropped(4))
        self.ask(self._dropped(5), self._tokens(150))
        self.drop(self._dropped(5))
        self.rest()

    def _dropped(self, number: int) -> str:
        return self._name("dropped" if self._ids_again and number < 4 else f"dropped {number}")

    def _pressure(self) -> None:
        """More than there is room for, twice: evictions in both tiers, preemptions."""
        prompts = [self._tokens(self._length(180, 140)) for _ in range(6)]
        for lap in range(2):
            for number, prompt in enumerate(prompts):
                self.ask(self._name(f"long answer {number}.{lap}"), prompt, 50)
            self.rest()
            for number, prompt in enumerate(prompts):
                short = [*prompt[: self._length(100, 40)], FIRST_TOKEN + number]
                self.ask(self._name(f"prefix {number}.{lap}"), short)
            self.rest()
            self.forget()
        for number, prompt in enumerate(prompts[3:]):
            self.ask(self._name(f"one at a time {number}"), [*prompt, *self._tokens(7)])
            self.rest()
            self.forget()

    def _weights(self, talks: Sequence[str]) -> None:
        """Other weights, and back: KV of the ones is wrong for the others."""
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
            self.ask(f"{talk}, at last", [*self._said(talk), FIRST_TOKEN])
            self.rest()

    def _said(self, name: str) -> list[int]:
        """A conversation so far: prompt, and answer as it should be."""
        answers = self.served.answers if self._truth is None else self._truth
        return [*self.prompts[name], *answers[name]]

    def _name(self, what: str) -> str:
        return f"{self._seed}: {what}"

    def _tokens(self, number: int) -> list[int]:
        return self._draw.choices(range(FIRST_TOKEN, VOCABULARY), k=number)

    def _length(self, most: int, fewest: int = 1) -> int:
        """Every other one ends a block with its prompt or with its answer, or nearly."""
        length = self._draw.randint(fewest, most)
        if self._draw.random() < 0.5:
            length -= (length + self._draw.choice((-1, 0, 1, NUM_TOKENS))) % BLOCK_SIZE
        return min(max(length, fewest), most)
