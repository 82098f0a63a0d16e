"""``KVViewConnector``: runs an engine-neutral kvview connector inside vLLM.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVViewConnector",
      "kv_connector_module_path": "kvview_vllm.connector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"connector": "my_connector.py:MyConnector",
                                    "options": {}}}'

- LOAD-1 Loads are asynchronous from 0.18.0 on, because these releases let several KV-cache groups
  load asynchronously and let an aborted request keep its blocks until its load has ended (0.16.0).
  In older releases, a step waits for its loads.
- LOAD-2 vLLM's setting ``kv_load_failure_policy`` decides the outcome of a request whose load
  failed; ``recompute`` computes the prefix instead.

Source: ``KVConnectorBase_V1``, vllm/distributed/kv_transfer/kv_connector/v1/base.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import reduce
from typing import Any, ClassVar, Literal
from weakref import WeakSet

from pydantic import BaseModel, ConfigDict, Field

from kvview import (
    BlockIds,
    ConfigError,
    ConnectorConfig,
    FinishReason,
    GPUBlockPoolView,
    KVViewError,
    Leak,
    SchedulerConnector,
)
from kvview.connector.hook_errors import build_connector, watch_hooks
from kvview.handoff import HandoffScheduler, HandoffWorker
from kvview.options import parse_options
from kvview.targets import load_connector
from kvview.version import require_contract
from kvview_vllm.binding import BlockPoolViewMixin
from kvview_vllm.connector.containment import Faults, report_at_start
from kvview_vllm.connector.dry_run.trial_half import TRIAL_TARGET
from kvview_vllm.connector.dry_run.trial_run import try_connector
from kvview_vllm.connector.handoffs import (
    HandoffOptions,
    WorkerWire,
    require_handoffs,
    split_of,
)
from kvview_vllm.connector.messages import (
    JobReport,
    KVViewMetadata,
    KVViewStats,
    KVViewWorkerMetadata,
    stats_of,
    take_reports,
)
from kvview_vllm.connector.scheduler import SchedulerSide
from kvview_vllm.connector.worker import WorkerSide
from kvview_vllm.events import BlockDescriptions, to_vllm_events
from kvview_vllm.geometry import read_facts, read_geometry
from kvview_vllm.metrics.connector_metrics import PromMetrics, Reporter
from kvview_vllm.releases import installed, reading, require_concrete
from kvview_vllm.releases.compat.calls import (
    event_group_kinds,
    publishes_events,
    recomputes_failed_loads,
    uncache_blocks,
    unfinished_statuses,
)

# This runs at import, because Python would refuse an instance of a class that lacks an abstract
# method before any probe could run.
with reading("connector", "the interface of connectors"):
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorRole,
    )
    from vllm.v1.request import RequestStatus

    SupportsHMA: Any = base.SupportsHMA if installed().connector.several_groups else object

_logger = logging.getLogger(__name__)
_NOT_FINISHED_WELL = unfinished_statuses()
_LOSES_REQUESTS = (
    "kvview: connector %s: a request whose load fails ends without an answer, as "
    'kv_load_failure_policy is "fail" (vLLM\'s default since 0.17). Add "kv_load_failure_policy": '
    '"recompute" next to "kv_connector" in --kv-transfer-config, for MultiConnector in both'
)


class KVViewOptions(BaseModel):
    """The keys of ``kv_connector_extra_config``.

    Args:
        connector: Target of the connector, ``file.py:Class`` or ``pkg.mod:Class``.
        options: Options of the connector.
        pin_budget: Largest share of the pool's blocks that the connector may hold, 0 to 1.
        trace_holds: Whether leak reports name the line that took each hold (slow).
        leak_report_seconds: Age at which a hold or a job is logged; None for never.
        events: "self_describing", or "location_only", which omits tokens, parent, LoRA and extra
            keys, for routers that know each block from events of the GPU.
        contain_faults: Whether exceptions of hooks are reported and contained (FAULT-1, FAULT-2);
            if not, they propagate unchanged, for a debugger or the kit.
        handoffs: Wire and address of a connector that hands KV to other engines.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    connector: str
    options: dict[str, Any] = Field(default_factory=dict)
    pin_budget: float | None = Field(default=None, gt=0, le=1)
    trace_holds: bool = False
    leak_report_seconds: float | None = Field(default=60.0, gt=0)
    events: Literal["self_describing", "location_only"] = "self_describing"
    contain_faults: bool = True
    handoffs: HandoffOptions | None = None


class KVViewConnector(BlockPoolViewMixin, KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The half of a kvview connector for one role.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        role: Scheduler or worker.
        kv_cache_config: vLLM's ``KVCacheConfig``; None in 0.11.0.

    Raises:
        ConfigError: ``kv_connector_extra_config`` has an unknown key or no
            ``connector``, or the connector refuses its options.
        UnsupportedContractError: The connector was written for another contract.
        UnsupportedEngineError: The interface has an unknown shape, or the engine's
            geometry cannot be expressed.
    """

    _built: ClassVar[WeakSet[KVViewConnector]] = WeakSet()

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        self._release = release = installed().connector
        config = [kv_cache_config] if release.cache_config_argument else []
        super().__init__(vllm_config, role, *config)
        self._kvview_config = vllm_config, kv_cache_config
        self._scheduler_side: SchedulerSide | None = None
        self._worker_side: WorkerSide | None = None
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        try:
            self._build(extra, role)
        except KVViewError as error:
            target = str(extra.get("connector", "without a target"))
            if target != TRIAL_TARGET:
                report_at_start(target, error)
            raise
        self._built.add(self)

    def _build(self, extra: Mapping[str, Any], role: Any) -> None:
        vllm_config, kv_cache_config = self._kvview_config
        try:
            options = parse_options(KVViewOptions, extra)
        except ConfigError as error:
            raise ConfigError(f"kv_connector_extra_config: {error}") from None
        self.pin_budget, self.trace_holds = options.pin_budget, options.trace_holds
        self.leak_report_seconds = options.leak_report_seconds
        self.view_owner = target = options.connector
        if role is KVConnectorRole.SCHEDULER and target != TRIAL_TARGET:
            try_connector(KVViewConnector)
        with reading("geometry", "the configuration of the KV cache"):
            self._geometry = read_geometry(vllm_config, kv_cache_config)
        kind = load_connector(target)
        require_contract(kind.contract_version, target)
        try:
            connector = build_connector(kind, ConnectorConfig(self._geometry, options.options))
        except ConfigError as error:
            raise ConfigError(f"options of connector {target}: {error}") from None
        if options.contain_faults:
            watch_hooks(connector)
        recomputes = recomputes_failed_loads(vllm_config.kv_transfer_config)
        resumes = options.contain_faults and recomputes
        parallel = vllm_config.parallel_config
        engine_id = vllm_config.kv_transfer_config.engine_id
        num_groups = len(self._geometry.groups)
        required = options.handoffs, num_groups, self._release
        if role is KVConnectorRole.SCHEDULER:
            half = connector.make_scheduler()
            handoffs = require_handoffs(half, target, *required)
            self.needs_block_pool_view = (
                type(half).bind_gpu_block_pool_view
                is not SchedulerConnector.bind_gpu_block_pool_view
            )
            self._scheduler_side = SchedulerSide(
                half,
                self._geometry,
                parallel.world_size,
                release=self._release,
                preempted_status=RequestStatus.PREEMPTED,
                faults=Faults(target, "scheduler", resumes=resumes),
                descriptions=BlockDescriptions(self._geometry, num_blocks=0)
                if options.events == "self_describing" and publishes_events(vllm_config)
                else None,
            )
            if handoffs is not None and isinstance(half, HandoffScheduler):
                me = handoffs.peer(engine_id, self._scheduler.owner, split_of(parallel))
                half.bind_peer(me, handoffs.lease_seconds)
            self._group_kinds = event_group_kinds(kv_cache_config)
            self._reporter = Reporter(self._scheduler_side.owner, target)
            if not recomputes:
                _logger.warning(_LOSES_REQUESTS, target)
        else:
            worker = connector.make_worker()
            handoffs = require_handoffs(worker, target, *required)
            wire = None
            if handoffs is not None and isinstance(worker, HandoffWorker):
                wire = WorkerWire(worker, handoffs, engine_id, parallel)
            self._worker_side = WorkerSide(
                worker,
                kv_cache_config,
                parallel.rank,
                self._release,
                Faults(target, "worker", resumes=resumes),
                wire,
            )

    @property
    def _scheduler(self) -> SchedulerSide:
        assert self._scheduler_side is not None, "a method of the scheduler's side"
        return self._scheduler_side

    def _describe_hold(self, leak: Leak) -> Leak:
        if leak.job is not None:
            return leak
        jobs = self._scheduler.jobs_of(leak.block_ids)
        return replace(leak, job=f"{jobs} in flight" if jobs else "none in flight")

    def _late_work(self, seconds: float) -> list[str]:
        return [
            f"job {job.job_id} of {self.view_owner} (request {job.request_id!r}) has not ended "
            f"for {age:.1f} s"
            for job, age in self._scheduler.late_jobs(seconds)
        ]

    @property
    def _worker(self) -> WorkerSide:
        assert self._worker_side is not None, "a method of the worker's side"
        return self._worker_side

    # --- scheduler ---

    def bind_gpu_block_pool_view(self, view: GPUBlockPoolView) -> None:
        """Pass the view, and then the engine's facts, to the connector."""
        vllm_config, kv_cache_config = self._kvview_config
        num_gpu_blocks = self._bound_pool.num_gpu_blocks
        with reading("geometry", "the facts of the engine"):
            facts = read_facts(vllm_config, kv_cache_config, self._geometry, num_gpu_blocks)
        self._scheduler.bind(self.block_pool_view)
        self._scheduler.on_engine_ready(facts)

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False, because a lost store only costs a hit (0.27.0)."""
        return False

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the number of further tokens that the connector can load."""
        num_tokens = self._scheduler.match(request, num_computed_tokens)
        return num_tokens, bool(num_tokens) and self._scheduler.asynchronous

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Pass the blocks that a load fills to the connector."""
        self._scheduler.on_allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVViewMetadata:
        """Let the connector plan the step."""
        return self._scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Receive the results of jobs."""
        if self._release.failed_blocks and connector_output.invalid_block_ids:
            unfilled = self._scheduler.forget_computed(connector_output.invalid_block_ids)
            if unfilled and self._bound_pool is not None:
                uncache_blocks(self._bound_pool, unfilled)
        # Reports of sibling connectors have another owner.
        from_stats = not self._release.worker_metadata
        owner = self._scheduler.owner
        if reports := take_reports(connector_output, owner, from_stats=from_stats):
            self._scheduler.on_reports(reports)
        stats = connector_output.kv_connector_stats
        if isinstance(stats, KVViewStats) and (new := self._news()) is not None:
            stats.aggregate(new)  # 0.11.0 takes no stats from this side

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, Any]:
        """Handle the end of a request with one group (0.11.0, or without ``SupportsHMA``)."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: BlockIds) -> tuple[bool, Any]:
        """Notify the connector, which holds the blocks that it still needs.

        Returns:
            False, because vLLM may free the blocks; and the parameters of a handoff, for the
            router.
        """
        aborted = request.status in _NOT_FINISHED_WELL
        reason = FinishReason.ABORTED if aborted else FinishReason.FINISHED
        return False, self._scheduler.on_finished(request, block_ids, reason)

    def take_events(self) -> Iterable[Any]:
        """Return the connector's events as vLLM's events."""
        events, descriptions = self._scheduler.take_events(), self._scheduler.descriptions
        if not events:
            return ()
        return list(
            to_vllm_events(
                events, self._geometry, descriptions=descriptions, group_kinds=self._group_kinds
            )
        )

    def has_pending_push_work(self) -> bool:
        """Return whether the engine must keep stepping because jobs are in flight (0.24.0)."""
        return self._scheduler.has_pending_work()

    def reset_cache(self) -> bool:
        """Drop every offloaded block (0.13.0)."""
        return self._scheduler.reset_cache()

    # --- worker ---

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Pass the KV-cache tensors to the connector, as pages."""
        self._worker.register(kv_caches)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Return True, because no job touches the KV cache while it is unmapped (0.33.0)."""
        return True

    def unregister_kv_caches(self) -> None:
        """Wait for the jobs in flight, because the memory of the KV cache is unmapped next."""
        self._worker.wait_for_all()

    def restore_kv_caches(self) -> None:
        """Do nothing, because the memory has the same address after a sleep."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the plan of this step, before its forward pass or (since 0.29) after its launch."""
        self._worker.start(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing, because loads end before the step or between steps."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing, because stores read blocks whose compute was launched before (XFER-6)."""

    def wait_for_save(self) -> None:
        """Do nothing, because source blocks are held until their store is reported (CONN-6)."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose loads have ended."""
        self._worker.poll()
        return None, self._worker.take_loaded() or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return the requests whose loads have ended or failed (0.30.0 and later)."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= self._worker.take_failed_requests()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that were not loaded (0.11.1)."""
        return self._worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> KVViewWorkerMetadata | None:
        """Report jobs to the scheduler's side (0.18.0)."""
        reports = self._worker.reports()
        return KVViewWorkerMetadata(reports) if reports else None

    # --- both ---

    def get_kv_connector_stats(self) -> KVViewStats | None:
        """Return metrics for operators, and up to 0.17 the reports of jobs.

        The stats include the stats of sibling connectors, because ``MultiConnector`` has one entry
        for all children of a class, and only the result of the last child arrives.
        """
        if self._worker_side is None:
            if self._release.asked_for_stats and not self._scheduler.is_stats_due():
                return None
            news = [new for each in self._siblings() if (new := each._news()) is not None]
            return reduce(KVViewStats.aggregate, news) if news else None
        if self._release.asked_for_stats:
            return None  # because workers have no metrics
        reports: list[JobReport] = []
        if not self._release.worker_metadata:
            reports = [r for each in self._siblings() for r in each._worker.reports()]
        # The scheduler's side is only read together with a worker that has stats.
        if reports or self._worker_side.is_stats_due():
            return stats_of(reports)
        return None

    def _siblings(self) -> list[KVViewConnector]:
        """Return all children of the ``MultiConnector`` on this side, or only this connector."""
        engine, is_worker = self._kvview_config[0].cache_config, self._worker_side is not None
        return [
            each
            for each in self._built
            if each._kvview_config[0].cache_config is engine
            and (each._worker_side is not None) is is_worker
        ]

    def _news(self) -> KVViewStats | None:
        side = self._scheduler
        oldest = self._hold_watch.oldest if self._hold_watch is not None else 0.0
        values = side.meter.values(side.half, self._bound_view, oldest)
        values["faults"] = side.faults.num_faults
        update = self._reporter.update(values)
        return None if update is None else stats_of([], update)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVViewStats:
        """Make stats from the data that the front end has received."""
        return KVViewStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        """Return the metrics (0.11.1); all children of a ``MultiConnector`` share one object."""
        last = _last_prom_metrics[0] if _last_prom_metrics else None
        if last is None or last.per_engine_labelvalues is not per_engine_labelvalues:
            last = PromMetrics(metric_types, labelnames, per_engine_labelvalues)
            _last_prom_metrics[:] = [last]
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        last.start(str(extra.get("connector", "")))
        return last

    def shutdown(self) -> None:
        """Release the resources of this side, then close the view, even after an exception."""
        with ExitStack() as last_first:
            if self._worker_side is not None:
                last_first.callback(self._worker_side.shutdown)
            if self._scheduler_side is not None:
                last_first.callback(self.close_block_pool_view)
                last_first.callback(self._scheduler_side.shutdown)


require_concrete("connector", KVViewConnector)
_last_prom_metrics: list[PromMetrics] = []

with suppress(ValueError):  # it is registered already
    # vLLM's MultiConnector looks the stats of its children up by name, in the front end.
    KVConnectorFactory.register_connector("KVViewConnector", __name__, "KVViewConnector")
