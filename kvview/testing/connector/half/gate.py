"""A gate between a worker half and KV tensors, at which copies can be delayed or fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from kvview.testing.supervision.yield_points import wait_until_asleep

_LONGEST_COPY = 1.0  # seconds until the next operation is let in
# Operations that read shapes, devices and so on. A view moves no bytes, but leads to a copy.
_LOOKS = {"__get__", "__len__", "__repr__", "dim", "element_size", "is_contiguous", "numel"}
_LOOKS |= {"size", "storage_offset", "stride", "untyped_storage", "view"}


@dataclass(eq=False)
class _Ticket:
    thread: int


class CopyFailed(RuntimeError):
    """A simulated failure of a copy."""


class Gate:
    """The gate that every operation on KV tensors passes.

    1. While the gate is closed, operations wait, except on the engine's own thread, because this
       thread opens the gate.
    2. The gate lets one operation pass at a time, in a random order.

    Args:
        is_home: Whether the calling thread is the thread that calls the hooks of the worker half.
    """

    def __init__(self, is_home: Callable[[], bool]) -> None:
        self._is_home = is_home
        self._changed = threading.Condition()
        self._before: list[_Ticket] = []
        self._let_in: set[_Ticket] = set()
        self._num_inside = 0
        self._is_open = False
        self._is_over = False
        self._num_good: int | None = None  # copies that succeed first; None: all
        self._num_bad: int | None = None  # number of copies that then fail; None: all
        self.num_failed = 0
        self.has_recovered = False
        self.num_after_the_end = 0
        self.num_moved = 0
        """Number of operations so far that read or wrote bytes, not only made a view."""

    @property
    def num_waiting(self) -> int:
        """Return the number of operations that wait at the closed gate."""
        return len(self._before)

    @contextmanager
    def passing(self) -> Iterator[Callable[[], None]]:
        """Run one operation on its thread.

        Yields:
            A function to call after the operation has moved bytes.
        """
        with self._changed:
            if not self._is_open and not self._is_home():
                ticket = _Ticket(threading.get_ident())
                self._before.append(ticket)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_open or ticket in self._let_in)
                self._before.remove(ticket)
            self.num_after_the_end += self._is_over
            if self._num_good is not None:
                self._num_good -= 1
                self.has_recovered = self.num_failed == self._num_bad
                if self._num_good < 0 and not self.has_recovered:
                    self.num_failed += 1
                    self._changed.notify_all()
                    raise CopyFailed("simulated failure of a copy")
            self._num_inside += 1
        has_moved = False

        def on_moved() -> None:
            nonlocal has_moved
            has_moved = True

        try:
            yield on_moved
        finally:
            with self._changed:
                self._num_inside -= 1
                self.num_moved += has_moved
                self._changed.notify_all()

    def let_in(self, number: float, *, whole_job: bool) -> bool:
        """Let the operations of one thread pass, up to the first operation that moves bytes.

        Args:
            number: Selects the thread: 0.0 for the first waiting thread, up to just below 1.0 for
                the last.
            whole_job: Whether the later operations of the thread may also pass.

        Returns:
            Whether bytes moved.
        """
        num_moved = self.num_moved
        with self._changed:
            if not self._before:
                return False
            # Threads reach the gate in an order that depends on the machine's load.
            order = {thread.ident: place for place, thread in enumerate(threading.enumerate())}
            waiting = sorted(self._before, key=lambda ticket: order.get(ticket.thread, 0))
            ticket = waiting[int(number * len(waiting))]
            self._pass(ticket)
        while whole_job or self.num_moved == num_moved:
            if not self._let_in_next(ticket.thread):
                break
        return self.num_moved > num_moved

    def _let_in_next(self, thread: int) -> bool:
        """Let the thread's next operation pass; returns False if the thread does not arrive."""
        if not any(ticket.thread == thread for ticket in self._before):
            wait_until_asleep()
        with self._changed:
            for ticket in self._before:
                if ticket.thread == thread:
                    self._pass(ticket)
                    return True
        return False

    def _pass(self, ticket: _Ticket) -> None:
        self._let_in.add(ticket)
        self._changed.notify_all()
        self._changed.wait_for(
            lambda: ticket not in self._before and not self._num_inside, _LONGEST_COPY
        )
        self._let_in.discard(ticket)

    def open(self, draw: Callable[[], float]) -> None:
        """Let the waiting operations pass in a random order, and then all later operations."""
        while len({ticket.thread for ticket in self._before}) > 1:
            # A thread that passes the gate continues to the end of its job, so that jobs overtake
            # each other.
            thread = self._before[int(draw() * len(self._before))].thread
            while self._let_in_next(thread):
                pass
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def close(self) -> None:
        """Delay operations from now on."""
        with self._changed:
            self._is_open = False

    def set_failing(self, num_good: int | None, num_bad: int | None = None) -> None:
        """Let operations fail from now on.

        Args:
            num_good: Number of operations that still succeed; None for no failure.
            num_bad: Number of operations that fail after these; None for all.
        """
        with self._changed:
            self._num_good, self._num_bad = num_good, num_bad
            self.num_failed, self.has_recovered = 0, False

    def end(self) -> None:
        """Let all operations pass after the worker half's shutdown, and count late operations."""
        with self._changed:
            self._num_good = None
            self._is_over = self._is_open = True
            self._changed.notify_all()


class GatedTensor(torch.Tensor):
    """A KV tensor, or a view of a KV tensor, whose operations pass the gate."""

    gate: Gate
    address: int

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        gated = next(_gated((args, tuple((kwargs or {}).values()))))
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__ in _LOOKS:
                result = func(*args, **(kwargs or {}))
            else:
                with gated.gate.passing() as on_moved:
                    result = func(*args, **(kwargs or {}))
                    if _moves(func.__name__, args, result, gated):
                        on_moved()
            if isinstance(result, tuple | list):
                return type(result)(_again(item, gated) for item in result)
            return _again(result, gated)


def gate_tensor(tensor: torch.Tensor, gate: Gate) -> torch.Tensor:
    """Return a tensor over the same memory, behind a gate."""
    gated = tensor.as_subclass(GatedTensor)
    gated.gate, gated.address = gate, tensor.untyped_storage().data_ptr()
    return gated


def _gated(values: Iterable[Any]) -> Iterator[GatedTensor]:
    for value in values:
        if isinstance(value, GatedTensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _gated(value)


def _moves(name: str, args: Iterable[Any], result: Any, gated: GatedTensor) -> bool:
    """Whether an operation read or wrote bytes; False if it only made a view of KV memory."""
    if not isinstance(result, torch.Tensor):
        return name == "__setitem__"
    is_view = result.untyped_storage().data_ptr() == gated.address
    return not is_view or any(result is one for one in args)


def _again(result: Any, gated: GatedTensor) -> Any:
    """Put a view of KV memory behind the gate; a copy of KV memory needs no gate."""
    if isinstance(result, torch.Tensor) and not hasattr(result, "gate"):
        if result.untyped_storage().data_ptr() == gated.address:
            return gate_tensor(result, gated.gate)
        if isinstance(result, GatedTensor):
            return result.as_subclass(torch.Tensor)
    return result
