"""A canary for the messages between the halves of the connector, made with vLLM's classes.

Reports of workers, events and the layout of a KV cache are built and read here before the first
request. An unknown shape is refused when a connector is built, and by ``kvview doctor``.
:mod:`.scheduler_canary` makes the calls of a scheduler.
"""

from __future__ import annotations

import pickle
from functools import cache
from typing import Any

from kvview import (
    MEDIUM_CPU,
    CacheGeometry,
    OffloadingEvent,
    StepPlan,
    TransferResult,
    make_offload_key,
)
from kvview_vllm.connector.messages import (
    JobReport,
    KVViewMetadata,
    KVViewWorkerMetadata,
    stats_of,
    take_reports,
)
from kvview_vllm.events import to_vllm_events
from kvview_vllm.geometry import read_group
from kvview_vllm.releases import ConnectorSeam, expect, installed, reading
from kvview_vllm.releases.samples import BLOCK_SIZE, LAYERS, make_filled, make_kv_cache_config
from kvview_vllm.releases.versions import vllm
from kvview_vllm.transfer import canonical_kv_caches

_SEAM = ConnectorSeam.seam
_NAME = "kvview canary"


@cache
def check_connector() -> None:
    """Run the canary once per process.

    Raises:
        UnsupportedEngineError: A result differs from that of the tested releases.
    """
    _play_reports()
    _play_events()
    _play_layout()


@reading(_SEAM, "the reports of workers")
def _play_reports() -> None:
    release = installed().connector
    reports = [JobReport(_NAME, 0, TransferResult(1, success=True))]
    metadata = KVViewMetadata(_NAME, StepPlan(), False, ())
    expect(_SEAM, "metadata of a step", pickle.loads(pickle.dumps(metadata)), metadata)
    values: dict[str, Any] = {"kv_connector_stats": stats_of(reports)}
    if release.worker_metadata:
        joined = KVViewWorkerMetadata(reports).aggregate(KVViewWorkerMetadata([]))
        values = {"kv_connector_worker_meta": joined}
    output = make_filled(vllm("v1.outputs").KVConnectorOutput, **values)
    output = pickle.loads(pickle.dumps(output))
    if release.failed_blocks:
        expect(_SEAM, "blocks that were not loaded", output.invalid_block_ids or set(), set())
    taken = take_reports(output, _NAME, from_stats=not release.worker_metadata)
    expect(_SEAM, "reports of a worker", taken, reports)


@reading(_SEAM, "an event of offloaded blocks")
def _play_events() -> None:
    keys = (make_offload_key(b"%032d" % 0, 0),)
    events = [OffloadingEvent(keys, MEDIUM_CPU, removed=removed) for removed in (False, True)]
    stored, removed = to_vllm_events(events, CacheGeometry.single(BLOCK_SIZE))
    found = [(len(each.block_hashes), each.medium) for each in (stored, removed)]
    expect(_SEAM, "events of offloaded blocks", found, [(1, MEDIUM_CPU)] * 2)
    expect(_SEAM, "the block size of an event", stored.block_size, BLOCK_SIZE)


@reading("geometry", "the layout of a KV cache")
def _play_layout() -> None:
    import torch

    config = make_kv_cache_config(4)
    group = config.kv_cache_groups[0]
    expect("geometry", "a full-attention group", read_group(0, group.kv_cache_spec).block_size, 16)
    caches = canonical_kv_caches({LAYERS[0]: torch.zeros(4, 2, BLOCK_SIZE, 8)}, config)
    sizes = [tensor.page_size_bytes for tensor in caches.tensors]
    expect("geometry", "bytes of a page", sizes, [group.kv_cache_spec.page_size_bytes])
