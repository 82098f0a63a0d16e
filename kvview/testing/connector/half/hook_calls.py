"""Calls of a connector's hooks: an exception or a wrong return value breaks a law."""

from __future__ import annotations

import pickle
from contextlib import AbstractContextManager
from typing import Any

from typing_extensions import override

from kvview import Connector, KVViewError, TransferSpecError
from kvview.connector.hook_errors import build_connector, missing_library, where, wrong_type
from kvview.errors import line_of, split_law
from kvview.testing.connector.judge.invariants import InvariantBroken
from kvview.testing.connector.judge.threads import hint_for
from kvview.testing.connector.run.jumping_clock import jump
from kvview.testing.supervision import watchdog
from kvview.testing.supervision.source_lines import at_line

_AT_START = {
    *("__init__", "make_scheduler", "make_worker", "register_kv_caches", "on_engine_ready"),
    *("bind_gpu_block_pool_view", "bind_gpu_block_pool", "bind_kv_cache_manager"),
}
_LAW_OF_WORKER_HOOK = {"register_kv_caches": "XFER-1", "shutdown": "CONN-4"}  # other hooks: CONN-3


class hook(watchdog.calling):
    """Report an exception of a hook under the law that its message names, or the given law."""

    def __init__(self, name: str, law: str) -> None:
        self._name, self._law = name, law

    @override
    def __enter__(self) -> None:
        jump()
        super().__enter__()

    @override
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        super().__exit__(kind, error, trace)
        if error is not None and not isinstance(error, (InvariantBroken, KeyboardInterrupt)):
            raise _broken(self._name, self._law, error) from error


def _broken(name: str, law: str, error: BaseException) -> Exception:
    """Return the error of the check for an exception of a hook."""
    if isinstance(error, watchdog.HookTimeout):
        line = where(error)
        message = f"{name} {error}" + (f": it is at {line}" if line else "")
        hint = hint_for(name.partition(" ")[0])
        return InvariantBroken(law, message, is_timeout=True, hint=hint)
    is_start = name.partition(" ")[0] in _AT_START
    if is_start and (missing := missing_library(error, "the connector")):
        return missing
    text = line_of(error)
    named, rest = split_law(text)
    is_hook_error = False
    if named and not (law == "CONN-2" and text.startswith("OFF-2")):
        law, text = named, rest
    elif isinstance(error, TransferSpecError):
        law = "XFER-1"
    else:
        is_hook_error = True
    kind = type(error).__name__
    text = f"{kind}: {text}" if isinstance(error, KVViewError) else f"{kind} {text}".rstrip()
    message = f"{name} raised {text}{at_line(error)}"
    return InvariantBroken(law, message, is_hook_error=is_hook_error)


def calling(name: str) -> AbstractContextManager[None]:
    """Report an exception of a worker half's hook as a broken law."""
    return hook(f"{name} of the worker half", _LAW_OF_WORKER_HOOK.get(name, "CONN-3"))


def require_type(hook: str, answer: object, law: str) -> None:
    """Refuse a return value that no engine can use."""
    if expected := wrong_type(hook, answer):
        message = f"{hook} returned {line_of(answer, repr)}: expected {expected}"
        raise InvariantBroken(law, message, is_hook_error=True)


def make_half(make: str, connector_class: type[Connector], config: bytes) -> Any:
    """Build a half from a separate instance of the connector.

    Args:
        make: Name of the hook that makes the half.
        connector_class: The connector.
        config: The pickled configuration.
    """
    with hook(make, "CONN-1"):
        half = getattr(build_connector(connector_class, pickle.loads(config)), make)()
    require_type(make, half, "CONN-1")
    return half
