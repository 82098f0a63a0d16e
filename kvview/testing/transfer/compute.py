"""A compute stream whose work can be delayed (XFER-6)."""

from __future__ import annotations

import threading


class GatedComputeStream:
    """A substitute for the stream of the model's kernels, for the KV caches of a harness.

    1. Work submitted between ``hold`` and ``release`` ends at ``release``.
    2. The thread that calls ``hold`` runs the model. A wait on this thread would never end, so it
       raises an exception; a wait on any other thread blocks.
    """

    def __init__(self) -> None:
        self._gate: threading.Event | None = None
        self._model_thread = 0

    def hold(self) -> None:
        """Delay work from now on."""
        self._gate = threading.Event()
        self._model_thread = threading.get_ident()

    def release(self) -> None:
        """Let the delayed work end."""
        if self._gate is not None:
            self._gate.set()
            self._gate = None

    def record_event(self) -> GatedComputeEvent:
        """Record an event after all work submitted so far."""
        return GatedComputeEvent(self._gate, self._model_thread)


class GatedComputeEvent:
    """An event in a gated stream.

    Args:
        gate: The gate that opens when the event ends; None if the event has ended immediately.
        model_thread: The thread on which a wait raises.
    """

    _MANY_QUERIES = 10_000
    _PATIENCE = 10.0  # seconds, longer than any check delays compute

    def __init__(self, gate: threading.Event | None, model_thread: int) -> None:
        self._gate = gate
        self._model_thread = model_thread
        self._num_queries = 0

    def query(self) -> bool:
        """Whether all work before the event is done."""
        if self._gate is None or self._gate.is_set():
            return True
        self._num_queries += threading.get_ident() == self._model_thread
        if self._num_queries > self._MANY_QUERIES:
            raise _waits()
        return False

    def synchronize(self) -> None:
        """Block until all work before the event is done."""
        if self.query():
            return
        if threading.get_ident() == self._model_thread:
            raise _waits()
        assert self._gate is not None, "an event that has not ended has a gate"
        if not self._gate.wait(self._PATIENCE):
            raise _waits()


def _waits() -> RuntimeError:
    return RuntimeError(
        "XFER-6: the thread that runs the model waits for its own compute; wait on a thread or "
        "a stream of the worker's"
    )
