"""A request that is preempted and resumed in one step ends the engine (three connectors).

``POST /reset_prefix_cache?reset_running_requests=true`` preempts running requests between two
steps. The next ``SchedulerOutput`` of vLLM 0.33.0 then names such a request twice: in
``preempted_req_ids`` and, if it has its blocks again, in ``resumed_req_ids``.

This script needs no GPU, no model and no kvview. ``python resumed_in_the_same_step.py`` passes this
output to the schedulers of the installed connectors: MooncakeStoreConnector of vLLM 0.33.0, and
openlake-vllm 0.8.1 and redhare 0.6.0 if they are installed. Expected: each prints metadata.
"""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

BLOCKS = ([1, 2, 3],)
V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
SCHEDULERS = {
    "MooncakeStoreConnector": (f"{V1}.mooncake.store.scheduler", "MooncakeStoreScheduler"),
    "OpenLakeConnector": ("openlake_client.openlake_adapter", "OpenLakeScheduler"),
    "RedhareConnector": ("redhare.vllm_connector.scheduler", "RedhareScheduler"),
}

request = SimpleNamespace(
    request_id="a", num_computed_tokens=0, all_token_ids=list(range(48)), block_hashes=[b"h"] * 3
)
allocated = SimpleNamespace(get_block_ids=lambda: BLOCKS)
cached = SimpleNamespace(
    req_ids=["a"], new_block_ids=[BLOCKS], resumed_req_ids={"a"}, num_computed_tokens=[0]
)
output = SimpleNamespace(
    finished_req_ids=set(),
    preempted_req_ids={"a"},
    scheduled_new_reqs=[],
    scheduled_cached_reqs=cached,
    num_scheduled_tokens={"a": 48},
)

for name, (module, kind) in SCHEDULERS.items():
    try:
        cls: Any = getattr(import_module(module), kind)
    except ImportError as error:
        print(f"{name}: not installed ({error})")
        continue
    scheduler: Any = object.__new__(cls)  # its constructor needs a VllmConfig and a server
    scheduler.__dict__ |= {
        "kv_role": "kv_both",
        "load_specs": {},
        "_loads": {},
        "_request_trackers": {},
        "_unfinished_requests": {},
        "_unfinished_request_ids": set(),
        "_preempted_req_ids": set(),
        "_async_save_req_ids": set(),
        "_pending_partial_tails": {},
        "_partial_tail_load_pins": {},
        "_store_group_ids": (0,),
        "_block_size": 16,
        "enable_kv_events": False,
        "enable_partial_hash_hits": False,
        "save_decode_cache": True,
    }
    scheduler._drop_pending_partial_tail = lambda name: None
    try:
        scheduler.update_state_after_alloc(request, allocated, 0)
        print(f"{name}: {scheduler.build_connector_meta(output)}")
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}")
