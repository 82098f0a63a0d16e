"""Containment of faults in a connector's own code: one log line, followed by the failure policy.

- FAULT-1 The first line about a fault **must** be kvview's, and name the target, the file and
  the hook; vLLM's output about it follows.
- FAULT-2 With ``kv_load_failure_policy`` ``recompute`` the engine **must** continue without the
  connector: the half that failed is not called any more and the contract's defaults replace it,
  requests that wait for its loads are computed, and its holds are released once its jobs have
  ended. With ``fail`` the engine ends.
- FAULT-3 A fault at the start, and a fault of a worker half that has loads in flight, **must** end
  the engine, because these loads may still write into the KV cache.

Source: vLLM's ``KVTransferConfig.kv_load_failure_policy`` (0.13.0), which defines the effect of a
failed load; a failed connector has the same effect.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from types import MethodType
from typing import Any

from kvview import ConnectorError, SchedulerConnector
from kvview.connector.hooks import hooks_of
from kvview.errors import one_line, split_law
from kvview.handoff import HandoffScheduler

_logger = logging.getLogger(__name__)
_AT_START = {"bind_gpu_block_pool_view", "on_engine_ready", "bind_peer"}


class Faults:
    """The faults of one half of a connector, and whether this half is still called.

    Args:
        target: Target of the connector.
        half: "scheduler" or "worker".
        resumes: Whether the engine continues without the connector.
    """

    def __init__(self, target: str, half: str, *, resumes: bool) -> None:
        self.target = target
        self.is_out = False
        self.num_faults = 0
        self._half = half
        self._resumes = resumes
        self._ends_with: ConnectorError | None = None

    def on_fault(self, error: ConnectorError, must_end: str = "") -> None:
        """Log a fault, after which the half is not called any more.

        Args:
            error: The error, which names the line and the hook.
            must_end: Reason why the engine must end under any policy; empty if the policy decides.

        Raises:
            ConnectorError: The engine must end.
        """
        self.num_faults += 1
        self.is_out = True
        if self._resumes and not must_end:
            _logger.error(
                "kvview: connector %s failed: %s. FAULT-2: the engine continues without its %s "
                "half, which is not called any more",
                *(self.target, error, self._half),
            )
            return
        why = must_end or "kv_load_failure_policy is not recompute"
        _logger.error(
            "kvview: connector %s failed: %s. The engine ends: %s", self.target, error, why
        )
        law, _ = split_law(str(error))  # the law stays at the start, as in every message of a law
        text = f"{error} (connector {self.target})" if law else f"connector {self.target}: {error}"
        self._ends_with = type(error)(text)
        raise self._ends_with from error

    def insist(self) -> None:
        """Raise the fatal error again, because vLLM may have passed it to the caller of a reset.

        Raises:
            ConnectorError: The engine must end.
        """
        if self._ends_with is not None:
            raise self._ends_with


def report_at_start(target: str, error: BaseException) -> None:
    """Log the reason why a connector cannot start, before vLLM's tracebacks (FAULT-1)."""
    _logger.error("kvview: connector %s cannot start: %s", target, one_line(error))


def contain(half: SchedulerConnector, faults: Faults) -> None:
    """Make every hook of a watched scheduler half satisfy FAULT-2."""
    idle = HandoffScheduler() if isinstance(half, HandoffScheduler) else SchedulerConnector()
    for name in hooks_of(type(half)):
        hook, default = getattr(half, name), getattr(idle, name)
        own = inspect.unwrap(hook)
        if isinstance(own, MethodType) and own.__func__ is default.__func__:
            call = default  # because the connector has no code there that could fail
        else:
            call = _contained(name, hook, default, faults)
        object.__setattr__(half, name, call)


def _contained(
    name: str, hook: Callable[..., Any], default: Callable[..., Any], faults: Faults
) -> Callable[..., Any]:
    @functools.wraps(hook)
    def call(*args: Any) -> Any:
        if faults.is_out and name != "shutdown":
            faults.insist()
            return default(*args)
        try:
            return hook(*args)
        except ConnectorError as error:
            faults.on_fault(error, "it cannot start" if name in _AT_START else "")
            return default(*args)

    return call
