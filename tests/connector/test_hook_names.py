"""CONN-9: a method that is almost a hook is refused when the class is made."""

from __future__ import annotations

import functools
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest

from kvview import Connector, ConnectorDefinitionError, SchedulerConnector, WorkerConnector
from kvview.connector.hooks import hooks_of

HALVES: dict[str, type] = {
    "scheduler": SchedulerConnector,
    "worker": WorkerConnector,
    "connector": Connector,
}

NAMES = tomllib.loads(Path(__file__).with_name("hook_names.toml").read_text())


def define(half: str, name: str, value: object = lambda self, *args: None) -> type:
    return type("Mine", (HALVES[half],), {name: value})


@pytest.mark.parametrize("half", HALVES)
def test_misspelled_names_are_refused(half: str) -> None:
    for name in NAMES["misspelled"][half].split():
        with pytest.raises(
            ConnectorDefinitionError, match=r"^CONN-9: .* is never called, because "
        ):
            define(half, name)


@pytest.mark.parametrize("half", HALVES)
def test_names_of_helpers_are_not(half: str) -> None:
    for name in NAMES["helpers"][half].split():
        define(half, name)
        define(half, f"_{name}")


def test_a_hook_of_the_other_half_is_named() -> None:
    with pytest.raises(ConnectorDefinitionError, match=r"is SchedulerConnector\.match_prefix"):
        define("connector", "match_prefix")
    with pytest.raises(ConnectorDefinitionError, match=r"is WorkerConnector\.get_finished"):
        define("scheduler", "get_transfer_results")


# --- what a hook may be ---


def two(self: Any, request: Any, num_computed_tokens: int) -> int:
    return 0


untyped_two: Any = two


def three(self: Any, request: Any, num_computed_tokens: int, extra: int) -> int:
    return 0


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def locked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Passes one more argument to the function that it wraps."""

    @functools.wraps(function)
    def call(self: Any, *args: Any) -> Any:
        return function(self, *args, threading.Lock())

    return call


class Callee:
    def __call__(self, request: Any, num_computed_tokens: int) -> int:
        return 0


class Descriptor:
    def __get__(self, instance: object, owner: type) -> Callable[..., int]:
        return lambda request, num_computed_tokens: 0


@pytest.mark.parametrize(
    "value",
    [
        two,
        wrapped(two),
        locked(three),
        lambda self, request, n=0, *rest, key=None: 0,
        lambda *args: 0,
        staticmethod(lambda request, n: 0),
        classmethod(two),
        functools.partialmethod(three, extra=1),
        functools.partial(three, None, extra=1),
        functools.lru_cache(two),
        functools.singledispatchmethod(two),
        Callee(),
        Descriptor(),
        max,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_callable_that_takes_the_engines_arguments_is_a_hook(value: object) -> None:
    define("scheduler", "match_prefix", value)


async def coroutine(self: Any, request: Any, num_computed_tokens: int) -> int:
    return 0


async def async_generator(self: Any, request: Any, num_computed_tokens: int) -> Any:
    yield 0


def generator(self: Any, request: Any, num_computed_tokens: int) -> Any:
    yield 0


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (lambda self, request: 0, "too many positional arguments"),
        (three, "missing a required argument: 'extra'"),
        (lambda self, request, *, num_computed_tokens: 0, "too many positional"),
        (lambda self, request, n, *, lock: 0, "missing a required"),
        (staticmethod(two), "missing a required argument"),
        (classmethod(three), "missing a required argument"),
        (functools.partialmethod(two, 1), "too many positional"),
        (functools.partial(two, None, 1), "too many positional"),
        (property(untyped_two), "is a property, not a method"),
        (functools.cached_property(untyped_two), "is a cached_property, not a method"),
        (None, "is a NoneType, not a method"),
        (5, "is a int, not a method"),
        (coroutine, "is async"),
        (classmethod(coroutine), "is async"),
        (functools.partialmethod(coroutine), "is async"),
        (async_generator, "is async"),
        (generator, "is a generator"),
    ],
)
def test_a_hook_that_the_engine_cannot_call_is_refused(value: object, reason: str) -> None:
    with pytest.raises(ConnectorDefinitionError) as raised:
        define("scheduler", "match_prefix", value)
    assert reason in str(raised.value)
    assert "the engine calls match_prefix(self, request: 'RequestInfo'" in str(raised.value)


def test_events_may_be_generated_and_plans_may_not() -> None:
    def take_events(self: Any) -> Any:
        yield from ()

    def plan_step(self: Any, step: Any) -> Any:
        yield from ()

    define("scheduler", "take_events", take_events)
    with pytest.raises(ConnectorDefinitionError, match="is a generator, so a call runs none"):
        define("scheduler", "plan_step", plan_step)


# --- mixins ---


class Misspelled:
    def match_prefx(self) -> None: ...


class TooFew:
    def plan_step(self) -> None: ...


class Plans:
    def plan_step(self, step: Any) -> Any: ...


def test_mixins_are_checked_too() -> None:
    with pytest.raises(ConnectorDefinitionError, match=r"Misspelled\.match_prefx is never called"):
        type("Mine", (Misspelled, SchedulerConnector), {})
    with pytest.raises(ConnectorDefinitionError, match=r"TooFew\.plan_step cannot be called"):
        type("Mine", (TooFew, SchedulerConnector), {})
    type("Mine", (Plans, SchedulerConnector), {})


def test_a_mixin_behind_the_half_is_never_called() -> None:
    with pytest.raises(
        ConnectorDefinitionError, match=r"the default method of SchedulerConnector precedes"
    ):
        type("Mine", (SchedulerConnector, Plans), {})
    first = type("First", (SchedulerConnector,), {"plan_step": Plans.plan_step})
    type("Mine", (first, Plans), {})


def test_mixins_without_hooks_are_accepted() -> None:
    T = TypeVar("T")

    class Threaded(WorkerConnector, threading.Thread):
        pass

    class OfAny(SchedulerConnector, Generic[T]):
        class Plan:
            pass

        PlanSteps = SimpleNamespace

    class Both(SchedulerConnector, WorkerConnector):
        def shutdown(self) -> None: ...

    assert set(hooks_of(Both)) == set(hooks_of(SchedulerConnector)) | set(hooks_of(WorkerConnector))
    with pytest.raises(ConnectorDefinitionError):
        type("Mine", (Both,), {"get_finishd": lambda self: []})


def test_attributes_of_an_object_are_not_checked() -> None:
    class Late(SchedulerConnector):
        def __init__(self) -> None:
            self.match_prefx = lambda request, n: 0

    assert Late().match_prefix(*[None] * 2) == 0  # type: ignore[arg-type]
