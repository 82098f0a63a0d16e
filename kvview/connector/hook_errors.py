"""Calls of hooks: what a connector raises or wrongly returns is told as the connector's.

An engine calls hooks from the middle of its own work, where nobody can tell its errors from
those of the connector. Here a call that fails becomes a :class:`~kvview.HookError` of one
line that names the hook and the connector's own line; what the engine itself raises does not
pass through.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from types import NoneType
from typing import Any, TypeVar

from kvview.connector.halves import (
    Connector,
    ConnectorConfig,
    SchedulerConnector,
    WorkerConnector,
)
from kvview.connector.hooks import hooks_of
from kvview.connector.plan import StepPlan, TransferJob
from kvview.errors import ConfigError, HookError, MissingLibraryError, line_of, one_line
from kvview.events import OffloadingEvent
from kvview.transfer import TransferResult
from kvview.version import require_contract

PartT = TypeVar("PartT", Connector, SchedulerConnector, WorkerConnector)

# Those that may refuse what the user set, or lack a library: a ConfigError comes through.
_AT_START = {
    "__init__",
    "make_scheduler",
    "make_worker",
    "register_kv_caches",
    "bind_gpu_block_pool_view",
    "on_engine_ready",
}
_NOT_INSTALLED = re.compile(r"\b([a-z][\w.-]*) is not (?:available|installed)\b", re.IGNORECASE)
_TYPED = frozenset(
    {"make_scheduler", "make_worker", "match_prefix", "plan_step", "get_finished", "take_events"}
)
_TOLD_AS_BOOL = frozenset({"has_pending_work", "reset_cache"})
# The usual ones first: to ask an abstract class costs ten times as much.
_COLLECTIONS = (list, tuple, Collection)
_STR_OR_NONE = (str, NoneType)
_NOT_THEIRS = {"kvview", "kvview_reference", "kvview_vllm", *sys.stdlib_module_names}


def build_connector(connector_class: type[Connector], config: ConnectorConfig) -> Connector:
    """Build a connector.

    Raises:
        ConfigError: It refuses its options.
        UnsupportedContractError: It was written to another contract.
        MissingLibraryError: It needs what is not installed.
        HookError: Its constructor raised anything else, or made no ``Connector``.
    """
    require_contract(connector_class.contract_version, connector_class.__qualname__)
    try:
        connector: object = connector_class(config)
    except BaseException as error:
        if (told := _told(error, "__init__", connector_class)) is error:
            raise
        raise told from error
    if not isinstance(connector, Connector):
        raise _wrong_answer("__init__", connector_class, connector, "a Connector")
    return connector


def watch_hooks(part: PartT) -> PartT:
    """Have the hooks of a connector, or of a half, raise :class:`~kvview.HookError`.

    1. The halves that a connector makes are watched too.
    2. What a hook returns is checked as far as an engine must rely on its type.
    3. ``KeyboardInterrupt`` comes through; from a hook of the start, ``ConfigError`` too.

    Returns:
        The same object.
    """
    for name in hooks_of(type(part)):
        object.__setattr__(part, name, _watched(part, name))
    return part


def wrong_type(hook: str, answer: object) -> str | None:
    """What a hook should have returned, None when an engine can use its answer."""
    expected = _expected(hook, answer)
    # Last: to ask costs more than all else that is done around a hook.
    if (expected is not None or hook not in _TYPED) and inspect.isawaitable(answer):
        return "an answer, not something to await"
    return expected


def _expected(hook: str, answer: object) -> str | None:
    match hook:
        case "make_scheduler" if not isinstance(answer, SchedulerConnector):
            return "a SchedulerConnector"
        case "make_worker" if not isinstance(answer, WorkerConnector):
            return "a WorkerConnector"
        case "match_prefix" if answer is not None and type(answer) is not int:
            return "a number of tokens or None"
        case "plan_step":
            return _wrong_plan(answer)
        case "get_finished" if not _is_all(answer, TransferResult):
            return "a list of TransferResult"
        case "take_events" if not _is_all(answer, OffloadingEvent):
            return "OffloadingEvents"
    return None


def where(error: BaseException, *packages: str) -> str | None:
    """The line to look at: the innermost one of the first package that is not kvview's.

    Args:
        error: With its traceback.
        packages: Modules whose packages go before others.

    Returns:
        ``file:line``; None when only kvview's own lines and the standard library's are there.
    """
    lines = [
        (frame.f_globals.get("__name__", "").partition(".")[0], frame.f_code.co_filename, number)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith("<")  # what a dataclass generated, for example
    ]
    theirs = [package for package, _, _ in lines if package not in _NOT_THEIRS]
    first = {name.partition(".")[0] for name in packages}
    for wanted in (*filter(first.__contains__, theirs), *theirs):
        return [_place(path, number) for package, path, number in lines if package == wanted][-1]
    return None


def missing_library(error: BaseException | None, needed_by: str) -> MissingLibraryError | None:
    """What an error at the start of a connector means if a library is not installed.

    Args:
        error: What was raised: an import that failed, behind another error too, or a text such
            as "NIXL is not available".
        needed_by: Name of the connector.

    Returns:
        An error that names the library; None where it is none of that.
    """
    first = error
    while error is not None:
        if isinstance(error, MissingLibraryError):
            return error
        name = error.name if isinstance(error, ImportError) else None
        found = None if name else _NOT_INSTALLED.search(line_of(error))
        if library := name or (found and found[1]):
            assert first is not None, "there is an error"
            line = where(first)
            return MissingLibraryError(
                f"{needed_by} needs {library.partition('.')[0]}, which cannot be used; install it "
                f"in this environment ({f'{line}: ' if line else ''}{one_line(first)})"
            )
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _watched(part: Any, name: str) -> Callable[..., Any]:
    method = getattr(part, name)
    may_be_none = wrong_type(name, None) is None and name not in _TOLD_AS_BOOL | {"take_events"}

    @functools.wraps(method)
    def call(*args: Any) -> Any:
        # Around every hook of every step: no context manager, and nothing checked in vain.
        try:
            answer = method(*args)
            if answer is None and may_be_none:
                return None
            if name == "take_events" and type(answer) is not list and isinstance(answer, Iterable):
                answer = list(answer)  # a generator raises here, not in the engine
            elif name in _TOLD_AS_BOOL:
                answer = answer if inspect.isawaitable(answer) else bool(answer)
            expected = wrong_type(name, answer)
        except BaseException as error:  # sys.exit() in a hook must not end the run as a success
            if (told := _told(error, name, type(part), method)) is error:
                raise
            raise told from error
        if expected is not None:
            raise _wrong_answer(name, method, answer, expected)
        if name in ("make_scheduler", "make_worker"):
            watch_hooks(answer)
        return answer

    return call


def _told(
    error: BaseException, hook: str, owner: type, method: Callable[..., Any] | None = None
) -> BaseException:
    """What a caller of a hook should see of an error: it says whose it is."""
    if isinstance(error, KeyboardInterrupt | HookError):
        return error
    if hook in _AT_START:
        if isinstance(error, ConfigError):
            return error
        if missing := missing_library(error, owner.__qualname__):
            return missing
    line = where(error, *(base.__module__ for base in owner.__mro__))
    line = line or _innermost(error) or _definition(method or owner)
    return HookError(f"{line}: {hook} raised {one_line(error)}")


def _wrong_answer(hook: str, method: object, answer: object, expected: str) -> HookError:
    told = line_of(answer, repr)
    return HookError(f"{_definition(method)}: {hook} returned {told}: expected {expected}")


def _wrong_plan(answer: object) -> str | None:
    if not isinstance(answer, StepPlan):
        return "a StepPlan"
    if not (_is_all(answer.loads, TransferJob) and _is_all(answer.stores, TransferJob)):
        return "a StepPlan whose loads and stores are lists of TransferJob"
    for job in (*answer.loads, *answer.stores):
        if type(job.job_id) is not int or not isinstance(job.request_id, _STR_OR_NONE):
            return "jobs with an int as job_id and a str or None as request_id"
    return None


def _is_all(values: object, kind: type) -> bool:
    # A generator is none: an engine looks at a plan more than once.
    return isinstance(values, _COLLECTIONS) and all(isinstance(value, kind) for value in values)


def _innermost(error: BaseException) -> str | None:
    """The last line that is not of this module: a connector of kvview's own raised."""
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_globals.get("__name__") != __name__:
            return _place(frame.f_code.co_filename, number)
    return None


def _definition(method: object) -> str:
    """Where a method or a class is written."""
    with suppress(Exception):
        found: Any = inspect.unwrap(method)  # type: ignore[arg-type]
        if isinstance(found, functools.partial):
            found = found.func
        return _place(inspect.getsourcefile(found) or "?", inspect.getsourcelines(found)[1])
    return getattr(method, "__qualname__", None) or line_of(method, repr)


def _place(path: str, number: int) -> str:
    here = os.getcwd() + os.sep
    return f"{path.removeprefix(here)}:{number}"
