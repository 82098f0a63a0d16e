"""The worker's role of a raw connector, called as by a model runner, in any process.

Source: ``execute_model`` of vllm/v1/worker/gpu_model_runner.py, 0.12.0 to 0.33.0;
:mod:`kvview_vllm.simulation.scheduler.model_runner`.
"""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvview import CacheGroup
from kvview.testing.connector.exercised.coverage import IN_REAL_TIME
from kvview.testing.connector.half.process import Child, Serve
from kvview_vllm.releases.compat.versions import vllm
from kvview_vllm.releases.cpu.worker_caches import CacheKind, add_layers, allocate, metadata_class
from kvview_vllm.simulation.raw.worker.token_bytes import (
    RequestInStep,
    TokenCompute,
    Wrong,
    attention_metadata,
)
from kvview_vllm.simulation.scheduler.model_runner import (
    ModelRunner,
    RunnerV1,
    RunnerV2,
    active,
    chosen,
)
from kvview_vllm.simulation.scheduler.vllm_scheduler import named

if TYPE_CHECKING:
    from kvview_vllm.simulation.raw.call_recorder import CallRecorder
    from kvview_vllm.simulation.raw.stand_ins import StandIns

_LOST = 0x1057  # the word of each slot after a sleep
_PATIENCE = 150.0  # longer than a hook may take, so that a slow hook is named first


@dataclass(frozen=True)
class RawStep:
    """The message to a worker for one step, which can be pickled.

    Args:
        output: The scheduler's ``SchedulerOutput``.
        batch: The tokens that the step computes.
        loads: The loads that start with the step.
    """

    output: Any
    batch: Sequence[RequestInStep]
    loads: Sequence[RequestInStep]


@dataclass(frozen=True)
class StepAnswer:
    """The result of a worker, which can be pickled.

    Args:
        transfers: The ``KVConnectorOutput`` of the connector, or None.
        wrong: The first wrong token that each request has read in each layer.
        num_loads: Number of loads that wrote new bytes that requests then read.
        seen: The replaced parts, and the parts that were not simulated.
    """

    transfers: Any
    wrong: Sequence[Wrong] = ()
    num_loads: int = 0
    seen: Collection[str] = field(default_factory=set)


class RawWorker:
    """The worker's side: tensors, layers, and the connector's worker role.

    Args:
        vllm_config: The worker's own ``VllmConfig``.
        cache_config: The ``KVCacheConfig``.
        kind: Layers of the worker.
        groups: The KV-cache groups.
        connect: Builds the connector's role; None without a connector.
        recorder: Records the connector's calls.
        stand_ins: Replace CUDA copies.
        rank: Number of the rank, on which the computed bytes depend.
        is_v2: Whether Model Runner V2 drives the role.
    """

    def __init__(
        self,
        vllm_config: Any,
        cache_config: Any,
        kind: CacheKind,
        groups: Sequence[CacheGroup],
        connect: Callable[[], Any] | None,
        recorder: CallRecorder,
        stand_ins: StandIns,
        rank: int = 0,
        *,
        is_v2: bool = False,
    ) -> None:
        self._config = vllm_config
        self._num_apart = _num_apart()  # before the connector starts any
        self._recorder = recorder
        self._stand_ins = stand_ins
        self._to_verify: set[str] = set()  # requests whose load must bring new bytes
        add_layers(vllm_config, kind)
        self._role: Any = None
        # As in a worker's wrapper, because connectors read the current configuration.
        with chosen(is_v2=is_v2), vllm("config").set_current_vllm_config(vllm_config):
            if connect is not None:
                with named("building the worker's side"):
                    self._role = connect()
            with active(self._role):  # because up to 0.28 the connector may choose the blocks
                self.caches = allocate(vllm_config, cache_config, kind)
            if self._role is not None:
                with named("building the worker's side"):
                    self._runner = self._make_runner(is_v2=is_v2)
        members = [
            (name, number)
            for number, group in enumerate(cache_config.kv_cache_groups)
            for name in group.layer_names
        ]
        self._layers = [name for name, _ in members]
        drafts = kind.draft_layers()
        self._of_target = [n for n, name in enumerate(self._layers) if name not in drafts]
        self._of_drafts = [n for n, name in enumerate(self._layers) if name in drafts]
        backends = {name: backend for name, (backend, _) in kind.named_layers().items()}
        self._metadata_classes = [metadata_class(backends[name]) for name in self._layers]
        of_layers = [number for _, number in members]
        self._compute = TokenCompute(self.caches.slots, groups, of_layers, rank)

    def _make_runner(self, *, is_v2: bool) -> ModelRunner:
        """Make the model runner, and register the caches with the role."""
        if is_v2:
            return RunnerV2(self._config, self._role, self.caches.tensors)
        self.caches.register(self._role)
        return RunnerV1(self._config, self._role)

    def execute(self, step: RawStep) -> StepAnswer:
        """Run a step, as a model runner does."""
        self._stand_ins.tick()
        for load in step.loads:
            if not self._compute.holds(load):
                self._to_verify.add(load.request_id)
        with named("the worker's side"):
            transfers, wrong = self._execute(step)
        loaded = {one.request_id for one in step.batch if one.start} & self._to_verify
        self._to_verify -= loaded
        return StepAnswer(transfers, wrong, len(loaded), self._seen())

    def holds(self, load: RequestInStep) -> bool:
        """Whether all layers have the bytes that a load must write."""
        return self._compute.holds(load)

    def handshake_metadata(self) -> Any:
        """Return the metadata of the connector for its peers."""
        return self._role.get_handshake_metadata()

    def sleep(self) -> None:
        """Sleep and wake up, if the connector can: all blocks then have other bytes."""
        if self._role is None or not self._role.supports_sleep_mode(
            self._config.kv_transfer_config
        ):
            return
        with named("unregister_kv_caches"):
            for _ in range(2):  # vLLM may discard the KV cache of an engine that sleeps
                self._role.unregister_kv_caches()
        for slots in self.caches.slots:
            slots.fill_(_LOST)
        with named("restore_kv_caches"):
            self._role.restore_kv_caches()

    def shutdown(self) -> Collection[str]:
        """Shut the role down; return the replaced parts, and the parts that were not simulated."""
        if self._role is not None:
            with named("shutdown"):
                self._role.shutdown()
        return self._seen()

    def _seen(self) -> set[str]:
        seen = {f"left out: {part}" for part in self._recorder.left_out} | self._stand_ins.used
        return seen | {IN_REAL_TIME} if _num_apart() > self._num_apart else seen

    def close(self) -> None:
        """Do nothing, because this worker has no process to end."""

    def _execute(self, step: RawStep) -> tuple[Any, list[Wrong]]:
        output = step.output
        if self._role is None:
            every = range(len(self._layers))
            return None, self._forward(step, every, {}) if step.batch else []
        if not step.batch:
            return self._runner.no_forward(output), []
        places = [*zip(self._compute.group_of_layer, self._metadata_classes, strict=True)]
        made = {one: attention_metadata(self._compute, step.batch, *one) for one in {*places}}
        attention = dict(zip(self._layers, map(made.__getitem__, places), strict=True))
        with self._runner.forward(output, attention) as calls_layers:
            attention = attention if calls_layers else {}
            wrong = self._forward(step, self._of_target, attention)

        def draft() -> None:
            wrong.extend(self._forward(step, self._of_drafts, attention))

        return self._runner.end_step(output, draft), wrong

    def _forward(
        self, step: RawStep, layers: Sequence[int], attention: dict[str, Any]
    ) -> list[Wrong]:
        """For each layer, wait for its load, write and read tokens, and save the layer.

        Args:
            step: The step.
            layers: Numbers of the layers.
            attention: Metadata by layer; empty if the layers call no hooks.
        """
        wrong: list[Wrong] = []
        for number in layers:
            layer = self._layers[number]
            if attention:
                self._role.wait_for_layer_load(layer)
            wrong += self._compute.run(number, step.batch)
            if attention:
                self._role.save_kv_layer(layer, self.caches.tensors[layer], attention[layer])
        return wrong


def _num_apart() -> int:
    """Return the number of threads and child processes of this process."""
    return threading.active_count() + len(multiprocessing.active_children())


class RemoteRawWorker:
    """A worker in a forked process, as if under an executor with several workers.

    After the fork the roles have separate copies of module and class attributes, and messages
    between the roles are pickled.

    Args:
        make: Builds the worker; called in the worker's process.
    """

    def __init__(self, make: Callable[[], RawWorker]) -> None:
        def serve() -> Serve:
            worker = make()

            def answer(name: str, args: tuple[bytes, ...]) -> Any:
                if name == "execute":
                    return worker.execute(pickle.loads(args[0]))
                if name == "sleep":
                    return worker.sleep()
                return worker.shutdown() if name == "shutdown" else None

            return answer

        self._child = Child(serve, "the worker's process", _PATIENCE)
        try:
            self._child.call("build")
        except BaseException:
            self._child.close()
            raise

    def execute(self, step: bytes) -> StepAnswer:
        """Run a :class:`RawStep` in the process; the step was pickled at its launch."""
        answer: StepAnswer = self._child.call("execute", step)
        return answer

    def sleep(self) -> None:
        """Sleep and wake up in the process."""
        self._child.call("sleep")

    def shutdown(self) -> Collection[str]:
        """Shut the role down in the process."""
        seen: Collection[str] = self._child.call("shutdown")
        return seen

    def close(self) -> None:
        """End the process."""
        self._child.close()
