"""Two resets of all caches without a step between them end the engine (vLLM 0.33.0).

The first ``reset_cache`` of ``OffloadingConnector`` notes its jobs in flight, which the worker must
flush in the next step, in ``_current_batch_jobs_to_flush``. The second asserts that this set is
empty. A client that sends ``POST /reset_prefix_cache?reset_external=true`` twice while a block is
being stored ends the engine.

This script needs no GPU, no model and no kvview. Expected: ``1 resets`` and ``2 resets``.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)

scheduler: Any = object.__new__(OffloadingConnectorScheduler)  # the constructor needs a VllmConfig
scheduler.__dict__ |= {
    "_current_batch_load_jobs": {},
    "_current_batch_sync_loads": {},
    "_current_batch_jobs_to_flush": set(),
    "_current_batch_allocated_block_ids": set(),
    "_manager_locked": nullcontext,
    "_jobs": {0: SimpleNamespace(pending_count=1)},  # a store in flight on one rank
    "_job_counter": 1,
    "_reset_fence": {},
    "_req_status": {},
    "_block_id_to_pending_jobs": {},
    "_chunks_being_loaded": None,
    "_events_tracker": SimpleNamespace(reset=lambda: None),
    "manager": SimpleNamespace(reset_cache=lambda: None),
}
for number in (1, 2):
    try:
        scheduler.reset_cache()
        print(f"{number} resets")
    except AssertionError as error:
        print(f"reset {number}: AssertionError {error}")
