"""``CanaryConnector``: any connector of vLLM, observed while it serves.

- CANARY-7 The wrapped connector **must** receive every call of vLLM, with its own configuration and
  metadata, and vLLM **must** receive its results unchanged, except that ``recompute`` adds blocks
  whose KV is wrong to those that were not loaded, and removes later promises to their requests.

An exception of the canary itself never reaches the server: it is logged, and the part that raised
it is off.

Source: ``KVConnectorBase_V1``, vllm/distributed/kv_transfer/kv_connector/v1/base.py.
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter, defaultdict
from contextlib import suppress
from types import MethodType
from typing import Any

from kvview import ConfigError, ConnectorError, KVViewError
from kvview.errors import line_of
from kvview_vllm.binding import BlockPoolViewMixin
from kvview_vllm.canary.blocks.sampling import Sampler
from kvview_vllm.canary.blocks.worker_side import CanaryWorker
from kvview_vllm.canary.call_laws import CallLaws
from kvview_vllm.canary.incidents import IncidentFolder, Incidents
from kvview_vllm.canary.watched_pool import watched_manager, watched_pool
from kvview_vllm.canary.wrapper.canary_messages import CanaryMetadata
from kvview_vllm.canary.wrapper.canary_metrics import CanaryPromMetrics, CanaryStats, stats_from
from kvview_vllm.canary.wrapper.canary_options import (
    canary_options,
    wrapped_class,
    wrapped_config,
)
from kvview_vllm.canary.wrapper.delegation import DelegatingConnector
from kvview_vllm.geometry import read_geometry
from kvview_vllm.recorder import Recorder, on_signal
from kvview_vllm.releases import installed, reading, require_concrete
from kvview_vllm.releases.compat import calls

with reading("connector", "the interface of connectors"):
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    SupportsHMA: Any = base.SupportsHMA if installed().connector.several_groups else object

_logger = logging.getLogger(__name__)


def _has_siblings() -> bool:
    """Whether a ``MultiConnector`` constructs the caller; vLLM does not tell its children."""
    return any(one.filename.endswith("/multi_connector.py") for one in traceback.extract_stack())


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
        config = [kv_cache_config] if installed().connector.cache_config_argument else []
        super().__init__(vllm_config, role, *config)
        self._options = options = canary_options(vllm_config.kv_transfer_config)
        self._num_groups = len(kv_cache_config.kv_cache_groups) if kv_cache_config else 1
        own = wrapped_config(vllm_config)
        kind = wrapped_class(own.kv_transfer_config)
        self._check(kind)
        self._child = kind(own, role, *(config if calls.takes_cache_config(kind) else []))
        self._connectors = [self._child]  # by which a scheduler of kvview finds it
        self._pool: Any = None
        self._wrong_requests: set[str] = set()  # vLLM is to compute them, with "recompute"
        self._counts: Counter[str] = Counter()
        is_scheduler = role is KVConnectorRole.SCHEDULER
        half = "scheduler" if is_scheduler else f"rank{vllm_config.parallel_config.rank}"
        self._folder = IncidentFolder(options.incidents, half)
        self._incidents = Incidents(options.connector, half, self._folder, self._counts)
        aborts_wait = calls.aborted_loads_keep_blocks()
        self._laws = CallLaws(self._report_call, aborts_wait, _has_siblings())
        self._recorder: Recorder | None = None
        self._sampler: Sampler | None = None
        self._worker: CanaryWorker | None = None
        self._listeners: defaultdict[str, list[MethodType]] = defaultdict(list)
        if is_scheduler:
            if options.incidents is not None:
                self._recorder = Recorder(own, kv_cache_config)
                on_signal(lambda: self._write_calls(""))
                self._listen(self._recorder)  # first, so that the file of an incident has the call
            self._listen(self._laws)
        try:
            geometry = read_geometry(vllm_config, kv_cache_config)
        except KVViewError as error:
            _logger.warning("canary: no digests, because %s", error)
            return
        if is_scheduler:
            self._sampler = Sampler(geometry, options.sample)
            self._listen(self._sampler)
        else:
            self._worker = CanaryWorker(
                options.on_difference, kv_cache_config, self._incidents, self._counts
            )
            self._listen(self._worker)

    def _check(self, kind: type) -> None:
        """Refuse a reaction that the release does not have, and groups that the class refuses."""
        release = installed().connector
        has_reports = release.failed_requests if self._num_groups > 1 else release.failed_blocks
        if self._options.on_difference == "recompute" and not has_reports:
            raise ConfigError(
                f"canary: this vLLM does not accept reports of failed loads with "
                f'{self._num_groups} KV-cache groups, which "recompute" needs; use "log" or "stop"'
            )
        if self._num_groups > 1 and not issubclass(kind, SupportsHMA):
            raise ConfigError(
                f"canary: {self._options.connector} takes one KV-cache group and this model has "
                f"{self._num_groups}; use kv_connector CanaryOneGroupConnector"
            )

    def _listen(self, part: Any) -> None:
        """Let a part of the canary receive the hooks that it has."""
        for hook in vars(type(part)):
            if hook.startswith("on_"):
                self._listeners[hook].append(getattr(part, hook))

    def _notify(self, hook: str, *args: Any) -> None:
        """Call the parts of the canary that have this hook."""
        for method in self._listeners[hook]:
            try:
                method(*args)
            except ConnectorError:  # a wrong block with "stop", or a failed self-test
                raise
            except Exception as error:
                part = method.__self__
                for name, methods in self._listeners.items():
                    self._listeners[name] = [one for one in methods if one.__self__ is not part]
                name = type(part).__name__
                _logger.warning("canary: %s is off, because %s", name, line_of(error))

    def _report_call(self, law: str, message: str) -> None:
        self._incidents.report(law, message)
        self._write_calls(law)

    def _write_calls(self, law: str) -> None:
        if self._recorder is not None:
            self._folder.write("recorded", self._recorder.export(law))

    # --- scheduler ---

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        """Note the promise."""
        answer = self._child.get_num_new_matched_tokens(request, num_computed_tokens)
        if request.request_id in self._wrong_requests:
            answer = 0, False  # otherwise vLLM would load the same wrong blocks forever
        self._notify("on_promise", request, num_computed_tokens, answer)
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks."""
        self._child.update_state_after_alloc(request, blocks, num_external_tokens)
        self._wrong_requests.discard(request.request_id)
        self._notify("on_allocated", request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> CanaryMetadata:
        """Wrap the metadata."""
        wrapped = self._child.build_connector_meta(scheduler_output)
        self._notify("on_step", scheduler_output)
        return CanaryMetadata(wrapped, self._sampler.take_work() if self._sampler else None)

    def update_connector_output(self, connector_output: Any) -> None:
        """Note the reports and the incidents of the workers."""
        self._notify("on_output", connector_output)
        stats = own = connector_output.kv_connector_stats
        is_own = isinstance(stats, CanaryStats)
        if stats is not None and not is_own:
            own = stats.data.get(type(self).__name__)  # of a MultiConnector around the canary
        if isinstance(own, CanaryStats) and own.incidents:
            self._write_calls(own.incidents[0][0])
            if self._options.on_difference == "recompute":
                self._wrong_requests.update(name for _, name in own.incidents)
        if is_own:
            connector_output.kv_connector_stats = stats.wrapped
        self._child.update_connector_output(connector_output)
        if is_own:
            stats.wrapped = connector_output.kv_connector_stats
            connector_output.kv_connector_stats = stats

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        """Forget the request."""
        answer = self._child.request_finished(request, block_ids)
        self._wrong_requests.discard(request.request_id)
        self._notify("on_finished", request, answer)
        return answer

    def reset_cache(self) -> Any:
        """Note a reset (0.13.0)."""
        answer = self._child.reset_cache()
        self._notify("on_reset")
        # vLLM resets connectors even if it refuses to reset the pool, because blocks are in use.
        # Requests may then hit old blocks on the GPU, and a connector may store these again.
        pool = self._pool
        if pool is not None and pool.num_gpu_blocks - pool.get_num_free_blocks() <= 1:
            self._notify("on_empty_reset")
        return answer

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Note the pool (0.19.0)."""
        self._pool = gpu_block_pool
        self._child.bind_gpu_block_pool(self._watched(gpu_block_pool))

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Note the pool (0.30.0)."""
        self._pool = kv_cache_manager.block_pool
        pool = self._watched(self._pool)
        is_same = pool is self._pool
        manager = kv_cache_manager if is_same else watched_manager(kv_cache_manager, pool)
        self._child.bind_kv_cache_manager(manager)

    def _watched(self, pool: Any) -> Any:
        is_guarded = isinstance(self._child, BlockPoolViewMixin)
        return pool if is_guarded else watched_pool(pool, self._laws)

    # --- worker ---

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Note the tensors."""
        self._notify("on_registered", kv_caches)
        self._child.register_kv_caches(kv_caches)

    def register_cross_layers_kv_cache(self, kv_cache: Any, *args: Any, **kwargs: Any) -> None:
        """Note the one tensor of all layers (0.12 to 0.28)."""
        self._notify("on_registered", {"all layers": kv_cache})
        self._child.register_cross_layers_kv_cache(kv_cache, *args, **kwargs)

    def bind_connector_metadata(self, connector_metadata: CanaryMetadata) -> None:
        """Receive the work of the step."""
        self._notify("on_bound", connector_metadata.work)
        self._child.bind_connector_metadata(connector_metadata.wrapped)

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        """Digest the blocks of the step."""
        self._notify("on_computed")
        sent, received = self._child.get_finished(finished_req_ids)
        self._notify("on_loaded", received or ())
        return sent, received

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Digest the blocks of the step (0.30.0)."""
        self._notify("on_computed")
        results = self._child.get_transfer_results(finished_req_ids)
        self._notify("on_loaded", results.finished_recving, results.failed_recving)
        if self._worker is not None and self._num_groups > 1:
            self._notify("on_step_end")
            results.failed_recving |= self._worker.wrong_requests
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Add the blocks of wrong loads (0.11.1)."""
        failed: set[int] = self._child.get_block_ids_with_load_errors()
        if self._worker is None:
            return failed
        self._notify("on_failed_blocks", failed)
        self._notify("on_step_end")
        wrong = self._worker.take_wrong_blocks()
        return failed | wrong if self._num_groups == 1 else failed

    # --- metrics ---

    def get_kv_connector_stats(self) -> CanaryStats | None:
        """Add the canary's counters to the stats of the wrapped connector."""
        wrapped = self._child.get_kv_connector_stats()
        if wrapped is None and not self._counts:
            return None
        counts = dict(self._counts)
        self._counts.clear()
        name = self._options.connector, self._options.module_path
        return CanaryStats(name, counts, wrapped, self._incidents.take())

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
        self._child.shutdown()


class CanaryConnector(CanaryOneGroupConnector, SupportsHMA):  # type: ignore[misc]
    """The canary around a connector of any number of KV-cache groups."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        """Forget the request."""
        if not isinstance(self._child, SupportsHMA):
            return self.request_finished(request, block_ids[0])
        answer = self._child.request_finished_all_groups(request, block_ids)
        self._wrong_requests.discard(request.request_id)
        self._notify("on_finished", request, answer)
        return answer


require_concrete("connector", CanaryConnector)

for _name in ("CanaryConnector", "CanaryOneGroupConnector"):
    with suppress(ValueError):  # it is registered already
        # vLLM's MultiConnector looks the stats of its children up by name, in the front end.
        KVConnectorFactory.register_connector(_name, __name__, _name)
