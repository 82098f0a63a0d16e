"""Hook calls. An exception or a wrong return value of a hook becomes a ``HookError``.

An engine calls hooks in the middle of its own work, so a plain exception could come from the engine
or from the hook. A :class:`~kvview.HookError` is one line that names the hook and the line of the
connector's source.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from types import FrameType, NoneType
from typing import Any, TypeVar

from kvview.connector.halves import Connector, ConnectorConfig
from kvview.connector.hooks import hooks_of
from kvview.connector.plan import StepPlan, TransferJob
from kvview.connector.scheduler_half import SchedulerConnector
from kvview.connector.worker_half import WorkerConnector
from kvview.errors import ConfigError, HookError, MissingLibraryError, line_of, one_line
from kvview.events import OffloadingEvent
from kvview.transfer import TransferResult
from kvview.version import require_contract

PartT = TypeVar("PartT", Connector, SchedulerConnector, WorkerConnector)

# Hooks that may refuse options or lack a library, so their ConfigError passes unchanged.
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
_BOOLEAN = frozenset({"has_pending_work", "reset_cache"})
# The usual types come first, because isinstance of an abstract class costs ten times as much.
_COLLECTIONS = (list, tuple, Collection)
_STR_OR_NONE = (str, NoneType)
_NOT_THEIRS = {"kvview", "kvview_reference", "kvview_vllm", *sys.stdlib_module_names}


def build_connector(connector_class: type[Connector], config: ConnectorConfig) -> Connector:
    """Build a connector.

    Raises:
        ConfigError: The connector refuses its options.
        UnsupportedContractError: The connector was written for another contract.
        MissingLibraryError: A library that the connector needs is not installed.
        HookError: The constructor raised another exception, or did not make a ``Connector``.
    """
    require_contract(connector_class.contract_version, connector_class.__qualname__)
    try:
        connector: object = connector_class(config)
    except BaseException as error:
        if (reported := _reported(error, "__init__", connector_class)) is error:
            raise
        raise reported from error
    if not isinstance(connector, Connector):
        raise _wrong_value("__init__", connector_class, connector, "a Connector")
    return connector


def watch_hooks(part: PartT) -> PartT:
    """Make the hooks of a connector, or of a half, raise :class:`~kvview.HookError`.

    1. The halves that a connector makes are watched too.
    2. The type of a return value is checked if an engine relies on this type.
    3. ``KeyboardInterrupt``, and the ``ConfigError`` of a hook that runs at the start, are raised
       unchanged.

    Returns:
        The same object.
    """
    for name in hooks_of(type(part)):
        object.__setattr__(part, name, _watched(part, name))
    return part


def wrong_type(hook: str, value: object) -> str | None:
    """Return the type that the hook should have returned; None if an engine can use the value."""
    expected = _expected(hook, value)
    # This check is last, because isawaitable costs more than all other checks of a call.
    if (expected is not None or hook not in _TYPED) and inspect.isawaitable(value):
        return "a value, not an awaitable"
    return expected


def _expected(hook: str, value: object) -> str | None:
    match hook:
        case "make_scheduler" if not isinstance(value, SchedulerConnector):
            return "a SchedulerConnector"
        case "make_worker" if not isinstance(value, WorkerConnector):
            return "a WorkerConnector"
        case "match_prefix" if value is not None and type(value) is not int:
            return "a number of tokens or None"
        case "plan_step":
            return _wrong_plan(value)
        case "get_finished" if not _is_all(value, TransferResult):
            return "a list of TransferResult"
        case "take_events" if not _is_all(value, OffloadingEvent):
            return "OffloadingEvents"
    return None


def where(error: BaseException, *packages: str) -> str | None:
    """Return the innermost line of a traceback in the first package that is not kvview's.

    Args:
        error: An exception with its traceback.
        packages: Modules whose packages are preferred.

    Returns:
        ``file:line``; None if all lines are kvview's or the standard library's.
    """
    return place_in(traceback.walk_tb(error.__traceback__), *packages)


def place_in(frames: Iterable[tuple[FrameType, int]], *packages: str) -> str | None:
    """Return the innermost line of a stack in the first package that is not kvview's."""
    return next(reversed(places_in(frames, *packages)), None)


def places_in(frames: Iterable[tuple[FrameType, int]], *packages: str) -> Sequence[str]:
    """Return the lines of a stack in the first package that is not kvview's.

    Args:
        frames: The frames, the outermost one first, each with its current line.
        packages: Modules whose packages are preferred.

    Returns:
        ``file:line`` of each; empty if all lines are kvview's or the standard library's.
    """
    lines = [
        (frame.f_globals.get("__name__", "").partition(".")[0], frame.f_code.co_filename, number)
        for frame, number in frames
        # Generated code, such as a method of a dataclass, is skipped.
        if not frame.f_code.co_filename.startswith("<")
    ]
    theirs = [package for package, _, _ in lines if package not in _NOT_THEIRS]
    first = {name.partition(".")[0] for name in packages}
    for wanted in (*filter(first.__contains__, theirs), *theirs):
        return [_place(path, number) for package, path, number in lines if package == wanted]
    return ()


def missing_library(error: BaseException | None, needed_by: str) -> MissingLibraryError | None:
    """Find the missing library behind an exception at the start of a connector.

    Args:
        error: The exception: a failed import, perhaps as the cause of another error, or a text
            such as "NIXL is not available".
        needed_by: Name of the connector.

    Returns:
        An error that names the library; None if no library is missing.
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
            library = library.partition(".")[0]
            lacks_name = line_of(error).startswith("cannot import name")
            needs = (
                f"another version of {library}; install one that has the name"
                if lacks_name
                else f"{library}, which cannot be used; install it in this environment"
            )
            place = f"{line}: " if line else ""
            return MissingLibraryError(f"{needed_by} needs {needs} ({place}{one_line(first)})")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _watched(part: Any, name: str) -> Callable[..., Any]:
    method = getattr(part, name)
    may_be_none = wrong_type(name, None) is None and name not in _BOOLEAN | {"take_events"}

    @functools.wraps(method)
    def call(*args: Any) -> Any:
        # This code runs around every hook of every step, so it uses no context manager.
        try:
            value = method(*args)
            if value is None and may_be_none:
                return None
            if name == "take_events" and type(value) is not list and isinstance(value, Iterable):
                value = list(value)  # so that a generator raises here, not in the engine
            elif name in _BOOLEAN:
                value = value if inspect.isawaitable(value) else bool(value)
            expected = wrong_type(name, value)
        except BaseException as error:  # sys.exit() in a hook must not end the run as a success
            if (reported := _reported(error, name, type(part), method)) is error:
                raise
            raise reported from error
        if expected is not None:
            raise _wrong_value(name, method, value, expected)
        if name in ("make_scheduler", "make_worker"):
            watch_hooks(value)
        return value

    return call


def _reported(
    error: BaseException, hook: str, owner: type, method: Callable[..., Any] | None = None
) -> BaseException:
    """Return the exception that the engine sees for an exception of a hook."""
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


def _wrong_value(hook: str, method: object, value: object, expected: str) -> HookError:
    text = line_of(value, repr)
    return HookError(f"{_definition(method)}: {hook} returned {text}: expected {expected}")


def _wrong_plan(value: object) -> str | None:
    if not isinstance(value, StepPlan):
        return "a StepPlan"
    if not (_is_all(value.loads, TransferJob) and _is_all(value.stores, TransferJob)):
        return "a StepPlan whose loads and stores are lists of TransferJob"
    for job in (*value.loads, *value.stores):
        if type(job.job_id) is not int or not isinstance(job.request_id, _STR_OR_NONE):
            return "jobs with an int as job_id and a str or None as request_id"
    return None


def _is_all(values: object, kind: type) -> bool:
    # A generator is refused, because an engine iterates over a plan more than once.
    return isinstance(values, _COLLECTIONS) and all(isinstance(value, kind) for value in values)


def _innermost(error: BaseException) -> str | None:
    """Return the innermost line outside this module, for a connector that is part of kvview."""
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_globals.get("__name__") != __name__:
            return _place(frame.f_code.co_filename, number)
    return None


def _definition(method: object) -> str:
    """Return the line at which a method or a class is defined."""
    with suppress(Exception):
        found: Any = inspect.unwrap(method)  # type: ignore[arg-type]
        if isinstance(found, functools.partial):
            found = found.func
        return _place(inspect.getsourcefile(found) or "?", inspect.getsourcelines(found)[1])
    return getattr(method, "__qualname__", None) or line_of(method, repr)


def _place(path: str, number: int) -> str:
    here = os.getcwd() + os.sep
    return f"{path.removeprefix(here)}:{number}"
