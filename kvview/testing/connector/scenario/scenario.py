"""Scenarios of simulated runs: plain data that can be printed as a script.

A run depends only on its scenario: sizes, the engine's events in order, and the fate of the n-th
transfer job. So a seed replays a failure, and a scenario can be shrunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any, Literal

from typing_extensions import override

from kvview import CacheGeometry
from kvview.targets import is_connector, target_of

PAGE_BYTES, NUM_LAYERS = 64, 2
"""Bytes of a block in each tensor, and the number of tensors, as defaults of scenarios."""


@dataclass(frozen=True)
class Add:
    """A request arrives; skipped while a request with this id is unfinished.

    Args:
        request_id: Id of the request; an earlier request may have had the same id.
        family: Number of the prompt's family; of two prompts of one family, one is a prefix of the
            other.
        num_prompt_tokens: Number of tokens of the prompt; for a next turn of a conversation, number
            of its new tokens.
        num_output_tokens: Tokens to generate.
        continues: Id of an ended request whose conversation this request continues; the prompt
            starts with all tokens of that request, including generated tokens. The event is skipped
            if no ended request has this id. None for a request that continues no other request.
        stops_after: Number of generated tokens after which the request ends early, as with a stop
            token; steps in flight are then discarded. With None, the request ends after
            ``num_output_tokens``, which every engine knows in advance.
        num_shared_blocks: Number of hash blocks at the start of the prompt that all prompts share.
        max_load_tokens: The client's cap on the tokens to load; a negative number or a text is an
            invalid cap, which must not harm the connector.
        max_offload_tokens: The client's cap on the tokens to store, with the same values as
            ``max_load_tokens``.
    """

    request_id: str
    family: int
    num_prompt_tokens: int
    num_output_tokens: int = 0
    continues: str | None = None
    stops_after: int | None = None
    num_shared_blocks: int = 2
    max_load_tokens: int | str | None = None
    max_offload_tokens: int | str | None = None

    @property
    def transfer_params(self) -> Mapping[str, Any] | None:
        """Return the parameters that the client sends to the connector; None without a cap."""
        caps = {name: getattr(self, name) for name in ("max_load_tokens", "max_offload_tokens")}
        return {name: cap for name, cap in caps.items() if cap is not None} or None

    @property
    def any_params(self) -> Mapping[str, Any] | None:
        """Return the parameters; a client with an invalid cap sets every name that is read to it.

        A connector may read names of its own, and a client may send any value.
        """
        params = self.transfer_params or {}
        invalid = [cap for cap in params.values() if not isinstance(cap, int) or cap < 0]
        return _AnyParams(invalid[0]) if invalid else params or None


class _AnyParams(dict[str, Any]):
    """Parameters in which every name has one value."""

    def __init__(self, value: object) -> None:
        super().__init__(max_load_tokens=value, max_offload_tokens=value)
        self._value = value

    @override
    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> object:
        return self._value

    @override
    def get(self, name: str, default: object = None) -> Any:
        return self[name]


@dataclass(frozen=True)
class Abort:
    """A request is aborted; skipped if the request does not exist or has ended."""

    request_id: str


@dataclass(frozen=True)
class AbortLoading:
    """The request that has waited longest for its loads is aborted, if any request waits."""


@dataclass(frozen=True)
class Step:
    """The engine makes steps.

    Args:
        count: Number of steps.
    """

    count: int = 1


@dataclass(frozen=True)
class HoldBlocks:
    """Another owner holds blocks until the next squeeze, which causes evictions and preemptions.

    Args:
        num_blocks: Number of blocks that the owner holds; if fewer are free, all free blocks.
    """

    num_blocks: int


@dataclass(frozen=True)
class SecondHash:
    """The first cached block of a running request receives a second hash (POOL-6)."""


@dataclass(frozen=True)
class Reset:
    """The caches are reset, which the engine refuses while blocks are in use (POOL-9).

    Args:
        after_reports: Whether the engine processes reports before the reset, so that the reset
            comes between ``on_transfers_finished`` and ``plan_step``.
    """

    after_reports: bool = False


Event = Add | Abort | AbortLoading | Step | HoldBlocks | SecondHash | Reset

Outcome = Literal["ok", "none", "half"]
"""Outcomes of a job: all bytes move; no bytes move and the job fails; half of its blocks move and
the job fails."""


WorkerHalf = Literal["job_by_job", "whole_plans", "in_a_process"]
"""Ways in which jobs are passed to the worker half: each job when it is due; whole plans in their
step, while the copies of its threads wait at a gate; or each job when it is due, in a child
process."""


@dataclass(frozen=True)
class Fate:
    """The delays and the outcome of one transfer job; by default the job is one step late.

    Args:
        move_after: Number of steps after which the bytes move; with 0, they move at once.
        report_after: Number of steps after which the job is reported; with 0, it is reported in the
            step after its plan.
        outcome: The bytes that move, and whether the job succeeds.
        is_lost: Whether the job is reported only after all other work.
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
        events: The events, in order; after them the engine steps until no work is left.
        fates: Fates of the jobs, in the order of their plans; further jobs have the default fate.
        cpu_blocks: Blocks that the tier holds; set through an option with a placeholder
            (:mod:`~kvview.testing.placeholders`) or the option of this name.
        num_connectors: Number of connectors, 1 or 2.
        max_running: Maximum number of requests that are computed at the same time.
        max_tokens_per_step: Token budget of one step.
        decode_tokens: Tokens that a decoding request generates in one step.
        drafts: For speculative decoding, the numbers of draft tokens and of accepted drafts, which
            the decode steps of a request use in turn. Slots of rejected drafts have KV that belongs
            to no request. Empty for no drafts; with drafts, ``decode_tokens`` has no effect.
        lookahead_tokens: Number of tokens for which a step has slots in addition to the tokens that
            it computes.
        ends_abruptly: Whether the engine is shut down while jobs are in flight.
        loads_may_fail: Whether loads have the outcomes in their fates; otherwise all loads succeed.
        loads_may_be_late: Whether loads have the delays in their fates; otherwise no load is late.
        loads_after_hits: Whether a request with a GPU hit may also load blocks from the tier.
        steps_in_flight: Number of steps that may be launched before the output of the first step is
            processed; 1 for a synchronous engine.
        compute_lags: Whether the KV of a step is written only when its output is processed, so that
            a worker half that ignores the compute stream (XFER-6) reads and writes too early.
            Otherwise the KV is written when the step is launched.
        other_runner: Whether steps run in the engine's other model runner, if the engine has two.
        worker_half: The way in which jobs are passed to the worker half.
        group_pages: Bytes of a block's page that each group uses in each tensor, 0 for none; the
            rest of the page is padding. Empty for two tensors with equal pages. An engine with its
            own layout ignores this field.
        ranks: For each rank, the numbers of its tensors, for an engine with one worker half per
            rank; empty for one rank. A job ends when all ranks have reported it.
        rounds: Number of rounds, each of which plays all events. Each round has its own prompts and
            its own order of the fates, and a lost job is reported much later, not only at the end.
        pin_budget: Share of the pool's blocks that connectors may hold; None for no limit. If a
            connector never queries the budget and a hold raises ``PinBudgetExceeded``, the run is
            repeated without a budget.
        threads_yield_often: Whether threads yield before each line of code, so that races between
            threads occur.
        rounds_until_reuse: Number of rounds after which the prompts of the first round are reused.
        first_round: Number of the first round; earlier rounds are skipped.
        clock_jump: Seconds by which the clocks of :mod:`time` jump ahead at each call of a hook.
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
    drafts: tuple[tuple[int, int], ...] = ()
    lookahead_tokens: int = 0
    ends_abruptly: bool = False
    loads_may_fail: bool = True
    loads_may_be_late: bool = True
    loads_after_hits: bool = True
    steps_in_flight: int = 1
    compute_lags: bool = False
    other_runner: bool = False
    worker_half: WorkerHalf = "job_by_job"
    group_pages: tuple[tuple[int, ...], ...] = ()
    ranks: tuple[int, ...] = ()
    rounds: int = 1
    pin_budget: float | None = None
    threads_yield_often: bool = False
    clock_jump: float = 0.0
    first_round: int = 0
    rounds_until_reuse: int = 64

    @property
    def steps_per_round(self) -> int:
        """Number of steps in one round."""
        return sum(event.count for event in self.events if isinstance(event, Step))

    @property
    def num_blocks_of_all(self) -> int:
        """Number of blocks for all tokens of all requests if requests share no blocks."""
        lengths: dict[str, int] = {}
        num_blocks = 0
        for add in self.events:
            if isinstance(add, Add):
                before = lengths.get(add.continues or "", 0)
                length = before + add.num_prompt_tokens + add.num_output_tokens
                lengths[add.request_id] = max(length, lengths.get(add.request_id, 0))
                num_blocks += sum(-(-length // g.block_size) for g in self.geometry.groups)
        return self.rounds * num_blocks

    @property
    def most_drafts(self) -> int:
        """Maximum number of draft tokens in a step."""
        return max((proposed for proposed, _ in self.drafts), default=0)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the group with the largest pages."""
        return max(map(sum, self.group_pages), default=NUM_LAYERS * PAGE_BYTES)

    @property
    def is_roomy(self) -> bool:
        """Whether GPU blocks and tier pages never run out, and no transfer fails."""
        return (
            min(self.cpu_blocks, self.num_gpu_blocks // 2) >= self.num_blocks_of_all
            and all(fate.outcome == "ok" and not fate.is_lost for fate in self.fates)
            and not any(isinstance(event, HoldBlocks) and event.num_blocks for event in self.events)
        )

    def fate_of_load(self, fate: Fate) -> Fate:
        """Return the fate of a load, derived from a fate of the list."""
        if not self.loads_may_fail:
            fate = replace(fate, outcome="ok")
        return fate if self.loads_may_be_late else Fate(0, 0, fate.outcome)


# --- as a script ---


def compact_repr(value: object) -> str:
    """Format a dataclass as Python code, without default values."""
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
    """Write a Python script that runs a scenario again, and fails as long as a law is broken.

    Args:
        connector_class: The connector.
        scenario: The run.
        options: Options of the connector.
        comment: Comment above the script.
        engines: An engine factory whose class takes no arguments.
        times: Number of runs, for failures that do not occur every time.
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
            lines += [f"        {item}" for item in _written(value)]
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


def _written(items: Sequence[object]) -> Iterator[str]:
    """Yield items of a tuple; a row of default fates is one item, so that others are seen."""
    for item, equal in groupby(items):
        number = len(list(equal))
        if item == Fate() and number > 1:
            yield f"*[Fate()] * {number},"
        else:
            yield from [f"{compact_repr(item)},"] * number


def _import_of(connector_class: type[object]) -> tuple[list[str], str]:
    """Return the lines of a script that import the class, and its name in the script."""
    module, name = connector_class.__module__, connector_class.__qualname__
    last = name.split(".")[-1]
    if target := target_of(connector_class):
        load = "load_connector" if is_connector(connector_class) else "load_target"
        return [f"from kvview.targets import {load}", "", f"{last} = {load}({target!r})"], last
    if "<locals>" in name:
        return [f"# {name} of {module} is defined in a function: copy it here"], last
    return [f"from {module} import {name.split('.')[0]}"], name
