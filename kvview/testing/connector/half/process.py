"""A worker half in a separate process, as in real engines.

The process is forked when the KV caches are registered. A fork takes 20 ms per run, whereas a
spawned process takes seconds for its imports and lacks classes that are defined in a function or in
``__main__``. After the fork, globals and closures that the halves share are copies.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from typing_extensions import override

from kvview import (
    CanonicalKVCaches,
    Connector,
    MissingLibraryError,
    StepPlan,
    TransferResult,
    WorkerConnector,
)
from kvview.connector.hook_errors import where
from kvview.testing.connector.exercised import lines as code_coverage
from kvview.testing.connector.half.hook_calls import calling, hook, make_half, require_type
from kvview.testing.connector.judge.invariants import InvariantBroken
from kvview.testing.connector.judge.threads import hint_for, raise_thread_error
from kvview.testing.supervision import watchdog

_LINES = "lines that ran"  # used instead of the name of a hook
END_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE = 60.0  # seconds until a call is reported as hanging

Serve = Callable[[str, tuple[Any, ...]], Any]
"""Runs a call, given its name and arguments; the results are pickled."""


def can_fork() -> bool:
    """Whether a process can be forked; on macOS a fork with threads is not safe."""
    has_fork = "fork" in multiprocessing.get_all_start_methods()
    return has_fork and sys.platform != "darwin"


@contextmanager
def signals_held() -> Iterator[None]:
    """Deliver the signals after the block, because callbacks of a fork drop exceptions.

    A child that is forked in the block must unblock ``END_SIGNALS``.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Child:
    """A forked process that runs calls.

    1. If a law is broken in the child, the error is raised in this process.
    2. If the child dies, CONN-3 is broken at once.

    Args:
        make: Called once in the child; returns the function that runs the calls.
        what: Description of the object in the child, for messages.
        patience: Seconds after which a call is reported as hanging.
    """

    def __init__(self, make: Callable[[], Serve], what: str, patience: float = _PATIENCE) -> None:
        self._what = what
        self._patience = patience
        context = multiprocessing.get_context("fork")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, self._pipe, make), daemon=True)
        with warnings.catch_warnings(), signals_held():
            # Python warns about threads of the parent, which the child does not use.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        other.close()

    def call(self, name: str, *args: Any) -> Any:
        """Call a method in the child."""
        with suppress(OSError):  # the end of a dead child is reported below
            self._pipe.send_bytes(pickle.dumps((name, args)))
        if not wait([self._pipe], self._patience):
            self._process.kill()
            raise InvariantBroken(
                "CONN-3",
                f"{name} of {self._what} did not return within {self._patience:.0f} s",
                hint=hint_for(name),
            )
        try:
            broken, answer = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            self._process.join()
            raise InvariantBroken(
                "CONN-3",
                f"the process of {self._what} died during {name} with exit code "
                f"{self._process.exitcode}",
                hint="",
            ) from None
        if broken is not None:
            raise broken
        return answer

    def close(self) -> None:
        """End the child; may be called twice."""
        self._pipe.close()
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, parents: Connection, make: Callable[[], Serve]) -> None:
    """Run calls in the child until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
    parents.close()  # without this, the child would not notice the end of the parent
    torch.set_num_threads(1)  # the fork does not have the threads of torch's pool
    serve: Serve | None = None
    try:
        with watchdog.watching_child():
            while True:
                name, args = pickle.loads(pipe.recv_bytes())
                try:
                    serve = serve or make()
                    answer = serve(name, args)
                    with hook("pickling the results", "CONN-3"):
                        told = pickle.dumps((None, answer))
                except (InvariantBroken, MissingLibraryError) as error:
                    told = pickle.dumps((error, None))
                except Exception as error:  # a fault of the program that runs the hooks
                    message = f"{name} raised {type(error).__name__} {error} at {where(error)}"
                    told = pickle.dumps((InvariantBroken("ENGINE", message), None))
                pipe.send_bytes(told)
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)  # does not run the exit handlers of the parent


class RemoteWorker(WorkerConnector):
    """Passes each call on to the real worker half in a child process.

    The KV caches are moved into shared memory in place.

    Args:
        connector_class: Class of the connector.
        config: The pickled configuration.
    """

    def __init__(self, connector_class: type[Connector], config: bytes) -> None:
        self._make = partial(_make_half, connector_class, config)
        self._child: Child | None = None

    @override
    def register_kv_caches(self, kv_caches: CanonicalKVCaches[torch.Tensor]) -> None:
        for cache in kv_caches.tensors:
            cache.tensor.untyped_storage().share_memory_()
        self._child = Child(partial(self._make, kv_caches), "the worker half")
        self._child.call("register_kv_caches")

    @override
    def start_plan(self, plan: StepPlan) -> None:
        self._call("start_plan", plan)

    @override
    def get_finished(self) -> list[TransferResult]:
        results: list[TransferResult] = self._call("get_finished")
        return results

    @override
    def wait(self, job_ids: Sequence[int]) -> None:
        self._call("wait", list(job_ids))

    @override
    def shutdown(self) -> None:
        """Shut the half down twice, as an engine may do, and end its process."""
        if self._child is None:
            return
        try:
            self._call("shutdown")
            self._call("shutdown")
            code_coverage.add_lines(self._call(_LINES))
        finally:
            self._child.close()
            self._child = None

    def _call(self, name: str, *args: Any) -> Any:
        assert self._child is not None, "register_kv_caches comes first"
        return self._child.call(name, *args)


def _make_half(
    connector_class: type[Connector], config: bytes, kv_caches: CanonicalKVCaches[torch.Tensor]
) -> Serve:
    half: WorkerConnector = make_half("make_worker", connector_class, config)
    shared = {"register_kv_caches": (kv_caches,)}  # inherited by the fork, not pickled

    def serve(name: str, args: tuple[Any, ...]) -> Any:
        if name == _LINES:
            return code_coverage.take_lines()
        with calling(name):
            answer = getattr(half, name)(*args or shared.get(name, ()))
        if name != "get_finished":
            return None
        raise_thread_error()
        require_type(name, answer, "CONN-3")
        return answer

    return serve
