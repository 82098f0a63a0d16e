"""A canary for the connector: a few steps played dry with the installed vLLM's classes.

What the adapter reads and builds at a request is read and built here, before the first:
a request, its blocks, the outputs of three steps, reports and events. The pool is one of
its own. What fails is an unknown shape, refused when a connector is built, and said by
``kvview doctor``.
"""

from __future__ import annotations

import pickle
from functools import cache
from importlib import import_module
from typing import Any

from typing_extensions import override

from kvview import (
    MEDIUM_CPU,
    BlockIds,
    CacheGeometry,
    FinishReason,
    OffloadingEvent,
    RequestInfo,
    SchedulerConnector,
    StepInfo,
    StepPlan,
    TransferResult,
    make_offload_key,
)
from kvview.guard import GuardedView
from kvview_vllm.connector.containment import Faults
from kvview_vllm.connector.messages import (
    JobReport,
    KVViewMetadata,
    KVViewWorkerMetadata,
    stats_of,
    take_reports,
)
from kvview_vllm.connector.scheduler import SchedulerSide
from kvview_vllm.events import to_vllm_events
from kvview_vllm.geometry import read_group
from kvview_vllm.pool import view
from kvview_vllm.releases import ConnectorSeam, expect, installed, reading
from kvview_vllm.releases.calls import make_known
from kvview_vllm.releases.samples import (
    BLOCK_SIZE,
    LAYER,
    make_filled,
    make_kv_cache_config,
    make_kv_cache_manager,
    make_request,
    make_scheduler_output,
)
from kvview_vllm.transfer import canonical_kv_caches

_SEAM = ConnectorSeam.seam
_NAME = "kvview canary"
_NUM_TOKENS = 2 * BLOCK_SIZE + 8


@cache
def check_connector() -> None:
    """Play once in a process.

    Raises:
        UnsupportedEngineError: Something went otherwise than in the tested releases.
    """
    with reading(_SEAM, "a connector's steps, played dry"):
        _play_steps()
    with reading(_SEAM, "what workers report"):
        _play_reports()
    with reading(_SEAM, "an event of offloaded blocks"):
        _play_events()
    with reading("geometry", "the layout of a KV cache"):
        _play_layout()


class _Witness(SchedulerConnector):
    """Notes the block tables that it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    @override
    def on_blocks_allocated(
        self, request: RequestInfo, block_ids: BlockIds, *num_tokens: int
    ) -> None:
        content = request.content
        assert content is not None
        list(content.extra_keys)
        self.told.append((_lists(block_ids), len(request.block_hashes), content.token_ids[0]))

    @override
    def plan_step(self, step: StepInfo) -> StepPlan:
        for one in step.scheduled:
            self.told.append(
                (_lists(one.block_ids), one.num_computed_tokens, one.num_scheduled_tokens)
            )
        return StepPlan()

    @override
    def on_request_preempted(self, request: RequestInfo, block_ids: BlockIds) -> None:
        self.told.append("preempted")

    @override
    def on_request_finished(
        self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
    ) -> None:
        self.told.append((_lists(block_ids), reason))


def _lists(block_ids: BlockIds) -> list[list[int]]:
    return [list(group) for group in block_ids]


def _play_steps() -> None:
    release = installed().connector
    statuses: Any = import_module("vllm.v1.request").RequestStatus
    steps: Any = import_module("vllm.v1.core.sched.output")
    geometry = CacheGeometry.single(BLOCK_SIZE)
    half = _Witness()
    side = SchedulerSide(
        half,
        geometry,
        1,
        release=release,
        preempted_status=statuses.PREEMPTED,
        faults=Faults(_NAME, "scheduler", goes_on=False),
    )
    manager = make_kv_cache_manager(make_kv_cache_config(16))
    bound = view(manager.block_pool, owner=_NAME)
    side.bind(GuardedView(bound, owner=_NAME))
    request = make_request(_NAME, range(100, 100 + _NUM_TOKENS))

    expect(_SEAM, "tokens that are not there", side.match(request, 0), 0)
    blocks = manager.allocate_slots(request, _NUM_TOKENS)
    ids = [block.block_id for block in blocks.blocks[0]]
    side.on_allocated(request, blocks, 0)
    new = make_known(
        steps.NewRequestData.from_request, request=request, block_ids=blocks.get_block_ids()
    )
    side.plan(make_scheduler_output(_NAME, _NUM_TOKENS, new=[new]))
    request.append_output_token_ids([7])
    cached: dict[str, Any] = {
        "req_ids": [_NAME],
        "new_block_ids": [([9],)],
        "num_computed_tokens": [_NUM_TOKENS],
    }
    resumed: dict[str, Any] = {"resumed_from_preemption": [False]}
    if release.resumed_ids:
        resumed = {"resumed_req_ids": set()}
    side.plan(make_scheduler_output(_NAME, 1, cached=cached | resumed))
    last: dict[str, Any] = {"preempted_req_ids": {_NAME}} if release.preempted_ids else {}
    request.status = statuses.PREEMPTED  # where the step does not say so
    side.plan(make_scheduler_output(_NAME, 1, cached=cached | resumed, **last))
    found = bound.find_cached_block(make_offload_key(request.block_hashes[1], 0))
    side.on_finished(request, blocks.get_block_ids(), FinishReason.FINISHED)
    manager.free(request)
    hashed = sorted(block for block, _ in bound.iter_free_block_ids_with_hash())
    bound.close()

    told = [
        ([ids], 2, 100),
        ([ids], 0, _NUM_TOKENS),
        ([[*ids, 9]], _NUM_TOKENS, 1),
        "preempted",
        ([[9]], _NUM_TOKENS, 1),
        ([ids], FinishReason.FINISHED),
    ]
    expect(_SEAM, "block tables of a request", half.told, told)
    expect(_SEAM, "blocks with a hash", (found, hashed), (ids[1], ids[:2]))


def _play_reports() -> None:
    release = installed().connector
    outputs: Any = import_module("vllm.v1.outputs")
    reports = [JobReport(_NAME, 0, TransferResult(1, success=True))]
    metadata = KVViewMetadata(_NAME, StepPlan(), False, ())
    expect(_SEAM, "metadata of a step", pickle.loads(pickle.dumps(metadata)), metadata)
    if release.worker_metadata:
        values: dict[str, Any] = {
            "kv_connector_worker_meta": KVViewWorkerMetadata(reports).aggregate(
                KVViewWorkerMetadata([])
            )
        }
    else:
        values = {"kv_connector_stats": stats_of(reports)}
    output = make_filled(outputs.KVConnectorOutput, **values)
    output = pickle.loads(pickle.dumps(output))
    if release.failed_blocks:
        expect(_SEAM, "blocks that were not loaded", output.invalid_block_ids or set(), set())
    taken = take_reports(output, _NAME, from_stats=not release.worker_metadata)
    expect(_SEAM, "reports of a worker", taken, reports)


def _play_events() -> None:
    keys = (make_offload_key(b"%032d" % 0, 0),)
    events = [OffloadingEvent(keys, MEDIUM_CPU, removed=removed) for removed in (False, True)]
    stored, removed = to_vllm_events(events, CacheGeometry.single(BLOCK_SIZE))
    found = [(len(each.block_hashes), each.medium) for each in (stored, removed)]
    expect(_SEAM, "events of offloaded blocks", found, [(1, MEDIUM_CPU)] * 2)
    expect(_SEAM, "the block size of an event", stored.block_size, BLOCK_SIZE)


def _play_layout() -> None:
    import torch

    config = make_kv_cache_config(4)
    group = config.kv_cache_groups[0]
    expect("geometry", "a full-attention group", read_group(0, group.kv_cache_spec).block_size, 16)
    caches = canonical_kv_caches({LAYER: torch.zeros(4, 2, BLOCK_SIZE, 8)}, config)
    sizes = [tensor.page_size_bytes for tensor in caches.tensors]
    expect("geometry", "bytes of a page", sizes, [group.kv_cache_spec.page_size_bytes])
