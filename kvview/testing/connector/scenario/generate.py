"""Scenarios from seeds.

Most fields are drawn at random. Geometries and kinds of scenarios are assigned to seeds in turn, so
that the seeds cover all geometries and kinds. The events are drawn by
:mod:`~kvview.testing.connector.scenario.scenes`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from kvview import (
    CacheGeometry,
    CacheGroup,
    ChunkedLocalAttention,
    FullAttention,
    Mamba,
    SlidingWindow,
)
from kvview.testing.connector.run.long_runs import FEWEST_ROUNDS, with_many_keys
from kvview.testing.connector.scenario.draw import Draw, in_turn
from kvview.testing.connector.scenario.scenario import (
    NUM_LAYERS,
    PAGE_BYTES,
    Abort,
    AbortLoading,
    Add,
    Event,
    Fate,
    HoldBlocks,
    Reset,
    Scenario,
    Step,
    WorkerHalf,
)
from kvview.testing.connector.scenario.scenes import Scenes

Kind = Literal[
    "usual", "small pool", "many keys", "huge pool", "no tier", "roomy", "steady", "full tier"
]
KINDS_OF_A_HUNDRED: dict[Kind, int] = {
    "small pool": 3,
    "many keys": 1,  # two prompts of more than a thousand blocks
    "huge pool": 1,
    "no tier": 2,  # the tier has 0 pages
    "roomy": 2,  # neither blocks nor pages are ever short
    "steady": 2,
    "usual": 84,
    "full tier": 5,  # stores need the pages of loads and promises
}
"""Kinds of scenarios, and the number of seeds for each in a hundred consecutive seeds."""
HUGE_POOL = 10_000
SMALL_POOL, SMALL_BLOCK = 8, 4

STEPS_IN_FLIGHT = (1, 1, 2, 3)
MAX_RUNNING = (1, 2, 3, 4, 4)
CLOCK_JUMPS = (0.0, 0.0, 0.0, 1.0, 3600.0)
PIN_BUDGETS = (0.1, 0.25, 0.5)
PAGE_SIZES = (16, 64, 104, 200)
LARGE_PAGE_SIZES = (2**16, 2**17)
SHARES_FAILED_AND_LOST = ((0.0, 0.0), (0.4, 0.05), (0.5, 0.1), (0.6, 0.05))
"""Shares of jobs that fail; each run has one of these shares."""

DRAFTS = (1, 3, 5)
"""Maximum of draft tokens in a step."""

SHARE_IN_THE_OTHER_RUNNER = 0.3
SHARE_WITH_RANKS = 0.2
SHARE_WITH_CAPS = 0.15
SHARE_OF_CAPS = 0.5
"""Share of the requests that have a cap on loads or stores, in a run with caps."""
INVALID_CAPS: tuple[int | str, ...] = (-1, "all")
SHARE_OF_INVALID_CAPS = 0.2
SHARE_WITH_DRAFTS = 0.35
SHARE_WITH_TWO_CONNECTORS = 0.2
SHARE_ENDING_ABRUPTLY = 0.15
SHARE_WITH_A_PIN_BUDGET = 0.1
SHARE_IN_A_PROCESS = 0.125
SHARE_WHOLE_PLANS = 0.35  # share of the other worker halves
# Share of runs in which a worker half must order its copies itself.
SHARE_WHOLE_PLANS_IF_COMPUTE_LAGS = 0.6
SHARE_YIELDING_OFTEN = 0.2  # share of the worker halves with whole plans
SHARE_OF_EARLY_ENDS = 0.3
SHARE_OF_USUAL_FATES = 0.4
_MOST_LARGE_PAGES = 120  # maximum of blocks, because all bytes are compared in every step
_NUM_FATES = 60
_NUM_DRAFTS = 7

_GROUPS = ("full", "window", "chunked", "mamba")
GEOMETRIES = [
    (shape, group)
    for shape, group in product(("one", "equal", "mixed"), _GROUPS)
    if shape == "one" or group != "full"  # most shapes contain a full group anyway
]
"""Shapes of geometries, each with a kind of group that the geometry must contain."""


def _kinds() -> list[Kind]:
    return Draw(0, "kinds").shuffled(
        [kind for kind, times in KINDS_OF_A_HUNDRED.items() for _ in range(times)]
    )


_KINDS = _kinds()
STEADY_PLACES = [place for place, kind in enumerate(_KINDS) if kind == "steady"]
"""Indices of the steady runs among a hundred consecutive seeds."""
FULL_TIER_PLACES = [place for place, kind in enumerate(_KINDS) if kind == "full tier"]
"""Indices of the runs in which stores need the pages of loads and promises."""


def generate_scenario(seed: int, steps: int = 0) -> Scenario:
    """Make the scenario of a seed, which is the same in every version of Python.

    Args:
        seed: Any whole number.
        steps: Minimum number of steps; the round is repeated until this number is reached. 0 for
            one round.
    """
    kind = in_turn(_KINDS, seed)
    if kind == "steady":
        hundred, place = divmod(seed, len(_KINDS))
        number = hundred * len(STEADY_PLACES) + STEADY_PLACES.index(place)
        scenario = steady_scenario(number)
    else:
        scenario = _usual_scenario(seed, kind)
    scenario = replace(scenario, rounds=max(scenario.rounds, -(-steps // scenario.steps_per_round)))
    if kind == "roomy":
        scenario = _without_shortage(scenario)
    if kind == "many keys":
        few = replace(scenario, group_pages=(), ranks=(), drafts=(), lookahead_tokens=0)
        scenario = replace(with_many_keys(few), rounds=1)
    return scenario if kind == "steady" else _overlap_steps(Draw(seed, "overlap"), scenario)


def _usual_scenario(seed: int, kind: Kind) -> Scenario:
    draw = Draw(seed)
    geometry = _generate_geometry(draw, *in_turn(GEOMETRIES, seed))
    if kind == "small pool":
        geometry = CacheGeometry.single(SMALL_BLOCK)
    size = geometry.scheduler_block_size
    max_tokens_per_step = size * draw.one_of([2, 4, 8])
    longest = size * draw.number(2, 5) + draw.number(0, size)
    most_tokens = longest + 3 * size
    blocks_of_longest = sum(-(-most_tokens // group.block_size) for group in geometry.groups)
    num_gpu_blocks = 2 + blocks_of_longest * draw.number(6, 14) // 5
    drafts, lookahead_tokens = _generate_drafts(Draw(seed, "drafts"), geometry)
    if drafts:
        num_slots = max(STEPS_IN_FLIGHT) * max(drafts)[0] + lookahead_tokens
        num_gpu_blocks += sum(-(-num_slots // group.block_size) for group in geometry.groups)
    if kind == "small pool":
        num_gpu_blocks, most_tokens = SMALL_POOL, (SMALL_POOL - 1) * size
        longest = min(longest, most_tokens - 2 * size)
        drafts, lookahead_tokens = (), 0
    if kind == "huge pool":
        num_gpu_blocks = HUGE_POOL
    scenes = Scenes(draw, longest, most_tokens, size, num_gpu_blocks)
    scenario = Scenario(
        geometry,
        num_gpu_blocks,
        scenes.generate(),
        _generate_fates(draw, *draw.one_of(SHARES_FAILED_AND_LOST)),
        cpu_blocks=draw.one_of(
            [draw.number(2, 8), *(times * blocks_of_longest for times in (2, 6, 9))]
        ),
        num_connectors=2 if draw.chance(SHARE_WITH_TWO_CONNECTORS) else 1,
        max_running=draw.one_of(MAX_RUNNING),
        max_tokens_per_step=max_tokens_per_step,
        decode_tokens=draw.number(size // 2, size),
        drafts=drafts,
        lookahead_tokens=lookahead_tokens,
        ends_abruptly=draw.chance(SHARE_ENDING_ABRUPTLY),
        worker_half=_generate_worker_half(Draw(seed, "worker half")),
        group_pages=_generate_pages(Draw(seed, "pages"), len(geometry.groups), num_gpu_blocks),
        pin_budget=_generate_pin_budget(Draw(seed, "pin budget")),
        clock_jump=Draw(seed, "clock").one_of(CLOCK_JUMPS),
    )
    if kind == "full tier":
        scenario = _with_full_tier(Draw(seed, kind), scenario, longest)
    elif not scenario.ends_abruptly:
        events = scenes.late_moments(seed, Draw(seed, "late moments"))
        scenario = replace(scenario, events=events)
    scenario = _over_ranks(Draw(seed, "ranks"), scenario)
    scenario = _with_caps(Draw(seed, "caps"), scenario)
    if scenario.ends_abruptly:
        scenario = replace(scenario, events=scenes.end_in_flight())
    return replace(scenario, cpu_blocks=0) if kind == "no tier" else scenario


def _without_shortage(scenario: Scenario) -> Scenario:
    """Return the scenario with enough blocks and pages for all requests."""
    num_blocks = scenario.num_blocks_of_all
    return replace(
        scenario,
        events=tuple(event for event in scenario.events if not isinstance(event, HoldBlocks)),
        fates=tuple(replace(fate, outcome="ok", is_lost=False) for fate in scenario.fates),
        cpu_blocks=num_blocks,
        num_gpu_blocks=2 * num_blocks + 1,
        ends_abruptly=False,
        group_pages=(),
        ranks=(),
        pin_budget=None,
    )


def _with_full_tier(draw: Draw, scenario: Scenario, longest: int) -> Scenario:
    """Return a scenario of the same sizes, in which one prompt fills the tier again and again.

    Another prompt ends and is stored while that prompt waits for blocks, or while it loads, in
    turn.
    """
    size = scenario.geometry.scheduler_block_size
    full = max(1, (longest - 1) // size) * size
    num_blocks = scenario.num_gpu_blocks
    num_needed = sum(full // group.block_size + 1 for group in scenario.geometry.groups)
    events: list[Event] = []
    for number in range(8):
        other = f"other {number}"
        events += [Add(f"first {number}", 1, full), Step(12)]
        events += [HoldBlocks(num_blocks), HoldBlocks(0)]
        num_shared = draw.one_of([0, 0, 2])  # else its start would also be on the GPU
        length = size * draw.number(1, 2)
        events += [Add(other, 2 + number, length, 4 * size, num_shared_blocks=num_shared)]
        events.append(Step(draw.number(2, 3)))
        again = Add(f"again {number}", 1, full + 1)
        if number % 2:  # promised, but waits for blocks; a store of the other evicts pages
            num_left = draw.one_of([0, draw.number(num_needed // 2, 2 * num_needed)])
            events += [HoldBlocks(max(0, num_blocks - num_left)), again, Step(1), Abort(other)]
            if draw.chance(0.5):  # also the blocks that the other has left
                events += [HoldBlocks(num_blocks), Step(draw.number(1, 8))]
            else:
                events.append(Step(draw.number(1, 3)))
        else:
            events += [again, Step(1), Abort(other), Step(draw.number(1, 3))]
        if draw.chance(0.3):
            events.append(Abort(again.request_id))
        events += [HoldBlocks(0), Step(8)]
    lateness = [(draw.number(1, 4), draw.number(0, 2)) for _ in range(_NUM_FATES)]
    return replace(
        scenario,
        events=tuple(events),
        fates=tuple(Fate(moved, moved + later) for moved, later in lateness),
        cpu_blocks=sum(len(g.required_blocks(full)) for g in scenario.geometry.groups),
        max_running=max(MAX_RUNNING),
        ends_abruptly=False,
        drafts=(),
        lookahead_tokens=0,
        pin_budget=None,
    )


def _over_ranks(draw: Draw, scenario: Scenario) -> Scenario:
    """Draw ranks, with equal tensors as in tensor parallelism, or with layers split over the ranks.

    All ranks have the same number of blocks, because vLLM uses the smallest number for all ranks.
    """
    if not draw.chance(SHARE_WITH_RANKS):
        return scenario
    pages = scenario.group_pages or ((PAGE_BYTES,) * NUM_LAYERS,) * len(scenario.geometry.groups)
    split = draw.number(1, max(1, len(pages[0]) - 1))
    has_parts = all(any(used[:split]) and any(used[split:]) for used in pages)
    if has_parts and draw.chance(0.5):
        return replace(scenario, group_pages=pages, ranks=(split, len(pages[0]) - split))
    number = draw.number(2, 3)
    ranks = (len(pages[0]),) * number
    return replace(scenario, group_pages=tuple(used * number for used in pages), ranks=ranks)


def _with_caps(draw: Draw, scenario: Scenario) -> Scenario:
    """Draw requests with caps on the tokens to load and to store.

    A cap may end inside a block. Some caps are invalid, because a client may send any value.
    """
    if not draw.chance(SHARE_WITH_CAPS):
        return scenario

    def with_cap(event: Event) -> Event:
        if not isinstance(event, Add) or not draw.chance(SHARE_OF_CAPS):
            return event
        cap: int | str = draw.number(0, event.num_prompt_tokens)
        if draw.chance(SHARE_OF_INVALID_CAPS):
            cap = draw.one_of(INVALID_CAPS)
        if draw.chance(0.5):
            return replace(event, max_load_tokens=cap)
        return replace(event, max_offload_tokens=cap)

    return replace(scenario, events=tuple(map(with_cap, scenario.events)))


def _overlap_steps(draw: Draw, scenario: Scenario) -> Scenario:
    """Draw steps in flight, early ends of requests, compute that lags, and a model runner."""
    steps_in_flight = draw.one_of(STEPS_IN_FLIGHT)
    compute_lags = draw.chance(1 / 3)
    events = scenario.events
    if steps_in_flight > 1:
        events = tuple(
            replace(event, stops_after=draw.number(1, event.num_output_tokens))
            if isinstance(event, Add)
            and event.num_output_tokens
            and draw.chance(SHARE_OF_EARLY_ENDS)
            else event
            for event in events
        )
    worker_half = scenario.worker_half
    if compute_lags and draw.chance(SHARE_WHOLE_PLANS_IF_COMPUTE_LAGS):
        worker_half = "whole_plans"
    return replace(
        scenario,
        events=events,
        worker_half=worker_half,
        threads_yield_often=worker_half == "whole_plans" and draw.chance(SHARE_YIELDING_OFTEN),
        steps_in_flight=steps_in_flight,
        compute_lags=compute_lags,
        other_runner=draw.chance(SHARE_IN_THE_OTHER_RUNNER),
    )


# --- one field ---


def _generate_worker_half(draw: Draw) -> WorkerHalf:
    if draw.chance(SHARE_IN_A_PROCESS):
        return "in_a_process"
    return "whole_plans" if draw.chance(SHARE_WHOLE_PLANS) else "job_by_job"


def _generate_drafts(
    draw: Draw, geometry: CacheGeometry
) -> tuple[tuple[tuple[int, int], ...], int]:
    """Draw draft tokens, accepted tokens by step, and lookahead slots; most runs have no drafts.

    Runs with Mamba groups have no drafts, because a rejected draft needs a copy of the earlier
    state.
    """
    has_states = any(isinstance(group, Mamba) for group in geometry.groups)
    if has_states or not draw.chance(SHARE_WITH_DRAFTS):
        return (), 0
    most = draw.one_of(DRAFTS)
    numbers = [most if draw.chance(0.8) else 0 for _ in range(_NUM_DRAFTS)]
    lookahead_tokens = most if draw.chance(0.5) else 0
    return tuple((number, draw.number(0, number)) for number in numbers), lookahead_tokens


def _generate_pin_budget(draw: Draw) -> float | None:
    return draw.one_of(PIN_BUDGETS) if draw.chance(SHARE_WITH_A_PIN_BUDGET) else None


def _generate_pages(
    draw: Draw, num_groups: int, num_gpu_blocks: int
) -> tuple[tuple[int, ...], ...]:
    """Draw the bytes of a page per group and tensor; an empty result means equal pages."""
    if draw.chance(0.6):
        return ()
    is_large = draw.chance(0.25) and num_gpu_blocks <= _MOST_LARGE_PAGES
    sizes = LARGE_PAGE_SIZES if is_large else PAGE_SIZES
    num_tensors = 1 if is_large else draw.number(1, 3)
    pages = []
    for group in range(num_groups):
        used = [draw.one_of([0, draw.one_of(sizes)]) for _ in range(num_tensors)]
        used[group % num_tensors] = draw.one_of(sizes)
        pages.append(used)
    in_use = [index for index in range(num_tensors) if any(used[index] for used in pages)]
    return tuple(tuple(used[index] for index in in_use) for used in pages)


def _generate_geometry(draw: Draw, shape: str, kind: str) -> CacheGeometry:
    """Draw a geometry of a shape that has a group of this kind."""
    if shape == "one" and kind == "full" and draw.chance(0.7):
        return CacheGeometry.single(4)
    size = draw.one_of([4, 8, 12])
    sizes = [number for number in (2, 4, 6) if size % number == 0]
    if shape == "one":
        return CacheGeometry(size, 2, (_generate_group(draw, kind, draw.one_of(sizes)),))
    kinds = ["full" if draw.chance(0.85) else draw.one_of(_GROUPS), kind]
    if draw.chance(0.5):
        kinds.append(draw.one_of(_GROUPS))
    block_sizes = [draw.one_of(sizes)] * len(kinds)
    if shape == "mixed":
        block_sizes = [draw.one_of(sizes) for _ in kinds]
        block_sizes[:2] = draw.shuffled(sizes)[:2]
    groups = [_generate_group(draw, *of) for of in zip(kinds, block_sizes, strict=True)]
    return CacheGeometry(size, 2, tuple(draw.shuffled(groups)))


def _generate_group(draw: Draw, kind: str, block: int) -> CacheGroup:
    match kind:
        case "window":
            return SlidingWindow(block, draw.number(2, draw.one_of([6, 14])))
        case "chunked":
            return ChunkedLocalAttention(block, draw.number(4, 14))
        case "mamba":
            return Mamba(block)
    return FullAttention(block)


def _generate_fates(draw: Draw, share_failed: float, share_lost: float) -> tuple[Fate, ...]:
    fates = []
    for _ in range(_NUM_FATES):
        move_after, later = draw.number(0, 4), draw.number(0, 3)
        is_usual = draw.chance(SHARE_OF_USUAL_FATES)
        fate = Fate() if is_usual else Fate(move_after, move_after + later)
        if draw.chance(share_failed):
            fate = replace(fate, outcome="half" if draw.chance(0.5) else "none")
        fates.append(replace(fate, is_lost=draw.chance(share_lost)))
    return tuple(fates)


# --- steady runs ---


@dataclass(frozen=True)
class Steady:
    """One kind of steady run.

    Args:
        has_window: Whether the geometry has a second group, with a sliding window.
        has_resets: Whether the caches are reset five times per round.
        share_failed: Share of the jobs that fail.
        share_aborted: Share of the requests that are aborted.
        pin_budget: As in :class:`~kvview.testing.connector.scenario.scenario.Scenario`.
    """

    has_window: bool
    has_resets: bool = False
    share_failed: float = 0.15
    share_aborted: float = 0.3
    pin_budget: float | None = None


STEADY = (
    Steady(has_window=False, has_resets=True),
    Steady(has_window=True, has_resets=True),
    Steady(has_window=False, share_failed=0.25, share_aborted=0.6),
    Steady(has_window=True, pin_budget=0.1),
)
"""The kinds of steady runs, which are played in turn."""


def steady_scenario(number: int) -> Scenario:
    """Make a run of equal rounds, for a tier that is too small for all prompts (CONN-10).

    Some prompts are repeated often, and others occur once. The GPU holds all, some or none of the
    blocks of a prompt. Transfers fail, and requests are aborted, wait for free blocks, or arrive in
    pairs.

    Args:
        number: Index among the steady runs.
    """
    draw, steady = Draw(number, "steady"), in_turn(STEADY, number)
    size = 4
    groups: tuple[CacheGroup, ...] = (FullAttention(size),)
    if steady.has_window:
        groups += (SlidingWindow(size, 14),)
    num_gpu_blocks = 50 * len(groups)
    reset = [Reset()] if steady.has_resets else []
    events: list[Event] = []
    for name in ("p1", "p2"):  # preempted, and aborted before they resume
        adds = [Add(f"{name}{turn}", 1, size, 6 * size) for turn in "abc"]
        events += [*adds, Step(2), HoldBlocks(num_gpu_blocks), Step(size + 1)]
        events += [*(Abort(add.request_id) for add in adds), HoldBlocks(0), Step(2)]
    adds = [Add(f"r{turn}", 2, size, 6 * size) for turn in "abc"]
    events += [*adds, Step(3), *(Abort(add.request_id) for add in adds), Step(2)]  # while they run
    for place in range(30):
        family = draw.number(1, 3) if draw.chance(0.7) else 10 + place
        num_shared = 2 * (family % 2)
        name = f"s{place}"
        length = size * (8 if draw.chance(0.6) else draw.number(7, 9)) + 1
        if is_full := draw.chance(0.3):
            events += [Step(6), HoldBlocks(num_gpu_blocks - 5)]
        events.append(Add(name, family, length, draw.number(0, 3), num_shared_blocks=num_shared))
        if draw.chance(0.3):
            events.append(Add(f"{name}b", family, length, num_shared_blocks=num_shared))
        events.append(Step(draw.number(1, 3)))
        if place in (9, 24):
            events += reset  # with loads in flight
        if is_full:
            events.append(Step(draw.one_of([1, 1, 10])))
            if draw.chance(0.3):
                events.append(Abort(name))  # while it waits for free blocks
            events.append(HoldBlocks(0))
        if draw.chance(steady.share_aborted):
            events.append(AbortLoading() if draw.chance(0.5) else Abort(name))
        steps, is_evicted = Step(draw.number(3, 6)), draw.chance(0.7)
        if is_evicted and place % 2:  # in two parts, so that a connector can store the next victims
            events.append(HoldBlocks(num_gpu_blocks // 2))
        events.append(steps)
        if place in (4, 19):
            events += reset  # with stores in flight
        if is_evicted:
            events += [HoldBlocks(num_gpu_blocks // draw.one_of([1, 2])), HoldBlocks(0)]
    events += [Step(12), *reset]
    return Scenario(
        CacheGeometry(size, size, groups),
        num_gpu_blocks,
        tuple(events),
        _generate_fates(draw, steady.share_failed, 0.0),
        cpu_blocks=50 * len(groups),
        max_tokens_per_step=16,
        rounds=FEWEST_ROUNDS,
        pin_budget=steady.pin_budget,
    )
