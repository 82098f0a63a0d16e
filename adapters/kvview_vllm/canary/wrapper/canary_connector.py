"""``CanaryConnector``: any connector of vLLM, observed while it serves.

- CANARY-7 The wrapped connector **must** receive every call of vLLM, with its own configuration and
  metadata, and vLLM **must** receive its results unchanged, except that ``recompute`` adds blocks
  whose KV is wrong to those that were not loaded.

Source: ``KVConnectorBase_V1``, vllm/distributed/kv_transfer/kv_connector/v1/base.py.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import cache
from typing import Any

from kvview import ConfigError, KVViewError
from kvview_vllm.binding import BlockPoolViewMixin
from kvview_vllm.canary.blocks.sampling import Sampler
from kvview_vllm.canary.blocks.worker_side import CanaryWorker
from kvview_vllm.canary.call_laws import CallLaws
from kvview_vllm.canary.incidents import HookRecorder, Incidents, NoRecorder
from kvview_vllm.canary.watched_pool import watched_manager, watched_pool
from kvview_vllm.canary.wrapper.canary_messages import CanaryMetadata
from kvview_vllm.canary.wrapper.canary_metrics import CanaryPromMetrics, CanaryStats, stats_from
from kvview_vllm.canary.wrapper.canary_options import (
    CanaryOptions,
    canary_options,
    wrapped_class,
    wrapped_config,
)
from kvview_vllm.canary.wrapper.delegation import DelegatingConnector
from kvview_vllm.geometry import read_geometry
from kvview_vllm.recorder import Recorder
from kvview_vllm.releases import installed, reading, require_concrete
from kvview_vllm.releases.compat import calls

with reading("connector", "the interface of connectors"):
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    SupportsHMA: Any = base.SupportsHMA if installed().connector.several_groups else object

_logger = logging.getLogger(__name__)


class CanaryOneGroupConnector(DelegatingConnector):
    """The canary around a connector of one KV-cache group; vLLM then makes one group.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        role: Scheduler or worker.
        kv_cache_config: vLLM's ``KVCacheConfig``; None in 0.11.0.

    Raises:
        ConfigError: The entry ``canary`` is missing or wrong.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        self._release = release = installed().connector
        config = [kv_cache_config] if release.cache_config_argument else []
        super().__init__(vllm_config, role, *config)
        options = canary_options(vllm_config.kv_transfer_config)
        self._options = options
        self._recorder = _recorder(options)
        self._num_groups = len(kv_cache_config.kv_cache_groups) if kv_cache_config else 1
        self._check(options)
        own = wrapped_config(vllm_config)
        kind = wrapped_class(own.kv_transfer_config)
        takes_config = calls.takes_cache_config(kind)
        self._child = kind(own, role, *(config if takes_config else []))
        self._connectors = [self._child]  # by which a scheduler of kvview finds it
        self._pool: Any = None
        self._sampler: Sampler | None = None
        self._worker: CanaryWorker | None = None
        is_scheduler = role is KVConnectorRole.SCHEDULER
        rank = vllm_config.parallel_config.rank
        half = "scheduler" if is_scheduler else f"rank {rank}"
        self._incidents = Incidents(options.connector, half, options.incidents, self._recorder)
        self._laws = CallLaws(self._incidents.report)
        self._sent = {"canary_incidents": 0}
        self._recorder.note("__init__", (vllm_config, role, kv_cache_config), {}, None)
        try:
            geometry = read_geometry(vllm_config, kv_cache_config)
        except KVViewError as error:
            _logger.warning("canary: no digests, because %s", error)
            return
        if is_scheduler:
            speculative = vllm_config.speculative_config
            num_drafts = speculative.num_speculative_tokens if speculative is not None else 0
            self._sampler = Sampler(geometry, options.sample, num_drafts or 0)
        else:
            identity = _identity(vllm_config, geometry)
            self._worker = CanaryWorker(options, kv_cache_config, rank, identity, self._incidents)

    def _check(self, options: CanaryOptions) -> None:
        """Refuse a reaction that the release does not have."""
        release = self._release
        has_reports = release.failed_requests if self._num_groups > 1 else release.failed_blocks
        if options.on_difference == "recompute" and not has_reports:
            raise ConfigError(
                f"canary: this vLLM does not accept reports of failed loads with "
                f'{self._num_groups} KV-cache groups, which "recompute" needs; use "log" or "stop"'
            )

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        result = super()._call(name, *args, **kwargs)
        self._recorder.note(name, args, kwargs, result)
        return result

    # --- scheduler ---

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        """Note the promise."""
        answer = self._call("get_num_new_matched_tokens", request, num_computed_tokens)
        self._laws.on_promise(request, num_computed_tokens, answer)
        if self._sampler is not None:
            self._sampler.on_query(request, num_computed_tokens, answer)
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks."""
        self._call("update_state_after_alloc", request, blocks, num_external_tokens)
        self._laws.on_allocated(request.request_id, num_external_tokens)
        if self._sampler is not None:
            self._sampler.on_allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> CanaryMetadata:
        """Wrap the metadata."""
        wrapped = self._call("build_connector_meta", scheduler_output)
        self._laws.on_step(self._options.late_seconds)
        work = None if self._sampler is None else self._sampler.on_step(scheduler_output)
        return CanaryMetadata(wrapped, work)

    def update_connector_output(self, connector_output: Any) -> None:
        """Note the ends of loads."""
        received = connector_output.finished_recving or ()
        self._laws.on_output(received, connector_output.finished_sending or ())
        stats = connector_output.kv_connector_stats
        if isinstance(stats, CanaryStats):
            connector_output.kv_connector_stats = stats.wrapped
        try:
            self._call("update_connector_output", connector_output)
        finally:
            if isinstance(stats, CanaryStats):
                stats.wrapped = connector_output.kv_connector_stats
                connector_output.kv_connector_stats = stats
        if self._sampler is not None:
            self._sampler.on_received(received)

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        """Forget the request."""
        return self._finish("request_finished", request, block_ids)

    def _finish(self, name: str, request: Any, block_ids: Any) -> Any:
        answer = self._call(name, request, block_ids)
        self._laws.on_finished(
            request.request_id, keeps_blocks=bool(answer[0]), keeps_load=aborted_loads_keep_blocks()
        )
        if self._sampler is not None:
            self._sampler.on_finished(request.request_id)
        return answer

    def reset_cache(self) -> Any:
        """Note a reset (0.13.0)."""
        answer = self._call("reset_cache")
        pool = self._pool
        # vLLM resets connectors even if it refuses to reset the pool, because blocks are in use.
        # Requests may then hit old blocks on the GPU, and a connector may store these again.
        is_empty = pool is not None and pool.num_gpu_blocks - pool.get_num_free_blocks() <= 1
        if is_empty and self._sampler is not None:
            self._sampler.on_reset()
        return answer

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Note the pool (0.19.0)."""
        self._pool = gpu_block_pool
        self._call("bind_gpu_block_pool", self._watched(gpu_block_pool))

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Note the pool (0.30.0)."""
        self._pool = kv_cache_manager.block_pool
        pool = self._watched(self._pool)
        is_same = pool is self._pool
        manager = kv_cache_manager if is_same else watched_manager(kv_cache_manager, pool)
        self._call("bind_kv_cache_manager", manager)

    def _watched(self, pool: Any) -> Any:
        is_guarded = isinstance(self._child, BlockPoolViewMixin)
        return pool if is_guarded else watched_pool(pool, self._laws)

    # --- worker ---

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Note the tensors."""
        self._register(kv_caches)
        self._call("register_kv_caches", kv_caches)

    def register_cross_layers_kv_cache(self, kv_cache: Any, *args: Any, **kwargs: Any) -> None:
        """Note the one tensor of all layers (0.12 to 0.28)."""
        self._register({"all layers": kv_cache})
        self._call("register_cross_layers_kv_cache", kv_cache, *args, **kwargs)

    def _register(self, kv_caches: Any) -> None:
        if self._worker is not None:
            self._worker.register(kv_caches)
            if self._worker.is_off:
                _logger.warning("canary: no digests, because %s", self._worker.is_off)

    def bind_connector_metadata(self, connector_metadata: CanaryMetadata) -> None:
        """Receive the work of the step."""
        if self._worker is not None:
            self._worker.begin(connector_metadata.work)
        self._call("bind_connector_metadata", connector_metadata)

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        """Digest the blocks of the step."""
        if self._worker is None:
            return self._call("get_finished", finished_req_ids)
        self._worker.on_computed()
        sent, received = self._call("get_finished", finished_req_ids)
        self._worker.on_loaded(received or ())
        return sent, received

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Digest the blocks of the step (0.30.0)."""
        if self._worker is None:
            return self._call("get_transfer_results", finished_req_ids)
        self._worker.on_computed()
        results = self._call("get_transfer_results", finished_req_ids)
        self._worker.on_loaded(results.finished_recving, results.failed_recving)
        if self._num_groups > 1:
            results.failed_recving |= self._worker.take_wrong_requests()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Add the blocks of wrong loads (0.11.1)."""
        failed: set[int] = self._call("get_block_ids_with_load_errors")
        if self._worker is None:
            return failed
        self._worker.on_failed_blocks(failed)
        wrong = self._worker.take_wrong_blocks()
        return failed | wrong if self._num_groups == 1 else failed

    # --- metrics ---

    def get_kv_connector_stats(self) -> CanaryStats | None:
        """Add the canary's counters to the stats of the wrapped connector."""
        counts = {"canary_incidents": self._incidents.num_reported}
        if self._worker is not None:
            self._worker.settle()
            counts |= self._worker.counts()
        wrapped = self._call("get_kv_connector_stats")
        if wrapped is None and counts == self._sent:
            return None
        before, self._sent = self._sent, counts
        new = {name: number - before.get(name, 0) for name, number in counts.items()}
        return CanaryStats((self._options.connector, self._options.module_path), new, wrapped)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> CanaryStats:
        """Make stats from the data that the front end has received."""
        return stats_from(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> CanaryPromMetrics:
        """Return the metrics of the canary and of the wrapped connector (0.11.1)."""
        own = wrapped_config(vllm_config)
        kind: Any = wrapped_class(own.kv_transfer_config)
        given = metric_types, labelnames, per_engine_labelvalues
        wrapped = kind.build_prom_metrics(own, *given)
        return CanaryPromMetrics(own.kv_transfer_config.kv_connector, wrapped, *given)

    # --- both ---

    def shutdown(self) -> None:
        """Compare the last digests."""
        if self._worker is not None:
            self._worker.settle(wait=True)
        self._call("shutdown")


class CanaryConnector(CanaryOneGroupConnector, SupportsHMA):  # type: ignore[misc]
    """The canary around a connector of any number of KV-cache groups."""

    def _check(self, options: CanaryOptions) -> None:
        super()._check(options)
        kind = wrapped_class(wrapped_config(self._vllm_config).kv_transfer_config)
        if self._num_groups > 1 and not issubclass(kind, SupportsHMA):
            raise ConfigError(
                f"canary: {options.connector} takes one KV-cache group and this model has "
                f"{self._num_groups}; use kv_connector CanaryOneGroupConnector"
            )

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        """Forget the request."""
        if not isinstance(self._child, SupportsHMA):
            return self.request_finished(request, block_ids[0])
        return self._finish("request_finished_all_groups", request, block_ids)


@cache
def aborted_loads_keep_blocks() -> bool:
    """Whether vLLM waits for the load of an aborted request (0.16.0)."""
    return calls.aborted_loads_keep_blocks()


def _recorder(options: CanaryOptions) -> HookRecorder:
    """Return a recorder of calls, or one that records nothing."""
    if options.recorder_bytes is None:
        return NoRecorder()
    if options.incidents is None:
        raise ConfigError("canary: recorder_bytes needs a folder; add incidents")
    return Recorder(options.recorder_bytes, options.incidents)


def _identity(vllm_config: Any, geometry: Any) -> str:
    """Return a text that identifies the model and the layout of its KV."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    parts = (
        model.model,
        model.dtype,
        vllm_config.cache_config.cache_dtype,
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        [(type(group).__name__, group.block_size) for group in geometry.groups],
    )
    return " ".join(str(part).replace("\n", " ") for part in parts)


require_concrete("connector", CanaryConnector)

for _name in ("CanaryConnector", "CanaryOneGroupConnector"):
    with suppress(ValueError):  # it is registered already
        # vLLM's MultiConnector looks the stats of its children up by name, in the front end.
        KVConnectorFactory.register_connector(_name, __name__, _name)
