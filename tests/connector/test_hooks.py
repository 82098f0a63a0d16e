"""CONN-9: what looks like a hook and is none is refused when the class is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvview import Connector, ConnectorDefinitionError, SchedulerConnector, WorkerConnector
from kvview.connector.hooks import OTHER_NAMES

HALVES = (SchedulerConnector, WorkerConnector, Connector)


def make(base: type, **methods: Any) -> type:
    return type("Mine", (base,), methods)


@pytest.mark.parametrize(
    ("base", "name", "meant"),
    [
        (Connector, "make_schedular", "make_scheduler"),
        (SchedulerConnector, "on_request_finish", "on_request_finished"),
        (SchedulerConnector, "take_event", "take_events"),
        (WorkerConnector, "register_kv_cache", "register_kv_caches"),
    ],
)
def test_conn_9_a_misspelled_hook_is_refused(base: type, name: str, meant: str) -> None:
    with pytest.raises(ConnectorDefinitionError, match=rf"^CONN-9: .*\.{name} .*{meant}\("):
        make(base, **{name: lambda self: None})


@pytest.mark.parametrize("name", sorted(OTHER_NAMES))
def test_conn_9_another_engines_name_for_a_hook_is_refused(name: str) -> None:
    (base,) = [half for half in HALVES if OTHER_NAMES[name] in vars(half)]
    with pytest.raises(ConnectorDefinitionError, match=rf"\.{name} is never called"):
        make(base, **{name: lambda self, *args: None})


@pytest.mark.parametrize(
    "method",
    [
        lambda self: None,
        lambda self, request: None,
        lambda self, request, num_computed_tokens, more: None,
        lambda self, request, *, num_computed_tokens: None,
        staticmethod(lambda request: None),
    ],
)
def test_conn_9_a_hook_that_cannot_be_called_is_refused(method: Callable[..., Any]) -> None:
    with pytest.raises(ConnectorDefinitionError, match=r"CONN-9: .* cannot be called"):
        make(SchedulerConnector, match_prefix=method)


@pytest.mark.parametrize(
    "method",
    [
        lambda self, request, num_computed_tokens: 0,
        lambda self, wanted, hit: 0,
        lambda self, *args: 0,
        lambda self, request, num_computed_tokens, more=None: 0,
        staticmethod(lambda request, num_computed_tokens: 0),
    ],
)
def test_conn_9_a_hook_may_name_its_arguments_as_it_likes(method: Callable[..., Any]) -> None:
    make(SchedulerConnector, match_prefix=method)


def test_conn_9_helpers_are_left_alone() -> None:
    nothing = lambda self: None  # noqa: E731
    make(SchedulerConnector, _match_prefixes=nothing, evict_some=nothing, clock=3)
    make(WorkerConnector, plan_step=nothing)  # a hook of the other half: no name of this one


def test_conn_9_holds_for_a_subclass_of_a_subclass() -> None:
    good = make(SchedulerConnector, plan_step=lambda self, step: None)
    with pytest.raises(ConnectorDefinitionError):
        make(good, plan_steps=lambda self, step: None)
