"""A worker half in a process of its own, as real engines have it.

The process is a fork, made when the KV caches are registered: 20 ms a run, where a spawned
one takes seconds for its imports, and a class that lives in a function or in ``__main__``
is there. What the halves share through globals or closures is a copy from then on.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from typing_extensions import override

from kvview import CanonicalKVCaches, Connector, StepPlan, TransferResult, WorkerConnector
from kvview.testing.connector.hook_calls import calling, hook, make_worker, require_type
from kvview.testing.connector.invariants import InvariantBroken

_PATIENCE = 60.0  # seconds for one call, until it is said to hang


def can_fork() -> bool:
    """Whether a process can be made; on macOS a fork is not safe with threads around."""
    has_fork = "fork" in multiprocessing.get_all_start_methods()
    return has_fork and sys.platform != "darwin"


class RemoteWorker(WorkerConnector):
    """Passes each call on to the real worker half, in a child process.

    1. The KV caches are moved into shared memory where they stand.
    2. What a hook raises there is raised here as the law that it breaks.
    3. A child that dies breaks CONN-3; nobody waits for it.

    Args:
        connector_class: Of the connector.
        config: Its configuration, pickled.
    """

    def __init__(self, connector_class: type[Connector], config: bytes) -> None:
        self._connector_class = connector_class
        self._config = config
        self._pipe: Connection | None = None

    @override
    def register_kv_caches(self, kv_caches: CanonicalKVCaches[torch.Tensor]) -> None:
        for cache in kv_caches.tensors:
            cache.tensor.untyped_storage().share_memory_()
        context = multiprocessing.get_context("fork")
        self._pipe, other = context.Pipe()
        self._child = context.Process(
            target=_serve,
            args=(other, self._connector_class, self._config, kv_caches),
            daemon=True,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads; the child uses none
            self._child.start()
        other.close()
        self._answer("register_kv_caches")

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
        """Shut the half down twice, as any engine may, and end its process."""
        if self._pipe is None:
            return
        try:
            self._call("shutdown")
            self._call("shutdown")
        finally:
            self._pipe.close()
            self._pipe = None
            self._child.kill()
            self._child.join()

    def _call(self, name: str, *args: Any) -> Any:
        assert self._pipe is not None, "register_kv_caches comes first"
        with suppress(OSError):  # it has died: the answer tells
            self._pipe.send_bytes(pickle.dumps((name, args)))
        return self._answer(name)

    def _answer(self, name: str) -> Any:
        assert self._pipe is not None, "register_kv_caches comes first"
        if not wait([self._pipe], _PATIENCE):
            self._child.kill()
            raise InvariantBroken(
                "CONN-3", f"{name} of the worker half did not return within {_PATIENCE:.0f} s"
            )
        try:
            broken, answer = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            self._child.join()
            raise InvariantBroken(
                "CONN-3",
                f"the process of the worker half died in {name}, exit code {self._child.exitcode}",
            ) from None
        if broken is not None:
            raise InvariantBroken(*broken)
        return answer


def _serve(
    pipe: Connection,
    connector_class: type[Connector],
    config: bytes,
    kv_caches: CanonicalKVCaches[torch.Tensor],
) -> None:
    """The child: builds the half, answers calls until nobody is there to call."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops on it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)  # the threads of torch's pool are not here
    try:
        half: WorkerConnector | None = None
        name, args = "register_kv_caches", (kv_caches,)
        while True:
            answer, broken = None, None
            try:
                if half is None:
                    half = make_worker(connector_class, config)
                with calling(name):
                    answer = getattr(half, name)(*args)
                if name == "get_finished":
                    require_type(name, answer, "CONN-3")
                with hook("pickling the results", "CONN-3"):
                    answer = pickle.dumps((None, answer if name == "get_finished" else None))
            except InvariantBroken as error:
                answer, broken = None, (error.law, error.message)
            pipe.send_bytes(answer or pickle.dumps((broken, None)))
            name, args = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)  # nothing that the parent has registered for its own end
