"""The names of hooks; a method whose name resembles that of a hook is refused (CONN-9).

The check runs when a class is made, over the class and its mixins. The check cannot find attributes
that are assigned to an object or a class later.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

from kvview.errors import ConnectorDefinitionError

# Names of the hooks in other engines and in kvview's drafts; no helper method may have one.
OTHER_NAMES = {
    "bind_gpu_block_pool": "bind_gpu_block_pool_view",
    "bind_kv_cache_manager": "bind_gpu_block_pool_view",
    "get_num_new_matched_tokens": "match_prefix",
    "update_state_after_alloc": "on_blocks_allocated",
    "build_connector_meta": "plan_step",
    "update_connector_output": "on_transfers_finished",
    "request_finished": "on_request_finished",
    "request_finished_all_groups": "on_request_finished",
    "handle_preemptions": "on_request_preempted",
    "has_pending_push_work": "has_pending_work",
    "reset_prefix_cache": "reset_cache",
    "start_load_kv": "start_plan",
    "get_transfer_results": "get_finished",
}
# Synonyms of a hook; a class that does not have the hook may use them.
SYNONYMS = {
    "bind_pool_view": "bind_gpu_block_pool_view",
    "bind_gpu_pool_view": "bind_gpu_block_pool_view",
    "on_engine_started": "on_engine_ready",
    **{f"{verb}_scheduler": "make_scheduler" for verb in ("build", "create", "get")},
    **{f"{verb}_worker": "make_worker" for verb in ("build", "create", "get")},
    "make_scheduler_connector": "make_scheduler",
    "make_worker_connector": "make_worker",
}
_AFTER_ON = dict.fromkeys(("aborted", "complete", "completed", "done", "end", "ended"), "finished")
# Hooks of one half whose names may be used in the other half.
_ANYONES = {"shutdown", "wait"}
_SAME_STEM = 5  # letters
_SAME_WORD, _SAME_NAME = 0.73, 0.9  # difflib's ratio from which on a word counts as a misspelling

TARGET_PREFIX = "kvview_target_"
"""Prefix of the names of modules that are loaded from a file (:mod:`kvview.targets`)."""

_bases: list[type] = []


class Hooked:
    """Base of the classes that declare hooks; their subclasses are checked (CONN-9)."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse methods whose names resemble the name of a hook (CONN-9)."""
        super().__init_subclass__(**kwargs)
        if Hooked in cls.__bases__:
            _bases.append(cls)
        else:
            _check_hooks(cls)


def hooks_of(cls: type) -> dict[str, Callable[..., Any]]:
    """Return the hooks of a class, by name, as the contract declares them."""
    return _declared(base for base in _bases if issubclass(cls, base))


def _declared(bases: Iterable[type]) -> dict[str, Callable[..., Any]]:
    return {
        name: value
        for base in bases
        for name, value in vars(base).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }


def _check_hooks(cls: type) -> None:
    """Check the methods of a class and of its mixins.

    Raises:
        ConnectorDefinitionError: The name of a method resembles that of a hook, the engine cannot
            call a hook, or a default method hides a hook.
    """
    hooks = hooks_of(cls)
    mixins = [base for base in cls.__mro__[1:-1] if not issubclass(base, Hooked)]
    for owner in (cls, *mixins):
        for name, value in vars(owner).items():
            if name.startswith("_"):
                continue
            method = _name_of(owner, name, value)
            if name in hooks:
                wanted = f"{name}{inspect.signature(hooks[name])}"
                if problem := _why_not_called(value, hooks[name]):
                    raise ConnectorDefinitionError(
                        f"CONN-9: {method} {problem}; the engine calls {wanted}"
                    )
                first = next(base for base in cls.__mro__ if name in vars(base))
                if first in _bases:
                    raise ConnectorDefinitionError(
                        f"CONN-9: {method} is never called, because the default method of "
                        f"{first.__qualname__} precedes it in {cls.__qualname__}; list the mixin "
                        "first"
                    )
            elif _is_method(value) and (meant := _meant(name, hooks)):
                half = next(base.__name__ for base in _bases if meant in vars(base))
                raise ConnectorDefinitionError(
                    f"CONN-9: {method} is never called, because the hook is {half}.{meant}"
                    f"{inspect.signature(_declared(_bases)[meant])}; rename it, or start the name "
                    f"of a helper with an underscore"
                )


def _name_of(owner: type, name: str, value: object) -> str:
    """Format a method's name with its module, or with its line if it was loaded from a file."""
    if not owner.__module__.startswith(TARGET_PREFIX):
        return f"{owner.__module__}.{owner.__qualname__}.{name}"
    line = f"line {value.__code__.co_firstlineno}: " if inspect.isfunction(value) else ""
    return f"{line}{owner.__qualname__}.{name}"


def _is_method(value: object) -> bool:
    wrapped = (classmethod, functools.partialmethod)
    return isinstance(value, wrapped) or (callable(value) and not isinstance(value, type))


def _meant(name: str, hooks: Collection[str]) -> str | None:
    """Return the hook that the author meant by a name; None if the name resembles no hook."""
    everyones = _declared(_bases)
    if name in everyones and name not in _ANYONES:
        return name  # a hook of the other half
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    if SYNONYMS.get(name) in hooks:
        return SYNONYMS[name]
    words = _words(name)
    return next((hook for hook in hooks if _are_alike(words, _words(hook))), None)


def _words(name: str) -> list[str]:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")
    if words[0] == "on":
        words = [_AFTER_ON.get(word, word) for word in words[1:]]
    return [word for word in words if word]


def _are_alike(words: list[str], hook: list[str]) -> bool:
    """Whether two names consist of the same words, in any order, perhaps misspelled.

    The name of a helper method differs from that of a hook in a whole word: ``plan_loads``,
    ``has_pending_jobs``, ``make_worker_pool``.
    """
    if sorted(words) == sorted(hook):
        return True
    if _ratio("".join(words), "".join(hook)) >= _SAME_NAME:
        return True
    return len(words) == len(hook) and all(map(_is_same_word, words, hook))


def _is_same_word(one: str, other: str) -> bool:
    if _ratio(one, other) >= _SAME_WORD:
        return one[0] == other[0]  # "take" and "make" are different words
    return len(one) >= _SAME_STEM and one[:_SAME_STEM] == other[:_SAME_STEM]


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _why_not_called(value: Any, hook: Callable[..., Any]) -> str | None:
    """Return the reason why an engine cannot call a class attribute that has a hook's name."""
    is_bound = hasattr(type(value), "__get__")
    if isinstance(value, (property, functools.cached_property)) or not (
        is_bound or callable(value)
    ):
        return f"is a {type(value).__name__}, not a method"
    try:
        method = value.__get__(object(), object) if is_bound else value
        # The engine calls the wrapper, so the signature of the wrapper counts.
        signature = inspect.signature(method, follow_wrapped=False)
    except Exception:  # an unusual descriptor or builtin
        return None
    try:
        signature.bind(*([None] * (len(inspect.signature(hook).parameters) - 1)))
    except TypeError as error:
        return f"cannot be called: {error}; it takes {signature}"
    if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
        return "is async, but no engine awaits it"
    if inspect.isgeneratorfunction(method) and hook.__name__ != "take_events":
        return "is a generator, so a call runs none of its code"
    return None
