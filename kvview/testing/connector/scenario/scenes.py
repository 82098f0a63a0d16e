"""The events of generated scenarios: scenes, with random events between the scenes.

Each seed contains all scenes, so that any two hundred consecutive seeds have loads of all kinds
with all results (:mod:`~kvview.testing.connector.exercised.coverage`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvview.testing.connector.scenario.draw import Draw, in_turn
from kvview.testing.connector.scenario.scenario import (
    Abort,
    AbortLoading,
    Add,
    Event,
    HoldBlocks,
    Reset,
    SecondHash,
    Step,
)

SHARED_BLOCKS = (0, 1, 2, 2, 8)
"""Number of hash blocks at the start of a prompt that all families share."""
SHARE_OF_NEXT_TURNS = 0.3
SHARE_OF_TWINS = 0.1
SHARE_OF_REUSED_IDS = 0.3
_MOST_UNFINISHED = 8
_FIRST_NEW_FAMILY = 100


class Scenes:
    """Draws the events of one scenario.

    Args:
        draw: Random draws.
        longest: Tokens of the longest prompt.
        most_tokens: Tokens of the longest request for which the pool is large enough.
        size: Tokens of a scheduler block.
        num_gpu_blocks: Blocks of the pool.
    """

    def __init__(
        self, draw: Draw, longest: int, most_tokens: int, size: int, num_gpu_blocks: int
    ) -> None:
        self._draw = draw
        self._longest = longest
        self._most_tokens = most_tokens
        self._size = size
        self._num_gpu_blocks = num_gpu_blocks
        self._num_families = draw.number(2, 4)
        self._num_shared = [draw.one_of(SHARED_BLOCKS) for _ in range(self._num_families + 1)]
        self._num_ids = 0
        self._num_tokens: dict[str, int] = {}  # number of tokens so far, by request
        self._events: list[Event] = []

    def generate(self) -> tuple[Event, ...]:
        """Play the scenes in a random order, with random events between them."""
        draw = self._draw
        ends: list[Event | None] = [None, AbortLoading(), Reset(draw.chance(0.5))]
        hand: list[Callable[[], None]] = [partial(self._load, end) for end in 2 * ends]
        hand += draw.shuffled([self._preempt_often, self._talk, self._twins, self._return])[:2]
        for scene in draw.shuffled(hand):
            for _ in range(draw.number(0, 6)):
                self._random_event()
            scene()
        return tuple(self._events)

    def end_in_flight(self) -> tuple[Event, ...]:
        """Return the events so far, then prompts that load or are stored at the end."""
        families, length = (1, 2), (self._longest - 1) // self._size * self._size + 1
        self._step(6)
        self._add_each(families, length)
        self._step(6)
        self._evict()
        self._add_each(families, length)
        last = self._add(_FIRST_NEW_FAMILY, length, self._size)
        self._step(self._draw.number(2, 4))
        if self._draw.chance(0.5):
            self._events.append(Abort(last))  # after the last plan
        return tuple(self._events)

    def late_moments(self, number: int, draw: Draw) -> tuple[Event, ...]:
        """Return the events so far, then moments that need a run-up, two of three in turn.

        Args:
            number: Any whole number, which chooses the moments.
            draw: Random draws, so that the events before do not depend on these.
        """
        self._draw = draw
        recent = list(self._num_tokens)[-_MOST_UNFINISHED:]
        self._events += [HoldBlocks(0), *map(Abort, recent), Step(4)]
        moments = self._end_at_a_block, self._preempt_and_reuse, self._reset_at_stores
        for place in (number, number + 1):
            in_turn(moments, place)()
        return tuple(self._events)

    # --- late moments ---

    def _end_at_a_block(self) -> None:
        """Continue requests whose last token, which is sampled and not computed, ends a block."""
        draw, size = self._draw, self._size
        names = []
        for family in (1, 2):
            num_output = draw.number(1, min(4, size - 1))
            length = size * draw.number(2, max(2, self._longest // size)) - num_output
            names.append(self._add(family, length, num_output))
        self._step(draw.number(8, 12))
        if draw.chance(0.5):
            self._evict()
        for name in names:
            self._continue(self._new_id(), name)
        self._step(draw.number(5, 8))

    def _preempt_and_reuse(self) -> None:
        """Preempt a request in its last step and one in its prompt, and reuse what they stored.

        The first request needs a block at its first generated token, which is the last token of the
        second request. The prompt of the third request takes more than a step.
        """
        draw, size = self._draw, self._size
        families = draw.shuffled(range(1, self._num_families + 1))[:2]
        first = self._add(families[0], (self._longest - 1) // size * size, 2 * size + 1)
        names = [first, self._add(families[1], draw.number(1, size), 1)]
        self._take_blocks()
        names.append(self._add(families[1], self._longest - 1))
        self._take_blocks()
        self._step(2)
        self._events += map(Abort, names)
        self._step(draw.number(5, 8))
        self._evict()
        self._add_each(families, self._longest)
        self._step(draw.number(4, 6))

    def _take_blocks(self) -> None:
        """Hold all free blocks for some steps, so that a request that needs one is preempted."""
        self._step(1)
        self._events.append(HoldBlocks(self._num_gpu_blocks))
        self._step(self._draw.number(2, 4))
        self._events.append(HoldBlocks(0))
        self._step(self._draw.number(1, 4))

    def _reset_at_stores(self) -> None:
        """Reset the caches while new prompts are stored, or just after, and reuse the prompts."""
        draw, size = self._draw, self._size
        for number in range(2):
            families = range(_FIRST_NEW_FAMILY + 4 * number, _FIRST_NEW_FAMILY + 4 * (number + 1))
            for family in families:  # one after the other, so that the stores are at all stages
                self._add(family, size)
                self._step(1)
            self._step(3 * number + draw.number(0, 4))
            self._events.append(Reset(draw.chance(0.5)))
            self._step(draw.number(4, 8))
            self._evict()
            self._add_each(families, size + 1)
            self._step(draw.number(3, 5))

    # --- scenes ---

    def _load(self, end: Event | None) -> None:
        """Reuse earlier prompts, of which the GPU still has some blocks, or has none.

        Args:
            end: Event that ends the loads of each prompt; with None, the loads end by themselves.
        """
        draw, size = self._draw, self._size
        num_blocks = (self._longest - 1) // size
        families = draw.shuffled(range(1, self._num_families + 1))[:2]
        self._events.append(HoldBlocks(0))
        for has_gpu_hit in draw.shuffled([False, True]):
            # The prompt has whole blocks, because Mamba stores its last state.
            self._add_each(families, num_blocks * size)
            self._step(draw.number(5, 8))
            self._evict()
            if has_gpu_hit:
                self._add_each(families, size * draw.number(1, max(1, num_blocks - 1)))
                self._step(draw.number(3, 5))
            self._add_each(families, num_blocks * size + 1)
            self._step(1)
            if end is not None:
                self._events += [end] * len(families)
            self._step(draw.number(2, 4))

    def _preempt_often(self) -> None:
        """Let decoding requests lose their blocks repeatedly."""
        draw = self._draw
        for _ in range(draw.number(2, 4)):
            room = self._most_tokens - self._longest
            self._add(draw.number(1, self._num_families), self._longest, room)
        for _ in range(draw.number(3, 5)):
            self._step(1)
            self._events.append(SecondHash())
            self._events.append(HoldBlocks(self._num_gpu_blocks - draw.number(1, 4)))
            self._step(1)
            self._events.append(HoldBlocks(0))

    def _talk(self) -> None:
        """End a request early, and let two requests continue it; one of these runs to its end."""
        draw, size = self._draw, self._size
        first = self._add(draw.number(1, self._num_families), size + draw.number(1, size), 2 * size)
        self._step(draw.number(1, 4))
        self._events.append(SecondHash())
        if draw.chance(0.5):
            self._events.append(Abort(first))
        self._step(draw.number(2, 6))
        if draw.chance(0.5):
            self._evict()
        for _ in range(2):
            self._continue(self._new_id(), first)
            self._step(draw.number(0, 4))

    def _twins(self) -> None:
        """Start equal prompts in one step, so that two blocks have one hash."""
        draw = self._draw
        family, length = draw.number(1, self._num_families), self._any_length()
        if draw.chance(0.5):
            self._evict()
        for _ in range(draw.number(2, 3)):
            self._add(family, length, draw.number(0, self._size))
        self._step(draw.number(2, 5))

    def _return(self) -> None:
        """Reuse a prompt after another prompt (A, B, A) that may share the same start."""
        draw, size = self._draw, self._size
        first, second = draw.shuffled(range(1, self._num_families + 1))[:2]
        for family in (first, second, first):
            self._add(family, min(self._any_length() + size, self._longest))
            self._step(draw.number(3, 8))
            if draw.chance(0.7):
                self._evict()

    # --- between scenes ---

    def _random_event(self) -> None:
        draw = self._draw
        events: list[tuple[int, Callable[[], None]]] = [  # percent
            (25, self._any_request),
            (43, lambda: self._step(draw.number(1, 3))),
            (9, lambda: self._events.append(AbortLoading())),
            (7, self._abort_a_late_request),
            (11, self._squeeze),
            (3, lambda: self._events.append(SecondHash())),
            (2, lambda: self._events.append(Reset(after_reports=draw.chance(0.5)))),
        ]
        drawn = draw.number(0, 99)
        for percent, play in events:
            if drawn < percent:
                play()
                return
            drawn -= percent

    def _any_request(self) -> None:
        draw = self._draw
        name = self._new_id()
        if draw.chance(SHARE_OF_REUSED_IDS):
            name = f"r{draw.number(1, self._num_ids)}"  # an unfinished or reused id, perhaps
        if self._num_tokens and draw.chance(SHARE_OF_NEXT_TURNS):
            self._continue(name, draw.one_of(list(self._num_tokens)[-3:]))
            return
        family, length = draw.number(1, self._num_families), self._any_length()
        num_output = draw.number(0, self._size) * draw.one_of([0, 1, 3])
        num_output = min(num_output, self._most_tokens - length)
        self._add(family, length, num_output, name)
        if draw.chance(SHARE_OF_TWINS):
            self._add(family, length, num_output)

    def _abort_a_late_request(self) -> None:
        """Abort one of the last requests, because most earlier requests have ended."""
        self._events.append(Abort(f"r{max(1, self._num_ids - self._draw.number(0, 5))}"))

    def _squeeze(self) -> None:
        draw = self._draw
        if draw.chance(0.5):
            self._events.append(HoldBlocks(self._num_gpu_blocks))  # evicts all free blocks
        num_blocks = draw.number(1, self._num_gpu_blocks) if draw.chance(0.4) else 0
        self._events.append(HoldBlocks(num_blocks))

    # --- one event ---

    def _new_id(self) -> str:
        self._num_ids += 1
        return f"r{self._num_ids}"

    def _any_length(self) -> int:
        return self._longest - self._draw.number(0, self._longest - 1) * self._draw.number(0, 1)

    def _add_each(self, families: Sequence[int], length: int) -> None:
        for family in families:
            self._add(family, length)

    def _add(self, family: int, length: int, num_output: int = 0, name: str = "") -> str:
        name = name or self._new_id()
        num_shared = self._num_shared[family] if family < _FIRST_NEW_FAMILY else 0
        add = Add(name, family, length, num_output, num_shared_blocks=num_shared)
        self._append(add, length + num_output)
        return name

    def _continue(self, name: str, before: str) -> None:
        draw, size = self._draw, self._size
        room = self._most_tokens - self._num_tokens[before]
        if room >= 2:
            length = draw.number(1, min(2 * size, room - 1))
            num_output = draw.number(1, min(size, room - length))
            num_tokens = self._num_tokens[before] + length + num_output
            self._append(Add(name, self._num_families, length, num_output, before), num_tokens)

    def _append(self, add: Add, num_tokens: int) -> None:
        self._events.append(add)
        self._num_tokens.pop(add.request_id, None)  # the last request becomes the newest
        self._num_tokens[add.request_id] = num_tokens

    def _step(self, count: int) -> None:
        if count:
            self._events.append(Step(count))

    def _evict(self) -> None:
        self._events += [HoldBlocks(self._num_gpu_blocks), HoldBlocks(0)]
