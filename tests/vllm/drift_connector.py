"""Drifts of what the scheduler, connectors and workers tell each other, and of events."""

# The texts of vLLM are found as they stand, however long.
# ruff: noqa: E501

from __future__ import annotations

from drift_edits import (  # type: ignore[import-not-found]
    BASE,
    BLOCKS,
    EVENTS,
    OUTPUT,
    OUTPUTS,
    SCHEDULER,
    UTILS,
    drift,
    field,
    method,
    rename,
    swap,
)

# --- what the scheduler says ---

drift(
    "CachedRequestData.resumed_req_ids renamed",
    "0.11.1: resumed_from_preemption -> resumed_req_ids",
    rename("resumed_req_ids", "resumed_request_ids"),
)
drift(
    "CachedRequestData.resumed_req_ids by flags",
    "0.11.0 had a list of flags",
    swap(
        OUTPUT,
        "resumed_req_ids: set[str]",
        "resumed_req_ids: list[bool]",
        "resumed_req_ids=set(),",
        "resumed_req_ids=[],",
    ),
    swap(
        SCHEDULER,
        "resumed_req_ids=resumed_req_ids,",
        "resumed_req_ids=[req_id in resumed_req_ids for req_id in req_ids],",
    ),
)
drift(
    "CachedRequestData.new_block_ids renamed",
    "0.20: block_hashes_to_store -> keys_to_store",
    swap(
        OUTPUT,
        "new_block_ids: list",
        "added_block_ids: list",
        "new_block_ids=[]",
        "added_block_ids=[]",
        'f"new_block_ids={self.new_block_ids},"',
        'f"new_block_ids={self.added_block_ids},"',
    ),
    swap(SCHEDULER, "new_block_ids=new_block_ids,", "added_block_ids=new_block_ids,"),
)
drift(
    "CachedRequestData.new_block_ids by request",
    "0.12: num_computed_tokens and others from objects to lists by request",
    swap(
        OUTPUT,
        "new_block_ids: list[tuple[list[int], ...] | None]",
        "new_block_ids: dict[str, tuple[list[int], ...]]",
        "new_block_ids=[]",
        "new_block_ids={}",
    ),
    swap(
        SCHEDULER,
        "new_block_ids=new_block_ids,",
        "new_block_ids={r: b for r, b in zip(req_ids, new_block_ids) if b},",
    ),
)
drift(
    "CachedRequestData.num_computed_tokens renamed",
    "0.20: names of PrepareStoreOutput",
    swap(
        OUTPUT,
        "    num_computed_tokens: list[int]\n",
        "    computed_tokens: list[int]\n",
        "            num_computed_tokens=[],",
        "            computed_tokens=[],",
    ),
    swap(
        SCHEDULER,
        "            num_computed_tokens=num_computed_tokens,\n            num_output_tokens=num_output_tokens,",
        "            computed_tokens=num_computed_tokens,\n            num_output_tokens=num_output_tokens,",
    ),
)
drift(
    "CachedRequestData requires a field more",
    "0.12: num_output_tokens, 0.17: all_token_ids",
    field(OUTPUT, "CachedRequestData", "priorities: list[int]"),
    swap(OUTPUT, "            req_ids=[],", "            priorities=[],\n            req_ids=[],"),
    swap(
        SCHEDULER,
        "        return CachedRequestData(\n            req_ids=req_ids,",
        "        return CachedRequestData(\n            priorities=[0 for _ in req_ids],\n            req_ids=req_ids,",
    ),
)
drift(
    "NewRequestData.block_ids renamed",
    "0.20: names of PrepareStoreOutput",
    swap(
        OUTPUT,
        "    block_ids: tuple[list[int], ...]\n    num_computed",
        "    kv_block_ids: tuple[list[int], ...]\n    num_computed",
        "            block_ids=block_ids,\n            num",
        "            kv_block_ids=block_ids,\n            num",
    ),
)
drift(
    "NewRequestData.num_computed_tokens renamed",
    "0.20: names of PrepareStoreOutput",
    swap(
        OUTPUT,
        "    num_computed_tokens: int\n",
        "    computed_tokens: int\n",
        "            num_computed_tokens=request.num_computed_tokens,\n            lora",
        "            computed_tokens=request.num_computed_tokens,\n            lora",
    ),
)
drift(
    "NewRequestData.block_ids are blocks",
    "0.9: lists of ids -> a tuple of lists, one a group",
    swap(
        OUTPUT,
        "    block_ids: tuple[list[int], ...]\n    num_computed",
        "    block_ids: dict[int, list[int]]\n    num_computed",
        "            block_ids=block_ids,\n            num",
        "            block_ids=dict(enumerate(block_ids)),\n            num",
    ),
)
drift(
    "NewRequestData in another order",
    "0.12: fields moved",
    swap(
        OUTPUT,
        "    req_id: str\n    prompt_token_ids: list[int] | None\n",
        "    prompt_token_ids: list[int] | None\n    req_id: str\n",
    ),
)
drift(
    "SchedulerOutput.num_scheduled_tokens renamed",
    "0.20: names of PrepareStoreOutput",
    rename("num_scheduled_tokens", "scheduled_tokens"),
)
drift(
    "SchedulerOutput.scheduled_cached_reqs renamed",
    "0.9: scheduled_running_reqs and scheduled_resumed_reqs joined",
    rename("scheduled_cached_reqs", "scheduled_known_reqs"),
)
drift(
    "SchedulerOutput.scheduled_new_reqs renamed",
    "0.9: scheduled_running_reqs and scheduled_resumed_reqs joined",
    rename("scheduled_new_reqs", "scheduled_first_reqs"),
)
drift(
    "SchedulerOutput.preempted_req_ids renamed",
    "0.12 brought it",
    rename("preempted_req_ids", "preempted_request_ids"),
)
drift(
    "SchedulerOutput.num_scheduled_tokens by request object",
    "0.9: structured_output_request_ids from a dict to a list",
    swap(
        OUTPUT,
        "    num_scheduled_tokens: dict[str, int]\n",
        "    num_scheduled_tokens: list[tuple[str, int]]\n",
    ),
)
drift(
    "SchedulerOutput requires a field more",
    "0.11.1, 0.20: fields of the output",
    field(OUTPUT, "SchedulerOutput", "step_id: int"),
    swap(
        OUTPUT,
        "            scheduled_new_reqs=[],",
        "            step_id=0,\n            scheduled_new_reqs=[],",
    ),
    swap(
        SCHEDULER,
        "        scheduler_output = SchedulerOutput(",
        "        scheduler_output = SchedulerOutput(step_id=1,",
    ),
)

# --- what requests and blocks are ---

drift(
    "Request.skip_reading_prefix_cache renamed",
    "0.11.1 brought it",
    rename("skip_reading_prefix_cache", "bypass_prefix_cache"),
    rename("get_skip_reading_prefix_cache", "get_bypass_prefix_cache"),
)
drift(
    "Request.block_hashes renamed",
    "0.20: block hashes became keys",
    swap("vllm/v1/request.py", "self.block_hashes: list", "self.prefix_hashes: list"),
    rename("request\\.block_hashes", "request.prefix_hashes"),
    rename("self\\.block_hashes", "self.prefix_hashes"),
    rename("req\\.block_hashes", "req.prefix_hashes"),
    harness={r"request\.block_hashes": "request.prefix_hashes"},
)
drift(
    "Request.cache_salt renamed",
    "0.9 brought it",
    rename("cache_salt", "prefix_salt"),
)
drift(
    "Request.all_token_ids renamed",
    "0.11.1: properties of the request",
    rename("all_token_ids", "token_ids_so_far"),
)
drift(
    "RequestStatus.FINISHED_ABORTED renamed",
    "0.13: FINISHED_ERROR, 0.25: FINISHED_REPETITION",
    rename("FINISHED_ABORTED", "FINISHED_CANCELLED"),
)
drift(
    "RequestStatus.PREEMPTED renamed",
    "0.13: FINISHED_ERROR, 0.25: FINISHED_REPETITION",
    rename("PREEMPTED", "WAITING_PREEMPTED"),
)
drift(
    "generate_block_hash_extra_keys requires an argument more",
    "0.12: hash_block_size of BlockPool",
    swap(
        UTILS,
        "    request: Request, start_token_idx: int, end_token_idx: int, start_mm_idx: int\n) -> tuple[tuple",
        "    request: Request, start_token_idx: int, end_token_idx: int, start_mm_idx: int, tag: bool\n) -> tuple[tuple",
    ),
    swap(
        UTILS,
        "                request, start_token_idx, end_token_idx, curr_mm_idx\n",
        "                request, start_token_idx, end_token_idx, curr_mm_idx, False\n",
    ),
)
drift(
    "generate_block_hash_extra_keys answers keys alone",
    "0.16: TransferResult from a tuple to an object",
    swap(
        UTILS,
        "    request: Request, start_token_idx: int, end_token_idx: int, start_mm_idx: int\n) -> tuple[tuple[Any, ...] | None, int]:",
        "    request: Request, start_token_idx: int, end_token_idx: int, start_mm_idx: int\n) -> tuple[Any, ...] | None:\n"
        "    return _extra_keys(request, start_token_idx, end_token_idx, start_mm_idx)[0]\n\n\n"
        "def _extra_keys(request: Request, start_token_idx: int, end_token_idx: int, start_mm_idx: int) -> Any:",
    ),
)
drift(
    "KVCacheBlocks.get_block_ids renamed",
    "0.12, 0.24: methods of KVCacheBlocks",
    rename("get_block_ids", "to_block_ids"),
)
drift(
    "KVCacheBlocks.get_block_ids gives one list",
    "0.9: a tuple of lists, one a group",
    swap(
        BLOCKS,
        "return tuple([blk.block_id for blk in group] for group in groups)",
        "return [blk.block_id for group in groups for blk in group]",
        "        allow_none: bool = False,\n        *,\n        group_ids: Sequence[int] | None = None,\n    ) -> tuple[list[int], ...] | None:",
        "        allow_none: bool = False,\n        *,\n        group_ids: Sequence[int] | None = None,\n    ) -> list[int] | None:",
    ),
)
drift(
    "KVCacheBlocks.get_block_ids requires a group",
    "0.26: allow_none and other arguments",
    swap(
        BLOCKS,
        "        self,\n        allow_none: bool = False,\n",
        "        self,\n        layout: str,\n        allow_none: bool = False,\n",
    ),
    swap(SCHEDULER, "get_block_ids(allow_none=True)", "get_block_ids('flat', allow_none=True)"),
)

# --- hooks of connectors ---

drift(
    "KVConnectorBase_V1 requires a method more",
    "none so far; OffloadingManager did in 0.23",
    method(BASE, "KVConnectorBase_V1", "price_of_load(self, request: Any) -> float"),
)
drift(
    "SupportsHMA requires a method more",
    "OffloadingManager did in 0.23",
    method(BASE, "SupportsHMA", "group_finished(self, request: Any, group: int) -> None"),
    swap(
        "vllm/distributed/kv_transfer/kv_connector/v1/offloading_connector.py",
        "class OffloadingConnector(KVConnectorBase_V1, SupportsHMA):\n",
        "class OffloadingConnector(KVConnectorBase_V1, SupportsHMA):\n    group_finished = None\n",
    ),
)
drift(
    "KVConnectorMetadata requires a method",
    "LoadStoreSpec.medium was abstract up to 0.25.1",
    swap(BASE, "class KVConnectorMetadata(ABC):  # noqa: B024", "class KVConnectorMetadata(ABC):"),
    method(BASE, "KVConnectorMetadata", "num_bytes(self) -> int"),
    swap(
        "vllm/distributed/kv_transfer/kv_connector/v1/offloading/common.py",
        "class OffloadingConnectorMetadata(KVConnectorMetadata):\n",
        "class OffloadingConnectorMetadata(KVConnectorMetadata):\n    num_bytes = None\n",
    ),
)
drift(
    "KVConnectorWorkerMetadata.aggregate renamed",
    "0.25: OffloadingHandler's methods",
    swap(
        BASE,
        '    def aggregate(\n        self, other: "KVConnectorWorkerMetadata"',
        '    def merge(\n        self, other: "KVConnectorWorkerMetadata"',
    ),
)
drift(
    "get_num_new_matched_tokens requires an argument more",
    "0.20: req_context of lookup",
    swap(
        BASE,
        "        num_computed_tokens: int,\n    ) -> tuple[int | None, bool]:",
        "        num_computed_tokens: int,\n        kv_hints: Any,\n    ) -> tuple[int | None, bool]:",
    ),
    swap(
        SCHEDULER,
        "self.connector.get_num_new_matched_tokens(\n                                request,",
        "self.connector.get_num_new_matched_tokens(\n                                request, kv_hints=None, num_computed_tokens=",
    ),
)
drift(
    "get_num_new_matched_tokens answers an object",
    "0.16: TransferResult from a tuple to an object",
    swap(
        BASE,
        "        num_computed_tokens: int,\n    ) -> tuple[int | None, bool]:",
        '        num_computed_tokens: int,\n    ) -> "PrefixMatch":',
    ),
)
drift(
    "build_connector_meta requires the block state",
    "0.29: kv_connector_block_state",
    swap(
        BASE,
        "        self, scheduler_output: SchedulerOutput\n    ) -> KVConnectorMetadata:",
        "        self, scheduler_output: SchedulerOutput, block_state: Any\n    ) -> KVConnectorMetadata:",
    ),
    swap(
        SCHEDULER,
        "return connector.build_connector_meta(scheduler_output)",
        "return connector.build_connector_meta(scheduler_output, None)",
    ),
)
drift(
    "update_state_after_alloc in another order",
    "0.21: req_context before success",
    swap(
        BASE,
        'self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int',
        'self, request: "Request", num_external_tokens: int, blocks: "KVCacheBlocks"',
    ),
)
drift(
    "request_finished_all_groups takes the blocks",
    "0.11.1: block_ids by group",
    swap(
        BASE,
        '        request: "Request",\n        block_ids: tuple[list[int], ...],\n    ) -> tuple[bool',
        '        request: "Request",\n        blocks: "KVCacheBlocks",\n    ) -> tuple[bool',
    ),
)
drift(
    "request_finished_all_groups answers an object",
    "0.16: TransferResult from a tuple to an object",
    swap(
        BASE,
        "        block_ids: tuple[list[int], ...],\n    ) -> tuple[bool, dict[str, Any] | None]:",
        '        block_ids: tuple[list[int], ...],\n    ) -> "FinishedTransfer":',
    ),
)
drift(
    "build_connector_worker_meta renamed",
    "0.30: get_transfer_results took over from get_finished",
    rename("build_connector_worker_meta", "collect_worker_meta"),
)
drift(
    "has_pending_push_work renamed",
    "0.24 brought it",
    rename("has_pending_push_work", "has_pending_work"),
)
drift(
    "get_block_ids_with_load_errors renamed",
    "0.11.1 brought it",
    rename("get_block_ids_with_load_errors", "get_failed_block_ids"),
)
drift(
    "get_block_ids_with_load_errors by request",
    "0.30: failed_recving by request",
    swap(
        BASE,
        "def get_block_ids_with_load_errors(self) -> set[int]:",
        "def get_block_ids_with_load_errors(self) -> dict[str, set[int]]:",
    ),
)
drift(
    "get_transfer_results renamed",
    "0.30: get_transfer_results took over from get_finished",
    rename("get_transfer_results", "poll_transfers"),
)
drift(
    "get_transfer_results answers a tuple",
    "0.16: TransferResult from a tuple to an object",
    swap(
        BASE,
        "        return KVConnectorTransferResults(\n            finished_sending=set(finished_sending or ()),\n            finished_recving=set(finished_recving or ()),\n        )",
        "        return set(finished_sending or ()), set(finished_recving or ()), set()",
        "    ) -> KVConnectorTransferResults:",
        "    ) -> tuple[set[str], set[str], set[str]]:",
    ),
)
drift(
    "take_events renamed",
    "0.20: names of the offloading interface",
    rename("take_events", "drain_events"),
)
drift(
    "start_load_kv requires the metadata",
    "0.19: handle_preemptions takes the metadata",
    swap(
        BASE,
        'def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:',
        'def start_load_kv(self, forward_context: "ForwardContext", metadata: Any, **kwargs: Any) -> None:',
    ),
)
drift(
    "wait_for_save requires an argument",
    "0.19: handle_preemptions takes the metadata",
    swap(BASE, "def wait_for_save(self):", "def wait_for_save(self, finished_req_ids: set[str]):"),
)
drift(
    "reset_cache renamed",
    "0.13 brought it",
    swap(
        BASE,
        "def reset_cache(self) -> bool | None:",
        "def reset_external_cache(self) -> bool | None:",
    ),
    swap(SCHEDULER, "self.connector.reset_cache()", "self.connector.reset_external_cache()"),
)
drift(
    "the scheduler's context takes the place of the bind",
    "PR #53067",
    rename("bind_kv_cache_manager", "bind_scheduler_context"),
)
drift(
    "KVConnectorBase_V1 built in another order",
    "0.33: num_hash_lookahead_tokens put before medium",
    swap(
        BASE,
        '        role: KVConnectorRole,\n        kv_cache_config: "KVCacheConfig",',
        '        kv_cache_config: "KVCacheConfig",\n        role: KVConnectorRole,',
    ),
)
drift(
    "KVConnectorRole.SCHEDULER renamed",
    "0.30: BLOCK_LEVEL -> CHUNK_LEVEL",
    rename("KVConnectorRole\\.SCHEDULER", "KVConnectorRole.ENGINE"),
    swap(BASE, "    SCHEDULER = 0\n", "    ENGINE = 0\n"),
)

# --- what workers report ---

drift(
    "KVConnectorOutput.kv_connector_worker_meta renamed",
    "0.18 brought it",
    rename("kv_connector_worker_meta", "kv_connector_worker_metadata"),
)
drift(
    "KVConnectorOutput.invalid_block_ids renamed",
    "0.11.1 brought it",
    rename("invalid_block_ids", "failed_block_ids"),
)
drift(
    "KVConnectorOutput.failed_recving renamed",
    "0.30 brought it",
    rename("failed_recving", "failed_receiving"),
)
drift(
    "KVConnectorOutput requires a field more",
    "0.11.1 - 0.30: five fields",
    field(OUTPUTS, "KVConnectorOutput", "worker_rank: int"),
)

# --- events ---

drift(
    "BlockStored requires a field more",
    "0.14: lora_name",
    swap(EVENTS, "    lora_name: str | None\n\n", "    lora_name: str | None\n    tenant: str\n\n"),
)
drift(
    "BlockStored.block_hashes renamed",
    "0.20: block hashes became keys",
    rename("block_hashes", "block_keys"),
)
drift(
    "BlockStored.medium an enum",
    "0.27: media of the offloading events",
    swap(
        EVENTS,
        "    medium: str | None\n    lora_name",
        "    medium: Medium | None\n    lora_name",
        'MEDIUM_GPU = "GPU"\n',
        'MEDIUM_GPU = "GPU"\nimport enum\n\n\nclass Medium(enum.Enum):\n    GPU = "GPU"\n    CPU = "CPU"\n\n\n',
    ),
)
drift("group_idx of events renamed", "0.20 brought it", rename("group_idx", "kv_cache_group"))
drift(
    "maybe_convert_block_hash renamed",
    "0.11.1, 0.29: hash functions",
    rename("maybe_convert_block_hash", "to_external_hash"),
)
