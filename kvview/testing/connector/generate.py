"""Scenarios from seeds: what each one is about is drawn, what all must cover is dealt out.

Geometries are dealt in turn, and each seed plays every scene of its hand, so that loads
of all kinds end in all ways in any two hundred seeds in a row
(:mod:`~kvview.testing.connector.coverage`). What happens between scenes is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from random import Random
from typing import Literal, TypeVar

from kvview import (
    CacheGeometry,
    CacheGroup,
    ChunkedLocalAttention,
    FullAttention,
    Mamba,
    SlidingWindow,
)
from kvview.testing.connector.aging import FEWEST_LAPS
from kvview.testing.connector.scenario import (
    Abort,
    AbortLoading,
    Add,
    Alias,
    Event,
    Fate,
    Reset,
    Scenario,
    Squeeze,
    Step,
    WorkerHalf,
)

_SHARE_OF_NEXT_TURNS = 0.3
_SHARE_OF_TWINS = 0.1
_SHARE_OF_EARLY_ENDS = 0.3
_SHARE_AS_IT_IS = 0.6  # of the worker halves, where compute lags
_SHARE_YIELDING_OFTEN = 0.2  # of those as they are
_SMALLEST_POOL, _SMALLEST_SIZE = 8, 4
_Kind = Literal["usual", "small pool", "large pool", "huge pool", "no tier", "roomy", "steady"]
_KINDS_OF_A_HUNDRED: dict[_Kind, int] = {
    "small pool": 3,
    "large pool": 1,
    "huge pool": 1,
    "no tier": 2,  # the connector's option asks for none
    "roomy": 2,  # nothing is ever short
    "steady": 2,
}
_HUGE_POOLS: dict[_Kind, int] = {"large pool": 2_000, "huge pool": 10_000}
_SHARED_BLOCKS = (0, 1, 2, 2, 8)
_CLOCK_JUMPS = (0.0, 0.0, 0.0, 1.0, 3600.0)
_MOST_LARGE_PAGES = 120  # blocks

_KINDS = ("full", "window", "chunked", "mamba")
_SHAPES = ("one", "equal", "mixed")
_DEAL = [
    (shape, kind)
    for shape, kind in product(_SHAPES, _KINDS)
    if shape == "one" or kind != "full"  # which most of several groups are anyway
]

_T = TypeVar("_T")


class _Draw:
    """Draws for one purpose: draws for another do not depend on how many these are."""

    def __init__(self, seed: int, purpose: str = "") -> None:
        # Only random() is promised to give the same numbers in every Python.
        self._random = Random(f"{purpose} {seed}").random

    def number(self, low: int, high: int) -> int:
        return low + int(self._random() * (high - low + 1))

    def one_of(self, items: Sequence[_T]) -> _T:
        return items[self.number(0, len(items) - 1)]

    def chance(self, share: float) -> bool:
        return self._random() < share

    def shuffled(self, items: Sequence[_T]) -> list[_T]:
        left = list(items)
        return [left.pop(self.number(0, len(left) - 1)) for _ in items]


def _deal_kinds() -> list[_Kind]:
    special = [kind for kind, times in _KINDS_OF_A_HUNDRED.items() for _ in range(times)]
    usual: list[_Kind] = ["usual"] * (100 - len(special))
    return _Draw(0, "kinds").shuffled(special + usual)


_KIND_OF = _deal_kinds()
"""The kind of each of a hundred scenarios in a row."""


def generate_scenario(seed: int, steps: int = 0) -> Scenario:
    """The scenario of a seed; the same in every version of Python.

    Args:
        seed: Any.
        steps: Steps that it has at least, in as many laps as that takes; 0 for one lap.
    """
    hundred, place = divmod(seed, len(_KIND_OF))
    kind = _KIND_OF[place]
    if kind == "steady":
        num_before = _KIND_OF[:place].count("steady")
        steady = steady_scenario(hundred * _KINDS_OF_A_HUNDRED["steady"] + num_before)
        return replace(steady, laps=max(steady.laps, -(-steps // steady.steps_per_lap)))
    draw = _Draw(seed)
    geometry = _generate_geometry(draw, *_DEAL[seed % len(_DEAL)])
    if kind == "small pool":
        geometry = CacheGeometry.single(_SMALLEST_SIZE)
    size = geometry.scheduler_block_size
    max_tokens_per_step = size * draw.one_of([2, 4, 8])
    longest = size * draw.number(2, 5) + draw.number(0, size)
    most_tokens = longest + 3 * size
    blocks_of_longest = sum(-(-most_tokens // g.block_size) for g in geometry.groups)
    num_gpu_blocks = 2 + blocks_of_longest * draw.number(6, 14) // 5
    if kind == "small pool":
        num_gpu_blocks, most_tokens = _SMALLEST_POOL, (_SMALLEST_POOL - 1) * size
        longest = min(longest, most_tokens - 2 * size)
    num_gpu_blocks = _HUGE_POOLS.get(kind, num_gpu_blocks)
    events = _Events(draw, longest, most_tokens, size, num_gpu_blocks)
    scenario = Scenario(
        geometry,
        num_gpu_blocks,
        events.generate(),
        _generate_fates(draw),
        cpu_blocks=draw.one_of(
            [draw.number(2, 8), 2 * blocks_of_longest, 6 * blocks_of_longest, 9 * blocks_of_longest]
        ),
        num_connectors=2 if draw.chance(0.2) else 1,
        max_running=draw.one_of([1, 2, 3, 4, 4]),
        max_tokens_per_step=max_tokens_per_step,
        decode_tokens=draw.number(size // 2, size),
        ends_abruptly=draw.chance(0.15),
        worker_half=_generate_worker_half(_Draw(seed, "worker half")),
        group_pages=_generate_pages(_Draw(seed, "pages"), len(geometry.groups), num_gpu_blocks),
        pin_budget=_generate_pin_budget(_Draw(seed, "pin budget")),
        clock_jump=_Draw(seed, "clock").one_of(_CLOCK_JUMPS),
    )
    if scenario.ends_abruptly:
        scenario = replace(scenario, events=events.end_in_flight())
    if kind == "no tier":
        scenario = replace(scenario, cpu_blocks=0)
    scenario = replace(scenario, laps=max(1, -(-steps // scenario.steps_per_lap)))
    if kind == "roomy":
        scenario = _without_shortage(scenario)
    return _overlap_steps(_Draw(seed, "overlap"), scenario)


def _without_shortage(scenario: Scenario) -> Scenario:
    """The same requests, with room for all of them on both sides."""
    num_blocks = scenario.num_blocks_of_all
    return replace(
        scenario,
        events=tuple(event for event in scenario.events if not isinstance(event, Squeeze)),
        fates=tuple(replace(fate, outcome="ok", is_lost=False) for fate in scenario.fates),
        cpu_blocks=num_blocks,
        num_gpu_blocks=2 * num_blocks + 1,
        ends_abruptly=False,
        group_pages=(),
        pin_budget=None,
    )


def _overlap_steps(draw: _Draw, scenario: Scenario) -> Scenario:
    """In half of the scenarios several steps in flight, and ends that nobody foresees."""
    steps_in_flight = draw.one_of([1, 1, 2, 3])
    compute_lags = draw.chance(1 / 3)
    events = scenario.events
    if steps_in_flight > 1:
        events = tuple(
            replace(event, stops_after=draw.number(1, event.num_output_tokens))
            if isinstance(event, Add)
            and event.num_output_tokens
            and draw.chance(_SHARE_OF_EARLY_ENDS)
            else event
            for event in events
        )
    worker_half = scenario.worker_half
    if compute_lags and draw.chance(_SHARE_AS_IT_IS):  # it has to order itself
        worker_half = "whole_plans"
    return replace(
        scenario,
        events=events,
        worker_half=worker_half,
        threads_yield_often=worker_half == "whole_plans" and draw.chance(_SHARE_YIELDING_OFTEN),
        steps_in_flight=steps_in_flight,
        compute_lags=compute_lags,
    )


def _generate_worker_half(draw: _Draw) -> WorkerHalf:
    if draw.chance(0.125):
        return "in_a_process"
    return "whole_plans" if draw.chance(0.35) else "job_by_job"


def _generate_pin_budget(draw: _Draw) -> float | None:
    return draw.one_of([0.1, 0.25, 0.5]) if draw.chance(0.1) else None


def _generate_pages(
    draw: _Draw, num_groups: int, num_gpu_blocks: int
) -> tuple[tuple[int, ...], ...]:
    if draw.chance(0.6):
        return ()
    # All bytes are compared in every step: 6 % of the runs took a third of the time.
    is_large = draw.chance(0.25) and num_gpu_blocks <= _MOST_LARGE_PAGES
    sizes = [2**16, 2**17] if is_large else [16, 64, 104, 200]
    num_tensors = 1 if is_large else draw.number(1, 3)
    pages = []
    for group in range(num_groups):
        used = [draw.one_of([0, draw.one_of(sizes)]) for _ in range(num_tensors)]
        used[group % num_tensors] = draw.one_of(sizes)
        pages.append(used)
    in_use = [index for index in range(num_tensors) if any(used[index] for used in pages)]
    return tuple(tuple(used[index] for index in in_use) for used in pages)


def steady_scenario(seed: int) -> Scenario:
    """The same lap over and over, for a tier that is too small for all that comes (CONN-10).

    Some prompts come often and others once, and are found on the GPU whole, in part or not at
    all; transfers fail, requests are aborted, wait for room for one step or ten, and come in
    pairs; with half of the seeds the caches are reset five times a lap, with a
    quarter there is a pin budget, with another one more transfers fail and more is aborted.

    Args:
        seed: Any; of four in a row, no two have the same groups and resets.
    """
    draw = _Draw(seed, "steady")
    size = 4
    groups: tuple[CacheGroup, ...] = (FullAttention(size),)
    if seed % 2:
        groups += (SlidingWindow(size, 14),)
    num_gpu_blocks = 50 * len(groups)
    has_resets, is_troubled = seed % 4 < 2, seed % 4 == 2
    events: list[Event] = []
    for number in range(30):
        family = draw.number(1, 3) if draw.chance(0.7) else 10 + number
        num_shared = 2 * (family % 2)
        name = f"s{number}"
        length = size * (8 if draw.chance(0.6) else draw.number(7, 9)) + 1
        if is_full := draw.chance(0.3):
            events += [Step(6), Squeeze(num_gpu_blocks - 5)]
        events.append(
            Add(
                name,
                family,
                length,
                draw.number(0, 3),
                num_shared_blocks=num_shared,
            )
        )
        if draw.chance(0.3):
            events.append(Add(f"{name}b", family, length, num_shared_blocks=num_shared))
        events.append(Step(draw.number(1, 3)))
        if has_resets and number % 15 == 9:
            events.append(Reset())  # with loads in flight
        if is_full:
            events.append(Step(draw.one_of([1, 1, 10])))
            if draw.chance(0.3):
                events.append(Abort(name))  # while it waits for room
            events.append(Squeeze(0))
        if draw.chance(0.6 if is_troubled else 0.3):
            events.append(AbortLoading() if draw.chance(0.5) else Abort(name))
        events.append(Step(draw.number(3, 6)))
        if has_resets and number % 15 == 4:
            events.append(Reset())  # with stores in flight
        if draw.chance(0.7):
            events += [Squeeze(num_gpu_blocks // draw.one_of([1, 2])), Squeeze(0)]
    events.append(Step(12))
    if has_resets:
        events.append(Reset())
    return Scenario(
        CacheGeometry(size, size, groups),
        num_gpu_blocks,
        tuple(events),
        _generate_fates(draw, (0.25 if is_troubled else 0.15, 0.0)),
        cpu_blocks=50 * len(groups),
        max_tokens_per_step=16,
        laps=FEWEST_LAPS,
        pin_budget=0.1 if seed % 4 == 3 else None,
    )


def _generate_geometry(draw: _Draw, shape: str, kind: str) -> CacheGeometry:
    """A geometry of a shape, with a group of a kind in it."""
    if shape == "one" and kind == "full" and draw.chance(0.7):
        return CacheGeometry.single(4)
    size = draw.one_of([4, 8, 12])
    sizes = [n for n in (2, 4, 6) if size % n == 0]
    if shape == "one":
        return CacheGeometry(size, 2, (_generate_group(draw, kind, draw.one_of(sizes)),))
    kinds = ["full" if draw.chance(0.85) else draw.one_of(_KINDS), kind]
    if draw.chance(0.5):
        kinds.append(draw.one_of(_KINDS))
    block_sizes = [draw.one_of(sizes)] * len(kinds)
    if shape == "mixed":
        block_sizes = [draw.one_of(sizes) for _ in kinds]
        block_sizes[:2] = draw.shuffled(sizes)[:2]
    groups = [_generate_group(draw, *of) for of in zip(kinds, block_sizes, strict=True)]
    return CacheGeometry(size, 2, tuple(draw.shuffled(groups)))


def _generate_group(draw: _Draw, kind: str, block: int) -> CacheGroup:
    match kind:
        case "window":
            return SlidingWindow(block, draw.number(2, draw.one_of([6, 14])))
        case "chunked":
            return ChunkedLocalAttention(block, draw.number(4, 14))
        case "mamba":
            return Mamba(block)
    return FullAttention(block)


class _Events:
    """Draws what happens.

    Args:
        draw: Decides.
        longest: Tokens of the longest prompt.
        most_tokens: Tokens of a request that the pool has room for.
        size: Tokens of a scheduler block.
        num_gpu_blocks: Blocks of the pool.
    """

    def __init__(
        self, draw: _Draw, longest: int, most_tokens: int, size: int, num_gpu_blocks: int
    ) -> None:
        self._draw = draw
        self._longest = longest
        self._most_tokens = most_tokens
        self._size = size
        self._num_gpu_blocks = num_gpu_blocks
        self._num_families = draw.number(2, 4)
        self._num_shared = [draw.one_of(_SHARED_BLOCKS) for _ in range(self._num_families + 1)]
        self._num_ids = 0
        self._num_tokens: dict[str, int] = {}  # of the requests so far
        self._events: list[Event] = []

    def generate(self) -> tuple[Event, ...]:
        """Scenes, and what comes between them."""
        draw = self._draw
        ends: list[Event | None] = [None, AbortLoading(), Reset(draw.chance(0.5))]
        hand: list[Callable[[], None]] = [partial(self._load, end) for end in 2 * ends]
        hand += draw.shuffled([self._storm, self._talk, self._twins, self._return])[:2]
        for scene in draw.shuffled(hand):
            for _ in range(draw.number(0, 6)):
                self._anything()
            scene()
        return tuple(self._events)

    # --- scenes ---

    def _load(self, end: Event | None) -> None:
        """Prompts that were computed before come again; the GPU has nothing of them, or some."""
        draw, size = self._draw, self._size
        num_blocks = (self._longest - 1) // size
        families = draw.shuffled(range(1, self._num_families + 1))[:2]
        self._events.append(Squeeze(0))
        for has_gpu_hit in draw.shuffled([False, True]):
            self._ask(families, num_blocks * size)  # no token more: Mamba has its last state
            self._step(draw.number(5, 8))
            self._evict()
            if has_gpu_hit:
                self._ask(families, size * draw.number(1, max(1, num_blocks - 1)))
                self._step(draw.number(3, 5))
            self._ask(families, num_blocks * size + 1)
            self._step(1)
            if end is not None:
                self._events += [end] * len(families)
            self._step(draw.number(2, 4))

    def _ask(self, families: Sequence[int], length: int) -> None:
        for family in families:
            self._add(family, length)

    def _storm(self) -> None:
        """Requests that generate lose their blocks again and again."""
        draw = self._draw
        for _ in range(draw.number(2, 4)):
            room = self._most_tokens - self._longest
            self._add(draw.number(1, self._num_families), self._longest, room)
        for _ in range(draw.number(3, 5)):
            self._step(1)
            self._events.append(Alias())
            self._events.append(Squeeze(self._num_gpu_blocks - draw.number(1, 4)))
            self._step(1)
            self._events.append(Squeeze(0))

    def _talk(self) -> None:
        """A request is cut short; two go on where it was, one of them to its end."""
        draw, size = self._draw, self._size
        first = self._add(draw.number(1, self._num_families), size + draw.number(1, size), 2 * size)
        self._step(draw.number(1, 4))
        self._events.append(Alias())
        if draw.chance(0.5):
            self._events.append(Abort(first))
        self._step(draw.number(2, 6))
        if draw.chance(0.5):
            self._evict()
        for _ in range(2):
            self._continue(self._new_id(), first)
            self._step(draw.number(0, 4))

    def _twins(self) -> None:
        """Equal prompts come in one step: blocks of one hash."""
        draw = self._draw
        family, length = draw.number(1, self._num_families), self._any_length()
        if draw.chance(0.5):
            self._evict()
        for _ in range(draw.number(2, 3)):
            self._add(family, length, draw.number(0, self._size))
        self._step(draw.number(2, 5))

    def _return(self) -> None:
        """A, B, A: a prompt comes again after another one, which may begin like it."""
        draw, size = self._draw, self._size
        first, second = draw.shuffled(range(1, self._num_families + 1))[:2]
        for family in (first, second, first):
            self._add(family, min(self._any_length() + size, self._longest))
            self._step(draw.number(3, 8))
            if draw.chance(0.7):
                self._evict()

    def end_in_flight(self) -> tuple[Event, ...]:
        """All of it, and then prompts that come again while the last step is played."""
        families, length = (1, 2), (self._longest - 1) // self._size * self._size + 1
        self._step(6)
        self._ask(families, length)
        self._step(6)
        self._evict()
        self._ask(families, length)
        self._step(self._draw.number(2, 4))
        return tuple(self._events)

    # --- between them ---

    def _anything(self) -> None:
        draw = self._draw
        kind = draw.number(0, 99)
        if kind < 25:
            name = self._new_id()
            if draw.chance(0.3):
                name = f"r{draw.number(1, self._num_ids)}"  # perhaps in use, or a second life
            if self._num_tokens and draw.chance(_SHARE_OF_NEXT_TURNS):
                self._continue(name, draw.one_of(list(self._num_tokens)[-3:]))
                return
            family, length = draw.number(1, self._num_families), self._any_length()
            num_output = draw.number(0, self._size) * draw.one_of([0, 1, 3])
            num_output = min(num_output, self._most_tokens - length)
            self._add(family, length, num_output, name)
            if draw.chance(_SHARE_OF_TWINS):
                self._add(family, length, num_output)
        elif kind < 68:
            self._step(draw.number(1, 3))
        elif kind < 77:
            self._events.append(AbortLoading())
        elif kind < 84:
            # Mostly of those that came last: they are the ones that are still there.
            self._events.append(Abort(f"r{max(1, self._num_ids - draw.number(0, 5))}"))
        elif kind < 95:
            if draw.chance(0.5):
                self._events.append(Squeeze(self._num_gpu_blocks))  # evicts what is free
            num_blocks = draw.number(1, self._num_gpu_blocks) if draw.chance(0.4) else 0
            self._events.append(Squeeze(num_blocks))
        elif kind < 98:
            self._events.append(Alias())
        else:
            self._events.append(Reset(after_reports=draw.chance(0.5)))

    # --- one event ---

    def _new_id(self) -> str:
        self._num_ids += 1
        return f"r{self._num_ids}"

    def _any_length(self) -> int:
        return self._longest - self._draw.number(0, self._longest - 1) * self._draw.number(0, 1)

    def _add(self, family: int, length: int, num_output: int = 0, name: str = "") -> str:
        name = name or self._new_id()
        add = Add(name, family, length, num_output, num_shared_blocks=self._num_shared[family])
        self._note(add, length + num_output)
        return add.request_id

    def _continue(self, name: str, before: str) -> None:
        draw, size = self._draw, self._size
        room = self._most_tokens - self._num_tokens[before]
        if room >= 2:
            length = draw.number(1, min(2 * size, room - 1))
            num_output = draw.number(1, min(size, room - length))
            num_tokens = self._num_tokens[before] + length + num_output
            self._note(Add(name, self._num_families, length, num_output, before), num_tokens)

    def _note(self, add: Add, num_tokens: int) -> None:
        self._events.append(add)
        self._num_tokens.pop(add.request_id, None)  # the last of an id is what counts
        self._num_tokens[add.request_id] = num_tokens

    def _step(self, count: int) -> None:
        if count:
            self._events.append(Step(count))

    def _evict(self) -> None:
        self._events += [Squeeze(self._num_gpu_blocks), Squeeze(0)]


def _generate_fates(draw: _Draw, shares: tuple[float, float] | None = None) -> tuple[Fate, ...]:
    share_failed, share_lost = shares or draw.one_of(
        [(0.0, 0.0), (0.4, 0.05), (0.5, 0.1), (0.6, 0.05)]
    )
    usual = Fate()
    fates = []
    for _ in range(60):
        move_after, later = draw.number(0, 4), draw.number(0, 3)
        fate = usual if draw.chance(0.4) else Fate(move_after, move_after + later)
        if draw.chance(share_failed):
            fate = replace(fate, outcome="half" if draw.chance(0.5) else "none")
        fates.append(replace(fate, is_lost=draw.chance(share_lost)))
    return tuple(fates)
