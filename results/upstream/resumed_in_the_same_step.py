"""A request that is preempted and resumed in one step ends the engine (three connectors).

``POST /reset_prefix_cache?reset_running_requests=true`` preempts running requests between two
steps. The next ``SchedulerOutput`` of vLLM 0.33.0 then names such a request twice: in
``preempted_req_ids`` and, if the request has its blocks again, in ``resumed_req_ids`` (Model Runner
V1) or in ``scheduled_new_reqs`` (Model Runner V2). If the request waits for a load that starts in
the same step, only ``preempted_req_ids`` names it.

This script needs no GPU, no model and no kvview. ``python resumed_in_the_same_step.py`` passes
these outputs to the schedulers of the installed connectors: MooncakeStoreConnector of vLLM 0.33.0,
and openlake-vllm 0.8.1 and redhare 0.6.0 if they are installed. Each line has the number of planned
jobs if the request was preempted in an earlier step, and in the same step. Expected: 1 and 1.
"""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

BLOCKS = ([1, 2, 3],)
TOKENS = list(range(48))
V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
SCHEDULERS = {
    "MooncakeStoreConnector": (f"{V1}.mooncake.store.scheduler", "MooncakeStoreScheduler"),
    "OpenLakeConnector": ("openlake_client.openlake_adapter", "OpenLakeScheduler"),
    "RedhareConnector": ("redhare.vllm_connector.scheduler", "RedhareScheduler"),
}

request = SimpleNamespace(
    request_id="a",
    num_computed_tokens=0,
    num_tokens=48,
    num_prompt_tokens=48,
    all_token_ids=TOKENS,
    block_hashes=[b"h"] * 3,
)
allocated = SimpleNamespace(get_block_ids=lambda **_: BLOCKS)
resumed = SimpleNamespace(
    req_ids=["a"], new_block_ids=[BLOCKS], resumed_req_ids={"a"}, num_computed_tokens=[0]
)
new = SimpleNamespace(req_id="a", block_ids=BLOCKS, num_computed_tokens=0, prefill_token_ids=TOKENS)
none = SimpleNamespace(req_ids=[])
STEPS = {  # new requests, cached requests, tokens to load
    "Model Runner V1": ([], resumed, 0),
    "Model Runner V2": ([new], none, 0),
    "a load": ([], none, 48),
}


def make_scheduler(cls: Any) -> Any:
    scheduler: Any = object.__new__(cls)  # its constructor needs a VllmConfig and a server
    scheduler.__dict__ |= {
        "kv_role": "kv_both",
        "load_specs": {},
        "_loads": {},
        "_request_trackers": {},
        "_unfinished_requests": {},
        "_unfinished_request_ids": set(),
        "_preempted_req_ids": {"a"},  # in an earlier step
        "_async_save_req_ids": set(),
        "_pending_partial_tails": {},
        "_finished_partial_tail_metas": {},
        "_partial_tail_load_pins": {},
        "_store_group_ids": (0,),
        "_block_size": 16,
        "_sched_bs": 16,
        "_capacity_only": False,
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


def planned(module: Any, kind: str, step: Any, preempted: set[str]) -> str:
    new_requests, cached, num_tokens = step
    scheduler = make_scheduler(getattr(module, kind))
    if num_tokens:
        load = getattr(module, "PendingLoad", None) or module.LoadSpec
        scheduler.load_specs["a"] = scheduler._loads["a"] = load(0, num_tokens, False)
    scheduler.update_state_after_alloc(request, allocated, num_tokens)
    output = SimpleNamespace(
        finished_req_ids=set(),
        preempted_req_ids=preempted,
        scheduled_new_reqs=new_requests,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={} if num_tokens else {"a": 48},
        kv_connector_block_state=None,
    )
    try:
        return str(len(scheduler.build_connector_meta(output).requests))
    except Exception as error:
        return f"{type(error).__name__} {error}".strip()


for name, (path, kind) in SCHEDULERS.items():
    try:
        module = import_module(path)
    except ImportError as error:
        print(f"{name}: not installed ({error})")
        continue
    for label, step in STEPS.items():
        earlier, same = (planned(module, kind, step, each) for each in (set(), {"a"}))
        print(f"{name}, {label}: {earlier} (earlier step), {same} (same step)")
