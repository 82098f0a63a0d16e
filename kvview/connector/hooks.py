"""Hooks by name: what looks like one and is none is refused when the class is made (CONN-9)."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection
from typing import Any

from kvview.errors import ConnectorDefinitionError

_CLOSE = 0.8  # difflib's ratio from which a name is taken for a misspelled hook

# Other names under which people know the hooks: vLLM's, and those of kvview's drafts.
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


def check_hooks(cls: type, base: type) -> None:
    """Check the methods that a class defines itself.

    Args:
        cls: A subclass of ``base``.
        base: One of the halves, or ``Connector``: its public methods are the hooks.

    Raises:
        ConnectorDefinitionError: A name is close to a hook's, or a hook's signature
            does not take what the engine passes.
    """
    hooks = {
        name: value
        for name, value in vars(base).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }
    for name, value in vars(cls).items():
        if name.startswith("_") or not callable(value):
            continue
        if name in hooks:
            _check_signature(cls, name, value, hooks[name])
        elif meant := _meant(name, hooks):
            raise ConnectorDefinitionError(
                f"CONN-9: {cls.__module__}.{cls.__qualname__}.{name} is never called: the hook of "
                f"a {base.__name__} is {meant}{inspect.signature(hooks[meant])}. Rename it, or "
                f"begin the name of a helper with an underscore"
            )


def _meant(name: str, hooks: Collection[str]) -> str | None:
    other = OTHER_NAMES.get(name)
    if other in hooks:
        return other
    close = difflib.get_close_matches(name, hooks, n=1, cutoff=_CLOSE)
    return close[0] if close else None


def _check_signature(cls: type, name: str, method: Any, hook: Callable[..., Any]) -> None:
    if isinstance(method, (staticmethod, classmethod)):
        method = method.__func__
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # built in, without a signature
        return
    wanted = inspect.signature(hook)
    skipped = 1 if isinstance(vars(cls)[name], staticmethod) else 0
    try:
        signature.bind(*([None] * (len(wanted.parameters) - skipped)))
    except TypeError as error:
        raise ConnectorDefinitionError(
            f"CONN-9: {cls.__module__}.{cls.__qualname__}.{name}{signature} cannot be called as "
            f"the engine calls it, {name}{wanted}: {error}"
        ) from None
