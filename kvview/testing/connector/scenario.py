"""What a simulated run does: plain data, made from a seed, printed as a script.

A scenario says everything that a run depends on: sizes, the engine's events in
order, and what becomes of the n-th transfer job. So a failure is its seed, and
what is taken out of a scenario leaves a smaller scenario.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any, Literal, TypeVar

from kvview import (
    CacheGeometry,
    CacheGroup,
    ChunkedLocalAttention,
    FullAttention,
    Mamba,
    SlidingWindow,
)
from kvview.targets import target_of

_SHARE_OF_NEXT_TURNS = 0.3
_SHARE_OF_EARLY_ENDS = 0.3
_SHARE_AS_IT_IS = 0.6  # of the worker halves, where compute lags

NUM_SHARED_BLOCKS = 2
"""Hash blocks at the start of every prompt, the same for all families."""


@dataclass(frozen=True)
class Add:
    """A request comes; left out while one of this id is unfinished.

    Args:
        request_id: May have been used before.
        family: Prompts of one family are prefixes of each other.
        num_prompt_tokens: Tokens of the prompt; of a next turn, those that are new.
        num_output_tokens: Tokens to generate.
        continues: Id of a request that has ended: this one is the next turn of its
            conversation, with a prompt that begins with all its tokens, generated ones
            too. Left out while there is none. None: a prompt of its own.
        stops_after: Generated tokens after which it ends before its time, as with a token
            that ends a text: steps that are in flight then were launched for nothing. None:
            it ends after ``num_output_tokens``, which every engine foresees.
    """

    request_id: str
    family: int
    num_prompt_tokens: int
    num_output_tokens: int = 0
    continues: str | None = None
    stops_after: int | None = None


@dataclass(frozen=True)
class Abort:
    """A request is aborted, wherever it stands; left out when it is not there."""

    request_id: str


@dataclass(frozen=True)
class AbortLoading:
    """The request that has waited longest for its loads is aborted, if there is one."""


@dataclass(frozen=True)
class Step:
    """The engine steps.

    Args:
        count: How many times.
    """

    count: int = 1


@dataclass(frozen=True)
class Squeeze:
    """Somebody else has this many of the pool's blocks from now on: evicts, and preempts.

    Args:
        num_blocks: At most so many, as far as they are free.
    """

    num_blocks: int


@dataclass(frozen=True)
class Alias:
    """The first cached block of a running request gets a second hash (POOL-6)."""


@dataclass(frozen=True)
class Reset:
    """The caches are reset; refused while blocks are in use (POOL-9)."""


Event = Add | Abort | AbortLoading | Step | Squeeze | Alias | Reset

Outcome = Literal["ok", "none", "half"]
"""All bytes move; none and the job fails; half of its blocks and the job fails."""


WorkerHalf = Literal["job_by_job", "as_it_is", "in_a_process"]
"""Given its jobs one by one, each waited for when it is time; given whole plans, with its own
threads and order, over tensors that hold its copies up; or job by job in a child process."""


@dataclass(frozen=True)
class Fate:
    """What becomes of one transfer job. Late is what is usual.

    Args:
        move_after: Steps after which the bytes move; 0 moves them at once.
        report_after: Steps after which it is reported; 0 in the step after the start.
        outcome: Whether it succeeds.
        is_lost: Whether it is reported only when nothing else is left to do.
    """

    move_after: int = 1
    report_after: int = 1
    outcome: Outcome = "ok"
    is_lost: bool = False


@dataclass(frozen=True)
class Scenario:
    """One run.

    Args:
        geometry: Block sizes and KV-cache groups.
        num_gpu_blocks: Blocks of the pool, the null block included.
        events: What happens, in order; then everything is left to drain.
        fates: Of the jobs by the order of their start; later ones are usual.
        cpu_blocks: Option of the connector, if it has one of this name.
        num_connectors: 2 for two of them side by side.
        max_running: Requests computed at once.
        max_tokens_per_step: Token budget of one step.
        decode_tokens: Tokens that a decoding request generates in one step.
        ends_abruptly: Whether the engine is shut down while jobs are in flight.
        loads_may_fail: Whether loads have the outcomes of their fates; else all succeed.
        loads_may_be_late: Whether they take the steps of their fates; else they end at once.
        steps_in_flight: Steps that may be launched before the output of the first of them
            is taken in; 1 for an engine that is not asynchronous.
        compute_lags: Whether the KV of a step is written only when its output is taken in,
            so that a worker that does not order itself after the compute stream (XFER-6)
            reads and writes too early; else when the step is launched.
        worker_half: How the worker half is run.
        group_pages: Per group, the bytes that it uses of a block's page in each tensor, 0
            for none; what another group uses beyond that is padding. Empty for two tensors
            of equal pages. An engine with a layout of its own keeps it.
    """

    geometry: CacheGeometry
    num_gpu_blocks: int
    events: tuple[Event, ...]
    fates: tuple[Fate, ...] = ()
    cpu_blocks: int = 100
    num_connectors: int = 1
    max_running: int = 4
    max_tokens_per_step: int = 32
    decode_tokens: int = 4
    ends_abruptly: bool = False
    loads_may_fail: bool = True
    loads_may_be_late: bool = True
    steps_in_flight: int = 1
    compute_lags: bool = False
    worker_half: WorkerHalf = "job_by_job"
    group_pages: tuple[tuple[int, ...], ...] = ()

    def fate_of_load(self, fate: Fate) -> Fate:
        """What becomes of a load that a fate falls to."""
        if not self.loads_may_fail:
            fate = replace(fate, outcome="ok")
        return fate if self.loads_may_be_late else Fate(0, 0, fate.outcome)


# --- from a seed ---

_T = TypeVar("_T")


class _Draw:
    def __init__(self, seed: int) -> None:
        # Only random() is promised to give the same numbers in every Python.
        self._random = Random(seed).random

    def number(self, low: int, high: int) -> int:
        return low + int(self._random() * (high - low + 1))

    def one_of(self, items: Sequence[_T]) -> _T:
        return items[self.number(0, len(items) - 1)]

    def chance(self, share: float) -> bool:
        return self._random() < share


def generate_scenario(seed: int) -> Scenario:
    """The scenario of a seed; the same in every version of Python."""
    draw = _Draw(seed)
    geometry = _generate_geometry(draw)
    size = geometry.scheduler_block_size
    max_tokens_per_step = size * draw.one_of([2, 4, 8])
    longest = size * draw.number(2, 5) + draw.number(0, size)
    blocks_of_longest = sum(-(-(longest + 3 * size) // g.block_size) for g in geometry.groups)
    num_gpu_blocks = 2 + blocks_of_longest * draw.number(5, 10) // 5
    return _overlap_steps(
        _Draw(seed + 2**41),
        Scenario(
            geometry,
            num_gpu_blocks,
            _generate_events(draw, _Draw(seed + 2**40), longest, size, num_gpu_blocks),
            _generate_fates(draw),
            cpu_blocks=draw.one_of([draw.number(2, 8), num_gpu_blocks, 6 * num_gpu_blocks]),
            num_connectors=2 if draw.chance(0.2) else 1,
            max_running=draw.number(1, 4),
            max_tokens_per_step=max_tokens_per_step,
            decode_tokens=draw.number(size // 2, size),
            ends_abruptly=draw.chance(0.15),
            worker_half=_generate_worker_half(_Draw(seed + 2**43)),
            group_pages=_generate_pages(_Draw(seed + 2**42), len(geometry.groups)),
        ),
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
        worker_half = "as_it_is"
    return replace(
        scenario,
        events=events,
        worker_half=worker_half,
        steps_in_flight=steps_in_flight,
        compute_lags=compute_lags,
    )


def _generate_worker_half(draw: _Draw) -> WorkerHalf:
    if draw.chance(0.125):
        return "in_a_process"
    return "as_it_is" if draw.chance(0.35) else "job_by_job"


def _generate_pages(draw: _Draw, num_groups: int) -> tuple[tuple[int, ...], ...]:
    if draw.chance(0.6):
        return ()
    sizes = [2**16, 2**17] if draw.chance(0.06) else [16, 64, 104, 200]
    num_tensors = draw.number(1, 3)
    pages = []
    for group in range(num_groups):
        used = [draw.one_of([0, draw.one_of(sizes)]) for _ in range(num_tensors)]
        used[group % num_tensors] = draw.one_of(sizes)
        pages.append(used)
    in_use = [index for index in range(num_tensors) if any(used[index] for used in pages)]
    return tuple(tuple(used[index] for index in in_use) for used in pages)


def _generate_geometry(draw: _Draw) -> CacheGeometry:
    if draw.chance(0.35):
        return CacheGeometry.single(4)
    size = draw.one_of([4, 8, 12])
    divisors = [n for n in (2, 4, 6) if size % n == 0]
    groups: list[CacheGroup] = [FullAttention(draw.one_of(divisors))]
    for _ in range(draw.number(0, 2)):
        block = draw.one_of(divisors)
        groups.append(
            draw.one_of(
                [
                    FullAttention(block),
                    SlidingWindow(block, draw.number(2, 14)),
                    SlidingWindow(block, draw.number(2, 6)),
                    ChunkedLocalAttention(block, draw.number(3, 12)),
                    Mamba(block),
                ]
            )
        )
    if draw.chance(0.5):
        groups.reverse()
    return CacheGeometry(size, 2, tuple(groups))


def _generate_events(
    draw: _Draw, turns: _Draw, longest: int, size: int, num_gpu_blocks: int
) -> tuple[Event, ...]:
    num_families = draw.number(1, 4)
    num_ids = 1
    most_tokens = longest + 3 * size  # the pool has room for them
    num_tokens: dict[str, int] = {}  # of the requests so far
    events: list[Event] = []
    for _ in range(draw.number(30, 100)):
        kind = draw.number(0, 99)
        if kind < 25:
            if draw.chance(0.7):
                num_ids += 1
                name = num_ids
            else:
                name = draw.number(1, num_ids)  # perhaps in use, perhaps a second life
            family = draw.number(1, num_families)
            length = longest - draw.number(0, longest - 1) * draw.number(0, 1)
            num_output = draw.number(0, size) * draw.one_of([0, 1, 3])
            add = Add(f"r{name}", family, length, num_output)
            if num_tokens and turns.chance(_SHARE_OF_NEXT_TURNS):
                before = turns.one_of(list(num_tokens)[-3:])
                room = most_tokens - num_tokens[before]
                if room >= 2:
                    length = turns.number(1, min(2 * size, room - 1))
                    num_output = turns.number(1, min(size, room - length))
                    add = Add(f"r{name}", family, length, num_output, before)
                    num_output += num_tokens[before]
            events.append(add)
            num_tokens.pop(add.request_id, None)
            num_tokens[add.request_id] = length + num_output
        elif kind < 68:
            events.append(Step(draw.number(1, 3)))
        elif kind < 77:
            events.append(AbortLoading())
        elif kind < 84:
            # Mostly of those that came last: they are the ones that are still there.
            events.append(Abort(f"r{max(1, num_ids - draw.number(0, 5))}"))
        elif kind < 95:
            if draw.chance(0.5):
                events.append(Squeeze(num_gpu_blocks))  # evicts what is free
            events.append(Squeeze(draw.number(1, num_gpu_blocks) if draw.chance(0.4) else 0))
        elif kind < 98:
            events.append(Alias())
        else:
            events.append(Reset())
    return tuple(events)


def _generate_fates(draw: _Draw) -> tuple[Fate, ...]:
    share_failed, share_lost = draw.one_of([(0.0, 0.0), (0.1, 0.05), (0.35, 0.1)])
    usual = Fate()
    fates = []
    for _ in range(60):
        move_after, later = draw.number(0, 4), draw.number(0, 3)
        fate = usual if draw.chance(0.4) else Fate(move_after, move_after + later)
        if draw.chance(share_failed):
            fate = replace(fate, outcome="half" if draw.chance(0.5) else "none")
        fates.append(replace(fate, is_lost=draw.chance(share_lost)))
    return tuple(fates)


def lengthen(scenario: Scenario, steps: int) -> Scenario:
    """Have the events happen again and again, until there are this many steps."""
    in_one = sum(event.count for event in scenario.events if isinstance(event, Step))
    times = -(-steps // max(1, in_one))
    return replace(scenario, events=scenario.events * max(1, times))


# --- as a script ---


def compact_repr(value: object) -> str:
    """A dataclass as Python, without what is as by default."""
    if isinstance(value, tuple):
        items = ", ".join(map(compact_repr, value))
        return f"({items},)" if len(value) == 1 else f"({items})"
    if not hasattr(value, "__dataclass_fields__"):
        return repr(value)
    arguments: list[str] = []
    for position, field in enumerate(fields(value)):  # type: ignore[arg-type]
        given = getattr(value, field.name)
        if given == field.default:
            continue
        text = compact_repr(given)
        arguments.append(text if len(arguments) == position else f"{field.name}={text}")
    return f"{type(value).__name__}({', '.join(arguments)})"


def to_script(
    connector_class: type[object],
    scenario: Scenario,
    options: Mapping[str, Any],
    comment: str,
    engines: object,
    times: int = 1,
) -> str:
    """Python that runs a scenario again, to paste; it fails as long as a law is broken.

    Args:
        connector_class: What is run.
        scenario: The run.
        options: Of the connector.
        comment: Goes before it.
        engines: A factory of engines that is built without arguments.
        times: How often to try, for what does not happen every time.
    """
    shown = compact_repr(scenario.geometry)
    names = sorted({"CacheGeometry", *(type(g).__name__ for g in scenario.geometry.groups)})
    used = {"Scenario", "simulate"}
    used |= {type(item).__name__ for item in (*scenario.events, *scenario.fates)}
    imports, connector = _import_of(connector_class)
    lines = [
        *(f"# {line}" for line in comment.splitlines()),
        f"from kvview import {', '.join(names)}",
        f"from kvview.testing.connector import {', '.join(sorted(used))}",
        *imports,
        "",
        "scenario = Scenario(",
        f"    geometry={shown},",
    ]
    for field in fields(scenario)[1:]:
        value = getattr(scenario, field.name)
        if value == field.default:
            continue
        if isinstance(value, tuple):
            lines.append(f"    {field.name}=(")
            lines += [f"        {compact_repr(item)}," for item in value]
            lines.append("    ),")
        else:
            lines.append(f"    {field.name}={value!r},")
    given = f", {dict(options)!r}" if options else ""
    factory = type(engines)
    lines.insert(lines.index(""), f"from {factory.__module__} import {factory.__name__}")
    given += f", engines={factory.__name__}()"
    calls = [f"failure = simulate({connector}, scenario{given}).failure"]
    calls += ["assert failure is None, failure"]
    if times > 1:
        calls = [f"for _ in range({times}):", *(f"    {line}" for line in calls)]
    lines += [")", *calls]
    return "\n".join(lines) + "\n"


def _import_of(connector_class: type[object]) -> tuple[list[str], str]:
    """How a script gets the class, and what it calls it."""
    module, name = connector_class.__module__, connector_class.__qualname__
    last = name.split(".")[-1]
    if target := target_of(connector_class):
        loading = f"{last} = load_connector({target!r})"
        return ["from kvview.targets import load_connector", "", loading], last
    if "<locals>" in name:
        return [f"# {name} of {module}: it lives in a function, bring it here"], last
    return [f"from {module} import {name.split('.')[0]}"], name
