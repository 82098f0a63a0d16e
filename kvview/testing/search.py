"""The search that checks a contract: random operations, each compared with a model.

A :class:`Player` contains the object under test and the model of its contract. Methods marked with
:func:`operation` change object and model, and methods marked with :func:`observable` compare object
and model. A run draws a subset of the operations and a size from its seed, so the seed alone is
enough to repeat the run. (This is swarm testing: a run without resets reaches states that a reset
would destroy.) A failing run is shrunk to smaller sizes and fewer operations, and then recorded as
a script.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from random import Random
from typing import Any, ClassVar, NoReturn, TypeVar

from typing_extensions import override

from kvview.testing import watchdog
from kvview.testing.checks import CheckFunction, check
from kvview.testing.effort import Effort, current_effort
from kvview.testing.harness import Capability, Contract, Factory
from kvview.testing.law_broken import LawBroken
from kvview.testing.recorder import Recorder, import_line

_NUM_MOVES = 40  # operations of the longest run, by default
# CPU seconds that one call may take; a call that uses no CPU may take four times as long.
_CALL_SECONDS = 10.0
_MAX_FAILING_RUNS = 8
"""Number of failing runs that ends a search, because more of them rarely break another law."""

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
PlayerT = TypeVar("PlayerT", bound="Player")
ItemT = TypeVar("ItemT")

Promises = Iterable[tuple[str, str, bool]]
"""Laws, each with a promise of the law, and whether the promise was kept."""


@dataclass(frozen=True)
class Mark:
    """Properties of an operation or an observable.

    Args:
        law: The law that is broken by an unexpected exception, or by a difference for which no
            other law is named.
        needs: Capabilities without which the method is skipped.
        weight: Relative frequency of the operation; 0 for an observable.
    """

    law: str
    needs: tuple[Capability, ...]
    weight: float = 0.0


def operation(
    law: str, *needs: Capability, weight: float = 1.0
) -> Callable[[FunctionT], FunctionT]:
    """Mark a method of a player as an operation, which runs draw at random."""

    def mark(function: FunctionT) -> FunctionT:
        function.mark = Mark(law, needs, weight)  # type: ignore[attr-defined]
        return function

    return mark


def observable(law: str, *needs: Capability) -> Callable[[FunctionT], FunctionT]:
    """Mark a method of a player as a comparison that follows every operation."""
    return operation(law, *needs, weight=0)


@dataclass(frozen=True)
class Label:
    """A label of a law that a search checks.

    Args:
        summary: Summary of the law, in one line.
        needs: Capabilities without which the law cannot be broken.
    """

    summary: str
    needs: tuple[Capability, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The plan of one run, which can be played any number of times.

    Args:
        seed: Seed of the run.
        moves: Names of the operations, each with the seed of its arguments.
        most: Maximum number of items for one operation; None lets the player draw the number.
        is_small: Whether the smallest size is used instead of a drawn size.
    """

    seed: int
    moves: Sequence[tuple[str, int]] = ()
    most: int | None = None
    is_small: bool = False


class Player(Recorder):
    """Base of classes that play operations on a harness and on the model of its contract.

    Args:
        factory: Makes the harness.
        plan: The plan of the run; :meth:`draw` draws its moves if it has none.
        is_recording: Whether the calls are recorded as a script.
    """

    contract: ClassVar[Contract]
    subject_name: ClassVar[str]
    labels: ClassVar[Mapping[str, Label]]
    first_moves: ClassVar[tuple[str, ...]] = ()
    """Operations that start each run, so that the drawn operations have blocks and keys to use."""
    max_shrink_runs: ClassVar[int] = 150

    def __init__(self, factory: Factory, plan: Plan, *, is_recording: bool = False) -> None:
        super().__init__(factory, "*", self.subject_name)
        self.is_recording = is_recording
        self.plan = plan
        self.rng = Random(plan.seed)
        self.compared: Counter[str] = Counter()
        self.is_over = False
        """Whether the object under test accepts no further calls; set by operations."""
        self._culprit: str | None = None
        self._blamed = next(iter(self.labels))
        self._is_comparing = False
        self.start()
        self.most: int = self.draw_most() if plan.most is None else plan.most

    def start(self) -> None:
        """Draw a size and options with ``self.rng``, and make the model."""
        raise NotImplementedError

    def draw_most(self) -> int:
        """Draw the maximum number of items for one operation."""
        return self.rng.choice((3, 6, 6, 40))

    def num_moves(self, longest: int) -> int:
        """Return the number of operations of a run of this size, at most ``longest``."""
        return longest

    def blame(self, law: str) -> None:
        """Set the law that a difference after the current operation breaks."""
        self._culprit = self._blamed = law

    def can(self, *capabilities: Capability) -> bool:
        """Return whether the harness declares all of these capabilities."""
        return all(capability in self.harness.capabilities for capability in capabilities)

    def some_of(self, among: Sequence[ItemT], *, repeat: bool = False) -> list[ItemT]:
        """Draw at least one of some items; empty if there are no items."""
        if not among:
            return []
        number = self.rng.randint(1, max(1, min(self.most, len(among))))
        return self.rng.choices(among, k=number) if repeat else self.rng.sample(among, number)

    def judge(self, promises: Promises, got: object) -> None:
        """Break the law of the first promise that the model reports as not kept."""
        for law, promise, is_kept in promises:
            self.true(is_kept, promise, got, "the promise", law)

    @classmethod
    def _marked(cls, is_operation: bool, declared: Collection[str]) -> dict[str, Mark]:
        found = {}
        for name in dir(cls):
            mark: Mark | None = getattr(getattr(cls, name), "mark", None)
            if mark is None or bool(mark.weight) != is_operation:
                continue
            if all(need in declared for need in mark.needs):
                found[name] = mark
        return found

    @cached_property
    def _observables(self) -> Mapping[str, Mark]:
        return self._marked(False, self.harness.capabilities)

    def draw(self, longest: int) -> Plan:
        """Draw the moves of this run."""
        able = self._marked(True, self.harness.capabilities)
        some = [name for name in able if self.rng.random() < 0.7] or list(able)
        weights = [able[name].weight for name in some]
        names = self.rng.choices(some, weights, k=self.num_moves(longest))
        first = [name for name in self.first_moves if name in able]
        moves = [(name, self.rng.getrandbits(32)) for name in (*first, *names)]
        return replace(self.plan, moves=moves)

    def play(self, moves: Sequence[tuple[str, int]]) -> None:
        """Play moves, and compare all observables after each move.

        Raises:
            LawBroken: The first difference.
        """
        operations = self._marked(True, self.harness.capabilities)
        for name, seed in moves:
            self.rng = Random(seed)
            self._blamed, self._culprit = operations[name].law, None
            getattr(self, name)()
            if self.is_over:
                return
            self.compare()

    def compare(self) -> None:
        """Compare all observables."""
        self._is_comparing = True
        with self.unrecorded():
            for name, mark in self._observables.items():
                self._blamed = mark.law
                self.compared[self._culprit or mark.law] += 1
                getattr(self, name)()
        self._is_comparing = False

    @override
    def equal(self, got: object, expected: object, what: str, law: str | None = None) -> None:
        self.compared[law or self._blamed] += 1
        super().equal(got, expected, what, law)

    @override
    def true(
        self, holds: bool, what: str, got: object, expected: str, law: str | None = None
    ) -> None:
        self.compared[law or self._blamed] += 1
        super().true(holds, what, got, expected, law)

    @override
    def fail(self, what: str, got: str, expected: str, law: str | None = None) -> NoReturn:
        if self.law != "*":  # an example tests one law
            law = self.law
        else:
            law = (self._is_comparing and self._culprit) or law or self._blamed
            assert law in self.labels, f"{law} is not a law of {type(self).__name__}"
        super().fail(what, got, expected, law)

    @override
    def _check_again(self) -> str:
        """Write a script with the calls as comments, which plays the plan again."""
        if self.law != "*":  # an example
            return super()._check_again()
        name = type(self).__name__
        return "\n".join(
            [
                import_line(self._factory),
                "from kvview.testing.search import Plan, replay",
                f"from {type(self).__module__} import {name}",
                "",
                *self._calls_as_comments(),
                f"replay({name}, factory, {self.plan!r})  # raises LawBroken",
                "",
            ]
        )


@dataclass
class SearchResult:
    """The outcome of one search.

    Args:
        failures: The shrunk first failure of each law.
        seeds: The failing seeds of each law.
        compared: Number of comparisons by law.
        num_runs: Number of runs that were made.
    """

    failures: dict[str, LawBroken] = field(default_factory=dict)
    seeds: dict[str, list[int]] = field(default_factory=dict)
    compared: Counter[str] = field(default_factory=Counter)
    num_runs: int = 0


def runs_of(contract: Contract, effort: Effort) -> int:
    """Return the number of runs of a search: by default 100, and 200 for handoffs."""
    return effort.seeds or (200 if contract == "handoff" else 100)


def search(player_class: type[Player], factory: Factory, effort: Effort) -> SearchResult:
    """Run the search for consecutive seeds, and shrink the first failure of each law."""
    result = SearchResult()
    number = runs_of(player_class.contract, effort)
    on_progress: Callable[[int, int, int], None] | None = effort.shared.get("on_progress")
    for seed in range(effort.seed, effort.seed + number):
        result.num_runs += 1
        broken, plan, compared = _drawn(player_class, factory, seed, effort.steps or _NUM_MOVES)
        result.compared.update(compared)
        if on_progress is not None:
            num_failed = sum(map(len, result.seeds.values())) + (broken is not None)
            on_progress(result.num_runs, number, num_failed)
        if broken is None:
            continue
        result.seeds.setdefault(broken.law, []).append(seed)
        if effort.is_brief:
            result.failures[broken.law] = broken
            break
        if broken.law not in result.failures:
            result.failures[broken.law] = _shrunk(player_class, factory, plan, broken)
        if sum(map(len, result.seeds.values())) >= _MAX_FAILING_RUNS:
            break
    for law, broken in result.failures.items():
        broken.seeds = result.seeds[law]
    return result


def _drawn(
    player_class: type[Player], factory: Factory, seed: int, longest: int
) -> tuple[LawBroken | None, Plan, Counter[str]]:
    player = player_class(factory, Plan(seed))
    plan = player.draw(longest)
    return _outcome(player, plan), plan, player.compared


def _outcome(player: Player, plan: Plan) -> LawBroken | None:
    try:
        _run_watched(player, lambda: player.play(plan.moves))
    except LawBroken as broken:
        return broken
    return None


def _run_watched(player: Player, moves: Callable[[], None]) -> None:
    """Play moves and end the player; a call that does not return breaks the law."""
    with watchdog.limit(_CALL_SECONDS), watchdog.watching(), watchdog.calling():
        try:
            try:
                moves()
            finally:
                player.end()
        except watchdog.HookTimeout as error:
            player.does_not_return(error)


def _shrunk(
    player_class: type[Player], factory: Factory, plan: Plan, broken: LawBroken
) -> LawBroken:
    """Find the shortest plan that breaks the same law; returns the failure with a script."""
    num_runs = 0

    def fails(plan: Plan, *, is_recording: bool = False) -> LawBroken | None:
        nonlocal num_runs
        num_runs += 1
        try:
            found = _outcome(player_class(factory, plan, is_recording=is_recording), plan)
        # The shortened plan draws from an empty list, so it is not valid.
        except (LookupError, ValueError):
            return None
        return found if found is not None and found.law == broken.law else None

    simpler: dict[str, Any]
    for simpler in ({"is_small": True}, {"most": 1}, {"most": 2}, {"most": 3}):
        if "most" in simpler and plan.most is not None:
            continue
        smaller = replace(plan, **simpler)
        if fails(smaller):
            plan = smaller
    size = len(plan.moves)
    while size and num_runs < player_class.max_shrink_runs:
        at = 0
        while at < len(plan.moves) and num_runs < player_class.max_shrink_runs:
            fewer = replace(plan, moves=[*plan.moves[:at], *plan.moves[at + size :]])
            if fails(fewer):
                plan = fewer
            else:
                at += size
        size //= 2
    return fails(plan, is_recording=True) or broken


def replay(player_class: type[Player], factory: Factory, plan: Plan) -> None:
    """Play one plan again; the scripts of failures call this function.

    Raises:
        LawBroken: If the plan breaks a law.
    """
    broken = _outcome(player_class(factory, plan, is_recording=True), plan)
    if broken is not None:
        raise broken


def shared_search(player_class: type[Player], factory: Factory) -> SearchResult:
    """Return the search of a factory with the current settings; the checks of all laws share it."""
    effort = current_effort()
    where = (player_class, factory)
    if where not in effort.shared:
        effort.shared[where] = search(player_class, factory, effort)
    result: SearchResult = effort.shared[where]
    return result


def example(
    player_class: type[PlayerT], law: str, *needs: Capability
) -> Callable[[Callable[[PlayerT], None]], CheckFunction]:
    """Register a check of a property that the model cannot state, such as growth or cost.

    The check receives a player of the smallest size, and calls the player's operations itself.
    """

    def register(body: Callable[[PlayerT], None]) -> CheckFunction:
        @check(law, *needs, contract=player_class.contract)
        @wraps(body)
        def run(factory: Factory) -> None:
            player = player_class(factory, Plan(0, is_small=True), is_recording=True)
            player.law = law
            _run_watched(player, lambda: body(player))

        return run

    return register


def check_by_search(player_class: type[Player]) -> type[Player]:
    """Register one check for each law of a player; the checks share one search."""
    for law, label in player_class.labels.items():
        _register(player_class, law, label)
    return player_class


def _register(player_class: type[Player], law: str, label: Label) -> None:
    def run(factory: Factory) -> None:
        failure = shared_search(player_class, factory).failures.get(law)
        if failure is not None:
            raise failure

    family, _, number = law.lower().partition("-")
    own = player_class.__module__.split(".")[2]
    is_own = next(iter(player_class.labels)).lower().startswith(f"{family}-")
    room = "" if is_own else f"{own}_"
    run.__name__ = f"check_{room}{family}_{number}"
    run.__doc__ = label.summary
    check(law, *label.needs, contract=player_class.contract)(run)
