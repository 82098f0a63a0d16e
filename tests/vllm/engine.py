"""The real Scheduler of the vLLM release that can be imported, with a simulated worker.

The scheduler and its pool are vLLM's, the connector is kvview's. The worker writes bytes that
follow from a block's hash into real CPU tensors, so that a wrong load is seen at once. Nothing
is patched: vLLM chooses the platform by the `+cpu` in the version of the unpacked sources.
"""

from __future__ import annotations

import hashlib
import importlib
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from kvview import (
    CacheGeometry,
    CacheGroup,
    Connector,
    FullAttention,
    SchedulerConnector,
    SlidingWindow,
    WorkerConnector,
)
from kvview.connector.hooks import hooks_of
from kvview_vllm.geometry import read_geometry
from kvview_vllm.releases import installed
from kvview_vllm.releases.build import samples
from kvview_vllm.releases.compat.calls import handle_preemptions, known_arguments
from kvview_vllm.releases.compat.versions import vllm
from kvview_vllm.releases.cpu.worker_caches import CacheKind, add_layers
from kvview_vllm.simulation.scheduler import cpu_scheduler, model_runner
from kvview_vllm.simulation.scheduler.capabilities import (  # for the tests, under one name
    can_fail_loads as can_fail_loads,
)
from kvview_vllm.simulation.scheduler.capabilities import (
    refuses_several_groups as refuses_several_groups,
)
from kvview_vllm.simulation.scheduler.cpu_scheduler import multi_config as multi_config

cpu_scheduler.prepare()  # before the imports that need it

BLOCK_SIZE = 16
WINDOW = 32
NUM_BLOCKS = 64
LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
EXAMPLE = Path(__file__).parents[2] / "examples" / "host_cache.py"
EXAMPLE_CONNECTOR = f"{EXAMPLE}:HostCacheConnector"


def connector_config(target: str = EXAMPLE_CONNECTOR, **options: Any) -> dict[str, Any]:
    """Return the `kv_transfer_config` of a kvview connector, by default the example."""
    return cpu_scheduler.connector_config(target, **options)


class Engine:
    """Scheduler and simulated worker, stepped by hand.

    Args:
        folder: Folder for the model's configuration.
        transfer_config: Arguments of `KVTransferConfig`.
        windows: Sliding windows in tokens, a KV-cache group each; None is full attention.
        num_blocks: Blocks of the pool.
        depth: Batches in flight; with several, the asynchronous scheduler steps in the order of
            `EngineCore.step_with_batch_queue`, and bytes are not checked.
        tokens_per_step: Token budget of one step.
        publishes_events: Whether the scheduler collects KV events.
    """

    def __init__(
        self,
        folder: Path,
        transfer_config: dict[str, Any],
        *,
        windows: Sequence[int | None] = (None,),
        num_blocks: int = NUM_BLOCKS,
        depth: int = 1,
        tokens_per_step: int = cpu_scheduler.MAX_TOKENS,
        publishes_events: bool = False,
    ) -> None:
        import torch

        self.kv_cache_config = cpu_scheduler.make_kv_cache_config(_groups(windows), num_blocks)
        self.vllm_config = cpu_scheduler.make_vllm_config(
            folder,
            transfer_config,
            block_size=BLOCK_SIZE,
            num_groups=len(windows),
            num_blocks=num_blocks,
            max_num_batched_tokens=tokens_per_step,
            steps_in_flight=depth,
            publishes_events=publishes_events,
        )
        self.geometry: CacheGeometry = read_geometry(self.vllm_config, self.kv_cache_config)
        self.scheduler = cpu_scheduler.make_scheduler(
            self.vllm_config, self.kv_cache_config, self.geometry
        )
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.worker = cpu_scheduler.make_worker_connector(self.vllm_config, self.kv_cache_config)
        layers = [
            name for group in self.kv_cache_config.kv_cache_groups for name in group.layer_names
        ]
        if transfer_config["kv_connector"] == "OffloadingConnector":
            register_layers(self.vllm_config, self.kv_cache_config)
        # Layers of several groups share memory, as in vLLM: a block belongs to one group.
        tensor = torch.zeros((num_blocks, 2, BLOCK_SIZE, 64), dtype=torch.float32)
        self.kv_caches = dict.fromkeys(layers, tensor)
        self.worker.register_kv_caches(self.kv_caches)
        self.requests: dict[str, Any] = {}
        self.hits: dict[str, int] = {}  # prompt tokens that were not computed
        self.offered: dict[str, Any] = {}  # `kv_transfer_params` of outputs
        self.hold_loads = False
        self.depth = depth
        self.in_flight: deque[Any] = deque()  # outputs of the scheduler and of the model
        self._metadata: list[Any] = []

    def add(self, request_id: str, tokens: Iterable[int], max_tokens: int = 4, **more: Any) -> Any:
        """Queue a request."""
        request = make_request(request_id, list(tokens), max_tokens, **more)
        self.requests[request_id] = request
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """End a request as a disconnected client does."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> Any:
        """Schedule, compute, and process the oldest output."""
        output = self.scheduler.schedule()
        transfers = self._run_worker(output)
        if self.depth == 1:
            self._compute(output, model_runner.invalid_blocks(transfers))
        if not self.hold_loads:
            _end_transfers(self.worker)
        model_output = make_model_output(self.scheduler, output, transfers)
        self.in_flight.append((output, model_output))
        if len(self.in_flight) >= self.depth or not output.total_num_scheduled_tokens:
            outputs = self.scheduler.update_from_output(*self.in_flight.popleft())
            self.offered |= {
                one.request_id: one.kv_transfer_params
                for of_client in outputs.values()
                for one in of_client.outputs
                if one.kv_transfer_params
            }
        return output

    def run(self, limit: int = 50) -> None:
        """Step until every request has ended and the connector is idle."""
        for _ in range(limit):
            if not self.step().total_num_scheduled_tokens:
                time.sleep(0.01)  # gives way to the threads of a worker
            if not self.scheduler.has_unfinished_requests() and not self._is_busy():
                self.step()  # the last acknowledgement
                return
        raise AssertionError(f"requests or transfers are left after {limit} steps")

    def num_free_blocks(self) -> int:
        """Return the number of free blocks of the real pool."""
        return int(self.pool.get_num_free_blocks())

    def scribble(self) -> None:
        """Overwrite the whole KV cache: only a load can bring bytes back."""
        for tensor in self.kv_caches.values():
            tensor.fill_(-1.0)

    def _is_busy(self) -> bool:
        is_pending = getattr(self.scheduler.connector, "has_pending_push_work", None)
        children = getattr(self.scheduler.connector, "_connectors", None)
        if children is not None:
            return any(child.has_pending_push_work() for child in children)
        return bool(is_pending and is_pending())

    def _run_worker(self, output: Any) -> Any:
        """Make the calls of a model runner up to the forward pass, and return its report.

        A model runner reports after the pass; saves of the pass are reported a step later here.
        """
        if self.hold_loads:
            self._metadata.append(output.kv_connector_metadata)
            return None
        metadata = [*self._metadata, output.kv_connector_metadata]
        self._metadata.clear()
        for one in metadata:
            _bind_transfers(self.worker, output, one)
            self.worker.start_load_kv(None)
        return _take_transfers(self.worker, output)

    def _compute(self, output: Any, invalid: Collection[int]) -> None:
        """Check the blocks of earlier steps and loads, then write those of this step.

        Blocks reported invalid are not checked, because the scheduler computes them again.
        """
        manager = self.scheduler.kv_cache_manager
        starts = model_runner.computed_before(output)
        groups = self.kv_cache_config.kv_cache_groups
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            start = starts[request_id]
            self.hits.setdefault(request_id, start)
            tables = manager.get_block_ids(request_id)
            for index, (group, table) in enumerate(zip(groups, tables, strict=True)):
                first_read = self.geometry.groups[index].num_skipped_tokens(start) // BLOCK_SIZE
                for number in range(min(start + num_tokens, request.num_tokens) // BLOCK_SIZE):
                    page = _page(request.block_hashes[number], index)
                    block = table[number]
                    for layer in group.layer_names:
                        tensor = self.kv_caches[layer][block]
                        if (number + 1) * BLOCK_SIZE > start:
                            tensor.fill_(page)
                        elif number >= first_read and block not in invalid:
                            assert bool((tensor == page).all()), (
                                f"request {request_id}, group {index}, block {number}: wrong bytes"
                            )


def make_model_output(scheduler: Any, output: Any, transfers: Any = None) -> Any:
    """Sample one token, always the same, for each request past its prompt."""
    requests = {
        request_id: scheduler.requests[request_id] for request_id in output.num_scheduled_tokens
    }
    sampled = {
        request_id: [] if request.num_computed_tokens < request.num_tokens else [7]
        for request_id, request in requests.items()
    }
    return samples.make_model_output(output, sampled, transfers)


def _page(block_hash: bytes, group: int) -> float:
    digest = hashlib.sha256(bytes(block_hash) + bytes([group])).digest()
    return float(int.from_bytes(digest[:2], "big"))


def _groups(windows: Sequence[int | None]) -> list[CacheGroup]:
    return [
        FullAttention(BLOCK_SIZE) if window is None else SlidingWindow(BLOCK_SIZE, window)
        for window in windows
    ]


class _Backend:
    """The shape of the tensors, which OffloadingConnector reads up to 0.28."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *_: Any
    ) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, num_kv_heads * head_size)


def register_layers(vllm_config: Any, kv_cache_config: Any) -> None:
    """Add the layers of a KV cache to a configuration."""
    layers = [
        (_Backend, group.kv_cache_spec)
        for group in kv_cache_config.kv_cache_groups
        for _ in group.layer_names
    ]
    add_layers(vllm_config, CacheKind("", tuple(layers)))


_hashes_are_ready = False


def make_request(request_id: str, tokens: list[int], max_tokens: int, **more: Any) -> Any:
    """Make a `Request` with greedy sampling and vLLM's own hashes."""
    global _hashes_are_ready
    utils: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
    if not _hashes_are_ready:
        utils.init_none_hash(samples.hash_function())
        _hashes_are_ready = True
    hasher = utils.get_request_block_hasher(BLOCK_SIZE, samples.hash_function())
    return samples.make_request(request_id, tokens, max_tokens, block_hasher=hasher, **more)


FAULTY_CONNECTOR = f"{Path(__file__).with_name('faulty_connectors.py')}:BrokenConnector"
TOKENS = range(10, 10 + 6 * BLOCK_SIZE + 4)
OTHER_TOKENS = range(200, 200 + 6 * BLOCK_SIZE + 4)


def hooks_that_fail() -> dict[str, bool]:
    """Return the hooks that this release calls, and whether a fault in each ends the engine."""
    at_start = {
        *("__init__", *hooks_of(Connector), "SchedulerConnector.bind_gpu_block_pool_view"),
        *("SchedulerConnector.on_engine_ready", "WorkerConnector.register_kv_caches"),
    }
    hooks = {
        f"{half.__name__}.{name}"
        for half in (SchedulerConnector, WorkerConnector)
        for name in hooks_of(half)
    }
    release = installed().connector
    if release.worker_metadata:
        hooks.remove("WorkerConnector.wait")  # because loads end between steps
    if not release.connector_reset:
        hooks.remove("SchedulerConnector.reset_cache")
    ends = {*at_start, "WorkerConnector.wait"}
    return {hook: hook in ends for hook in sorted(at_start | hooks)}


def serve_with_fault(folder: Path, fails_in: str, policy: str = "recompute") -> Engine:
    """Serve requests, of which one is preempted, with a connector whose hook raises.

    Args:
        folder: Folder for the model's configuration.
        fails_in: Name of the hook.
        policy: ``kv_load_failure_policy``.
    """
    config = connector_config(FAULTY_CONNECTOR, cpu_blocks=64, fails_in=fails_in)
    if policy == "fail":
        config["kv_load_failure_policy"] = policy
    engine = Engine(folder, config, num_blocks=16)
    free = engine.num_free_blocks()
    requests = [engine.add("one", TOKENS, 64), engine.add("other", OTHER_TOKENS, 64)]
    engine.run(400)  # too many for the pool, so one is preempted
    for _ in range(3):
        if engine.scheduler.reset_prefix_cache():
            break
        engine.step()
    engine.scribble()
    if installed().connector.connector_reset and fails_in.endswith("reset_cache"):
        engine.scheduler.reset_prefix_cache(reset_connector=True)
    requests.append(engine.add("again", TOKENS))
    engine.run(400)
    engine.scheduler.connector.shutdown()
    engine.worker.shutdown()
    assert all(request.is_finished() for request in requests)
    assert engine.num_free_blocks() == free
    return engine


def _bind_transfers(worker: Any, output: Any, metadata: Any) -> None:
    """Make the calls that a model runner makes first in a step."""
    handle_preemptions(worker, output, metadata)
    worker.bind_connector_metadata(metadata)


def _end_transfers(worker: Any) -> None:
    """Make the calls that a model runner makes after the compute of a step."""
    worker.wait_for_save()
    worker.clear_connector_metadata()


def _take_transfers(worker: Any, output: Any) -> Any:
    """Make a worker's report, a ``KVConnectorOutput``.

    A model runner makes the report at the end of a step; :class:`Engine` needs it earlier.
    """
    values: dict[str, Any] = {}
    release = installed().connector
    if release.failed_requests:
        values.update(vars(worker.get_transfer_results(output.finished_req_ids)))
    else:
        sending, recving = worker.get_finished(output.finished_req_ids)
        values.update(finished_sending=sending, finished_recving=recving)
    if release.failed_blocks:
        values["invalid_block_ids"] = worker.get_block_ids_with_load_errors()
    values["kv_connector_stats"] = worker.get_kv_connector_stats()
    if release.worker_metadata:
        values["kv_connector_worker_meta"] = worker.build_connector_worker_meta()
    kind = vllm("v1.outputs").KVConnectorOutput
    return samples.make_filled(kind, **known_arguments(kind, values))
