"""A request that is preempted and resumed in one step ends the engine (three connectors).

``POST /reset_prefix_cache?reset_running_requests=true`` preempts running requests between two
steps. The next ``SchedulerOutput`` of vLLM 0.33.0 then names such a request twice: in
``preempted_req_ids`` and, if it has its blocks again, in ``resumed_req_ids``.

This script needs no GPU, no model and no kvview. ``python resumed_in_the_same_step.py`` passes this
output to the schedulers of the installed connectors: MooncakeStoreConnector of vLLM 0.33.0, and
openlake-vllm 0.8.1 and redhare 0.6.0 if they are installed. Expected: each prints metadata. Then
it passes the output in which the preempted request waits for a load that starts in the same step,
which redhare never plans, so the request waits forever. Expected: each prints 1 planned load.
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

waits = SimpleNamespace(**vars(output) | {"scheduled_cached_reqs": SimpleNamespace(req_ids=[])})
waits.num_scheduled_tokens = {}
waits.kv_connector_block_state = None


def make_scheduler(cls: Any) -> Any:
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
        "_finished_partial_tail_metas": {},
        "_partial_tail_load_pins": {},
        "_store_group_ids": (0,),
        "_block_size": 16,
        "chunk_size": 16,
        "discard_partial_chunks": True,
        "enable_kv_events": False,
        "enable_partial_hash_hits": False,
        "save_decode_cache": True,
    }
    scheduler._drop_pending_partial_tail = lambda name: None
    scheduler._chunk_hashes = lambda request: [b"h"] * 3
    scheduler._apply_current_save_block_ids = lambda *_: None
    scheduler._reference_save_blocks = lambda meta: None
    return scheduler


for name, (module, kind) in SCHEDULERS.items():
    try:
        cls: Any = getattr(import_module(module), kind)
    except ImportError as error:
        print(f"{name}: not installed ({error})")
        continue
    try:
        scheduler = make_scheduler(cls)
        scheduler.update_state_after_alloc(request, allocated, 0)
        print(f"{name}: {scheduler.build_connector_meta(output)}")
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}")

for preempted in ({"a"}, set()):  # without a preemption, as a control
    try:
        scheduler = make_scheduler(getattr(import_module("redhare.vllm_connector.scheduler"), kind))
        data = import_module("redhare.vllm_connector.data")
        scheduler.load_specs["a"] = data.LoadSpec(0, 48, False)
        scheduler.update_state_after_alloc(request, allocated, 48)
        waits.preempted_req_ids = preempted
        num_planned = len(scheduler.build_connector_meta(waits).requests)
        print(f"{kind}, a load after {len(preempted)} preemptions: {num_planned} planned")
    except ImportError as error:
        print(f"{kind}: not installed ({error})")
