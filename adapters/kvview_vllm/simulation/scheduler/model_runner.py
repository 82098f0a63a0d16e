"""The calls of a model runner to a connector's worker side, and its report.

Source: vllm/v1/worker/gpu_model_runner.py and vllm/v1/outputs.py, 0.11.0 to 0.33.0.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from kvview_vllm.releases import installed
from kvview_vllm.releases.build.samples import make_filled
from kvview_vllm.releases.compat.calls import handle_preemptions, known_arguments
from kvview_vllm.releases.compat.versions import vllm


def invalid_blocks(transfers: Any) -> Collection[int]:
    """Return the blocks that a worker's report lists as not loaded; empty without a report."""
    if transfers is None or not installed().connector.failed_blocks:
        return ()
    blocks: Collection[int] = transfers.invalid_block_ids or ()
    return blocks


def failed_requests(transfers: Any) -> Collection[str]:
    """Return the requests that a worker's report lists as not loaded; empty without a report."""
    if transfers is None or not installed().connector.failed_requests:
        return ()
    requests: Collection[str] = transfers.failed_recving or ()
    return requests


def computed_before(output: Any) -> dict[str, int]:
    """Return, for each scheduled request, the number of tokens whose KV exists before the step."""
    cached = output.scheduled_cached_reqs
    starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return starts


def loads_after_launch(output: Any) -> bool:
    """Whether the worker starts a step's loads after the launch of its forward pass (0.29.0)."""
    return installed().connector.loads_after_launch and not output.has_sync_kv_loads


def bind_transfers(worker: Any, output: Any, metadata: Any) -> None:
    """Make the calls that a model runner makes first in a step."""
    handle_preemptions(worker, output, metadata)
    worker.bind_connector_metadata(metadata)


def end_transfers(worker: Any) -> None:
    """Make the calls that a model runner makes after the compute of a step."""
    worker.wait_for_save()
    worker.clear_connector_metadata()


def take_transfers(worker: Any, output: Any) -> Any:
    """Make a worker's report, a ``KVConnectorOutput``.

    A model runner makes the report at the end of a step; simulated compute needs it earlier.
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
    return make_filled(kind, **known_arguments(kind, values))


def make_aggregator(scheduler: Any, num_ranks: int) -> Any:
    """Make vLLM's own aggregator, which merges the outputs of all ranks.

    Args:
        scheduler: vLLM's scheduler; its connector states how many ranks report a transfer.
        num_ranks: Number of ranks, all of which report a transfer by default.
    """
    number = num_ranks
    if scheduler.connector is not None:
        number = scheduler.connector.get_finished_count() or num_ranks
    return vllm("distributed.kv_transfer.kv_connector.utils").KVOutputAggregator(number)
