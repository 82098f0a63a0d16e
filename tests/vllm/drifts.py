"""Drifts planted into the newest release's sources: what gets through to a request?

    python tests/vllm/drifts.py [NAME ...] [--processes 2] [--json FILE]

A drift is what a later release could rename, reorder, add or take away, after what vLLM did
between 0.11 and 0.33. Each is planted into sources of its own (links, but for the files that
change) and played there, every way in (:mod:`drift_plays`). A way in either *works*: it saw
what the same play sees on the sources as they are; or it is *refused* in one line when it is
bound, and then ``kvview doctor`` does not say healthy. All else got *through*.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from drift_plays import Answer, play_each, prepare  # type: ignore[import-not-found]
from sources import RELEASES, sources  # type: ignore[import-not-found]

NEWEST = RELEASES[-1]

Files = dict[str, str]
"""Texts of changed files, by path in the sources."""

_ROOTS = ("vllm/v1", "vllm/distributed", "vllm/config")
_OUTPUT = "vllm/v1/core/sched/output.py"
_SCHEDULER = "vllm/v1/core/sched/scheduler.py"
_UTILS = "vllm/v1/core/kv_cache_utils.py"
_POOL = "vllm/v1/core/block_pool.py"
_BLOCKS = "vllm/v1/core/kv_cache_manager.py"
_BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
_EVENTS = "vllm/distributed/kv_events.py"
_OUTPUTS = "vllm/v1/outputs.py"
_OFFLOAD = "vllm/v1/kv_offload/base.py"
_CPU = "vllm/v1/kv_offload/cpu/manager.py"
_OFFLOAD_SCHEDULER = "vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py"
_OFFLOAD_WORKER = "vllm/distributed/kv_transfer/kv_connector/v1/offloading/worker.py"


class DriftError(Exception):
    """A drift does not fit the sources: it must be written anew for the newest release."""


@dataclass(frozen=True)
class Sources:
    """The files of the newest release."""

    folder: Path

    def read(self, path: str) -> str:
        """Text of one file."""
        return (self.folder / path).read_text()

    @cache  # noqa: B019 - one object, for the length of the script
    def all(self) -> dict[str, str]:
        """Texts of all files that a rename may touch."""
        return {
            str(path.relative_to(self.folder)): path.read_text()
            for root in _ROOTS
            for path in sorted((self.folder / root).rglob("*.py"))
        }


Edit = Callable[[Sources, Files], None]


def rename(word: str, new: str) -> Edit:
    """Another name, wherever vLLM uses the old one."""

    def edit(files: Sources, changed: Files) -> None:
        pattern = re.compile(rf"\b{word}\b")
        for path, text in files.all().items():
            if pattern.search(found := changed.get(path, text)):
                changed[path] = pattern.sub(new, found)
        if not changed:
            raise DriftError(f"nothing is named {word}")

    return edit


def swap(path: str, *texts: str) -> Edit:
    """Replace texts of one file: old, new, old, new, each found once."""

    def edit(files: Sources, changed: Files) -> None:
        text = changed.get(path) or files.read(path)
        for old, new in zip(texts[::2], texts[1::2], strict=True):
            if text.count(old) != 1:
                raise DriftError(f"{path}: {text.count(old)} times {old!r}")
            text = text.replace(old, new)
        changed[path] = text

    return edit


def field(path: str, kind: str, line: str) -> Edit:
    """A new first field of a class, which it requires."""

    def edit(files: Sources, changed: Files) -> None:
        text = changed.get(path) or files.read(path)
        pattern = re.compile(rf'^class {kind}\b[^:]*:\n(?:    """(?:.|\n)*?"""\n)?', re.M)
        if not (found := pattern.search(text)):
            raise DriftError(f"{path}: no class {kind}")
        changed[path] = f"{text[: found.end()]}    {line}\n{text[found.end() :]}"

    return edit


def method(path: str, kind: str, line: str) -> Edit:
    """A new abstract method of a class."""
    return field(path, kind, f"@abstractmethod\n    def {line}: ...\n")


@dataclass(frozen=True)
class Drift:
    """One change to vLLM.

    Args:
        name: What it is.
        like: What vLLM did like it.
        edits: What changes in the sources.
    """

    name: str
    like: str
    edits: tuple[Edit, ...]

    def plant(self, files: Sources, folder: Path) -> None:
        """Write the drifted sources into a folder, in place of what is there."""
        changed: Files = {}
        for edit in self.edits:
            edit(files, changed)
        _write_tree(files.folder, folder, changed)
        # Compiled files are told apart by this time.
        stamp = 1_000_000_000 + list(DRIFTS).index(self.name)
        for path in changed:
            os.utime(folder / path, (stamp, stamp))


DRIFTS: dict[str, Drift] = {}


def _drift(name: str, like: str, *edits: Edit) -> None:
    assert name not in DRIFTS, name
    DRIFTS[name] = Drift(name, like, edits)


# --- what the scheduler says ---

_drift(
    "CachedRequestData.resumed_req_ids renamed",
    "0.11.1: resumed_from_preemption -> resumed_req_ids",
    rename("resumed_req_ids", "resumed_request_ids"),
)
_drift(
    "CachedRequestData.resumed_req_ids by flags",
    "0.11.0 had a list of flags",
    swap(
        _OUTPUT,
        "resumed_req_ids: set[str]",
        "resumed_req_ids: list[bool]",
        "resumed_req_ids=set(),",
        "resumed_req_ids=[],",
    ),
    swap(
        _SCHEDULER,
        "resumed_req_ids=resumed_req_ids,",
        "resumed_req_ids=[req_id in resumed_req_ids for req_id in req_ids],",
    ),
)
_drift(
    "CachedRequestData.new_block_ids renamed",
    "0.20: block_hashes_to_store -> keys_to_store",
    swap(
        _OUTPUT,
        "new_block_ids: list",
        "added_block_ids: list",
        "new_block_ids=[]",
        "added_block_ids=[]",
        'f"new_block_ids={self.new_block_ids},"',
        'f"new_block_ids={self.added_block_ids},"',
    ),
    swap(_SCHEDULER, "new_block_ids=new_block_ids,", "added_block_ids=new_block_ids,"),
)
_drift(
    "CachedRequestData.new_block_ids by request",
    "0.12: num_computed_tokens and others from objects to lists by request",
    swap(
        _OUTPUT,
        "new_block_ids: list[tuple[list[int], ...] | None]",
        "new_block_ids: dict[str, tuple[list[int], ...]]",
        "new_block_ids=[]",
        "new_block_ids={}",
    ),
    swap(
        _SCHEDULER,
        "new_block_ids=new_block_ids,",
        "new_block_ids={r: b for r, b in zip(req_ids, new_block_ids) if b},",
    ),
)
_drift(
    "CachedRequestData.num_computed_tokens renamed",
    "0.20: names of PrepareStoreOutput",
    swap(
        _OUTPUT,
        "    num_computed_tokens: list[int]\n",
        "    computed_tokens: list[int]\n",
        "            num_computed_tokens=[],",
        "            computed_tokens=[],",
    ),
    swap(
        _SCHEDULER,
        "            num_computed_tokens=num_computed_tokens,\n            num_output_tokens=num_output_tokens,",
        "            computed_tokens=num_computed_tokens,\n            num_output_tokens=num_output_tokens,",
    ),
)
_drift(
    "CachedRequestData requires a field more",
    "0.12: num_output_tokens, 0.17: all_token_ids",
    field(_OUTPUT, "CachedRequestData", "priorities: list[int]"),
    swap(_OUTPUT, "            req_ids=[],", "            priorities=[],\n            req_ids=[],"),
    swap(
        _SCHEDULER,
        "        return CachedRequestData(\n            req_ids=req_ids,",
        "        return CachedRequestData(\n            priorities=[0 for _ in req_ids],\n            req_ids=req_ids,",
    ),
)
_drift(
    "NewRequestData.block_ids renamed",
    "0.20: names of PrepareStoreOutput",
    swap(
        _OUTPUT,
        "    block_ids: tuple[list[int], ...]\n    num_computed",
        "    kv_block_ids: tuple[list[int], ...]\n    num_computed",
        "            block_ids=block_ids,\n            num",
        "            kv_block_ids=block_ids,\n            num",
    ),
)
_drift(
    "NewRequestData.num_computed_tokens renamed",
    "0.20: names of PrepareStoreOutput",
    swap(
        _OUTPUT,
        "    num_computed_tokens: int\n",
        "    computed_tokens: int\n",
        "            num_computed_tokens=request.num_computed_tokens,\n            lora",
        "            computed_tokens=request.num_computed_tokens,\n            lora",
    ),
)
_drift(
    "NewRequestData.block_ids are blocks",
    "0.9: lists of ids -> a tuple of lists, one a group",
    swap(
        _OUTPUT,
        "    block_ids: tuple[list[int], ...]\n    num_computed",
        "    block_ids: dict[int, list[int]]\n    num_computed",
        "            block_ids=block_ids,\n            num",
        "            block_ids=dict(enumerate(block_ids)),\n            num",
    ),
)
_drift(
    "NewRequestData in another order",
    "0.12: fields moved",
    swap(
        _OUTPUT,
        "    req_id: str\n    prompt_token_ids: list[int] | None\n",
        "    prompt_token_ids: list[int] | None\n    req_id: str\n",
    ),
)
_drift(
    "SchedulerOutput.num_scheduled_tokens renamed",
    "0.20: names of PrepareStoreOutput",
    rename("num_scheduled_tokens", "scheduled_tokens"),
)
_drift(
    "SchedulerOutput.scheduled_cached_reqs renamed",
    "0.9: scheduled_running_reqs and scheduled_resumed_reqs joined",
    rename("scheduled_cached_reqs", "scheduled_known_reqs"),
)
_drift(
    "SchedulerOutput.scheduled_new_reqs renamed",
    "0.9: scheduled_running_reqs and scheduled_resumed_reqs joined",
    rename("scheduled_new_reqs", "scheduled_first_reqs"),
)
_drift(
    "SchedulerOutput.preempted_req_ids renamed",
    "0.12 brought it",
    rename("preempted_req_ids", "preempted_request_ids"),
)
_drift(
    "SchedulerOutput.num_scheduled_tokens by request object",
    "0.9: structured_output_request_ids from a dict to a list",
    swap(
        _OUTPUT,
        "    num_scheduled_tokens: dict[str, int]\n",
        "    num_scheduled_tokens: list[tuple[str, int]]\n",
    ),
)
_drift(
    "SchedulerOutput requires a field more",
    "0.11.1, 0.20: fields of the output",
    field(_OUTPUT, "SchedulerOutput", "step_id: int"),
    swap(
        _OUTPUT,
        "            scheduled_new_reqs=[],",
        "            step_id=0,\n            scheduled_new_reqs=[],",
    ),
    swap(
        _SCHEDULER,
        "        scheduler_output = SchedulerOutput(",
        "        scheduler_output = SchedulerOutput(step_id=1,",
    ),
)

# --- what requests and blocks are ---

_drift(
    "Request.skip_reading_prefix_cache renamed",
    "0.11.1 brought it",
    rename("skip_reading_prefix_cache", "bypass_prefix_cache"),
    rename("get_skip_reading_prefix_cache", "get_bypass_prefix_cache"),
)
_drift(
    "Request.block_hashes renamed",
    "0.20: block hashes became keys",
    swap("vllm/v1/request.py", "self.block_hashes: list", "self.prefix_hashes: list"),
    rename("request\\.block_hashes", "request.prefix_hashes"),
    rename("self\\.block_hashes", "self.prefix_hashes"),
)
_drift(
    "Request.cache_salt renamed",
    "0.9 brought it",
    rename("cache_salt", "prefix_salt"),
)
_drift(
    "Request.all_token_ids a method",
    "0.11.1: properties of the request",
    swap(
        "vllm/v1/request.py",
        "self.all_token_ids = ConstantList(self._all_token_ids)",
        "self.all_token_ids = lambda: self._all_token_ids",
    ),
)
_drift(
    "RequestStatus.FINISHED_ABORTED renamed",
    "0.13: FINISHED_ERROR, 0.25: FINISHED_REPETITION",
    rename("FINISHED_ABORTED", "FINISHED_CANCELLED"),
)
_drift(
    "RequestStatus.PREEMPTED renamed",
    "0.13: FINISHED_ERROR, 0.25: FINISHED_REPETITION",
    rename("PREEMPTED", "WAITING_PREEMPTED"),
)
_drift(
    "generate_block_hash_extra_keys requires an argument more",
    "0.12: hash_block_size of BlockPool",
    swap(
        _UTILS,
        "    request: Request, start_token_idx: int, end_token_idx: int, start_mm_idx: int\n) -> tuple[tuple",
        "    request: Request, start_token_idx: int, end_token_idx: int, start_mm_idx: int, tag: bool\n) -> tuple[tuple",
    ),
    swap(
        _UTILS,
        "                request, start_token_idx, end_token_idx, curr_mm_idx\n",
        "                request, start_token_idx, end_token_idx, curr_mm_idx, False\n",
    ),
)
_drift(
    "generate_block_hash_extra_keys answers keys alone",
    "0.16: TransferResult from a tuple to an object",
    swap(
        _UTILS,
        "    request: Request, start_token_idx: int, end_token_idx: int, start_mm_idx: int\n) -> tuple[tuple[Any, ...] | None, int]:",
        "    request: Request, start_token_idx: int, end_token_idx: int, start_mm_idx: int\n) -> tuple[Any, ...] | None:\n"
        "    return _extra_keys(request, start_token_idx, end_token_idx, start_mm_idx)[0]\n\n\n"
        "def _extra_keys(request: Request, start_token_idx: int, end_token_idx: int, start_mm_idx: int) -> Any:",
    ),
)
_drift(
    "KVCacheBlocks.get_block_ids renamed",
    "0.12, 0.24: methods of KVCacheBlocks",
    rename("get_block_ids", "to_block_ids"),
)
_drift(
    "KVCacheBlocks.get_block_ids gives one list",
    "0.9: a tuple of lists, one a group",
    swap(
        _BLOCKS,
        "return tuple([blk.block_id for blk in group] for group in groups)",
        "return [blk.block_id for group in groups for blk in group]",
        "        allow_none: bool = False,\n        *,\n        group_ids: Sequence[int] | None = None,\n    ) -> tuple[list[int], ...] | None:",
        "        allow_none: bool = False,\n        *,\n        group_ids: Sequence[int] | None = None,\n    ) -> list[int] | None:",
    ),
)
_drift(
    "KVCacheBlocks.get_block_ids requires a group",
    "0.26: allow_none and other arguments",
    swap(
        _BLOCKS,
        "        self,\n        allow_none: bool = False,\n",
        "        self,\n        layout: str,\n        allow_none: bool = False,\n",
    ),
    swap(_SCHEDULER, "get_block_ids(allow_none=True)", "get_block_ids('flat', allow_none=True)"),
)

# --- hooks of connectors ---

_drift(
    "KVConnectorBase_V1 requires a method more",
    "none so far; OffloadingManager did in 0.23",
    method(_BASE, "KVConnectorBase_V1", "price_of_load(self, request: Any) -> float"),
)
_drift(
    "SupportsHMA requires a method more",
    "OffloadingManager did in 0.23",
    method(_BASE, "SupportsHMA", "group_finished(self, request: Any, group: int) -> None"),
)
_drift(
    "KVConnectorMetadata requires a method",
    "LoadStoreSpec.medium was abstract up to 0.25.1",
    swap(_BASE, "class KVConnectorMetadata(ABC):  # noqa: B024", "class KVConnectorMetadata(ABC):"),
    method(_BASE, "KVConnectorMetadata", "num_bytes(self) -> int"),
)
_drift(
    "KVConnectorWorkerMetadata.aggregate renamed",
    "0.25: OffloadingHandler's methods",
    swap(
        _BASE,
        '    def aggregate(\n        self, other: "KVConnectorWorkerMetadata"',
        '    def merge(\n        self, other: "KVConnectorWorkerMetadata"',
    ),
)
_drift(
    "get_num_new_matched_tokens requires an argument more",
    "0.20: req_context of lookup",
    swap(
        _BASE,
        "        num_computed_tokens: int,\n    ) -> tuple[int | None, bool]:",
        "        num_computed_tokens: int,\n        kv_hints: Any,\n    ) -> tuple[int | None, bool]:",
    ),
    swap(
        _SCHEDULER,
        "self.connector.get_num_new_matched_tokens(\n                                request,",
        "self.connector.get_num_new_matched_tokens(\n                                request, kv_hints=None, num_computed_tokens=",
    ),
)
_drift(
    "get_num_new_matched_tokens answers an object",
    "0.16: TransferResult from a tuple to an object",
    swap(
        _BASE,
        "        num_computed_tokens: int,\n    ) -> tuple[int | None, bool]:",
        '        num_computed_tokens: int,\n    ) -> "PrefixMatch":',
    ),
)
_drift(
    "build_connector_meta requires the block state",
    "0.29: kv_connector_block_state",
    swap(
        _BASE,
        "        self, scheduler_output: SchedulerOutput\n    ) -> KVConnectorMetadata:",
        "        self, scheduler_output: SchedulerOutput, block_state: Any\n    ) -> KVConnectorMetadata:",
    ),
    swap(
        _SCHEDULER,
        "return connector.build_connector_meta(scheduler_output)",
        "return connector.build_connector_meta(scheduler_output, None)",
    ),
)
_drift(
    "update_state_after_alloc in another order",
    "0.21: req_context before success",
    swap(
        _BASE,
        'self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int',
        'self, request: "Request", num_external_tokens: int, blocks: "KVCacheBlocks"',
    ),
)
_drift(
    "request_finished_all_groups takes the blocks",
    "0.11.1: block_ids by group",
    swap(
        _BASE,
        '        request: "Request",\n        block_ids: tuple[list[int], ...],\n    ) -> tuple[bool',
        '        request: "Request",\n        blocks: "KVCacheBlocks",\n    ) -> tuple[bool',
    ),
)
_drift(
    "request_finished_all_groups answers an object",
    "0.16: TransferResult from a tuple to an object",
    swap(
        _BASE,
        "        block_ids: tuple[list[int], ...],\n    ) -> tuple[bool, dict[str, Any] | None]:",
        '        block_ids: tuple[list[int], ...],\n    ) -> "FinishedTransfer":',
    ),
)
_drift(
    "build_connector_worker_meta renamed",
    "0.30: get_transfer_results took over from get_finished",
    rename("build_connector_worker_meta", "collect_worker_meta"),
)
_drift(
    "has_pending_push_work renamed",
    "0.24 brought it",
    rename("has_pending_push_work", "has_pending_work"),
)
_drift(
    "get_block_ids_with_load_errors renamed",
    "0.11.1 brought it",
    rename("get_block_ids_with_load_errors", "get_failed_block_ids"),
)
_drift(
    "get_block_ids_with_load_errors by request",
    "0.30: failed_recving by request",
    swap(
        _BASE,
        "def get_block_ids_with_load_errors(self) -> set[int]:",
        "def get_block_ids_with_load_errors(self) -> dict[str, set[int]]:",
    ),
)
_drift(
    "get_transfer_results renamed",
    "0.30: get_transfer_results took over from get_finished",
    rename("get_transfer_results", "poll_transfers"),
)
_drift(
    "get_transfer_results answers a tuple",
    "0.16: TransferResult from a tuple to an object",
    swap(
        _BASE,
        "        return KVConnectorTransferResults(\n            finished_sending=set(finished_sending or ()),\n            finished_recving=set(finished_recving or ()),\n        )",
        "        return set(finished_sending or ()), set(finished_recving or ()), set()",
        "    ) -> KVConnectorTransferResults:",
        "    ) -> tuple[set[str], set[str], set[str]]:",
    ),
)
_drift(
    "take_events renamed",
    "0.20: names of the offloading interface",
    rename("take_events", "drain_events"),
)
_drift(
    "start_load_kv requires the metadata",
    "0.19: handle_preemptions takes the metadata",
    swap(
        _BASE,
        'def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:',
        'def start_load_kv(self, forward_context: "ForwardContext", metadata: Any, **kwargs: Any) -> None:',
    ),
)
_drift(
    "wait_for_save requires an argument",
    "0.19: handle_preemptions takes the metadata",
    swap(_BASE, "def wait_for_save(self):", "def wait_for_save(self, finished_req_ids: set[str]):"),
)
_drift(
    "reset_cache renamed",
    "0.13 brought it",
    swap(
        _BASE,
        "def reset_cache(self) -> bool | None:",
        "def reset_external_cache(self) -> bool | None:",
    ),
    swap(_SCHEDULER, "self.connector.reset_cache()", "self.connector.reset_external_cache()"),
)
_drift(
    "the scheduler's context takes the place of the bind",
    "PR #53067",
    rename("bind_kv_cache_manager", "bind_scheduler_context"),
)
_drift(
    "KVConnectorBase_V1 built in another order",
    "0.33: num_hash_lookahead_tokens put before medium",
    swap(
        _BASE,
        '        role: KVConnectorRole,\n        kv_cache_config: "KVCacheConfig",',
        '        kv_cache_config: "KVCacheConfig",\n        role: KVConnectorRole,',
    ),
)
_drift(
    "KVConnectorRole.SCHEDULER renamed",
    "0.30: BLOCK_LEVEL -> CHUNK_LEVEL",
    rename("KVConnectorRole\\.SCHEDULER", "KVConnectorRole.ENGINE"),
    swap(_BASE, "    SCHEDULER = 0\n", "    ENGINE = 0\n"),
)

# --- what workers report ---

_drift(
    "KVConnectorOutput.kv_connector_worker_meta renamed",
    "0.18 brought it",
    rename("kv_connector_worker_meta", "kv_connector_worker_metadata"),
)
_drift(
    "KVConnectorOutput.invalid_block_ids renamed",
    "0.11.1 brought it",
    rename("invalid_block_ids", "failed_block_ids"),
)
_drift(
    "KVConnectorOutput.failed_recving renamed",
    "0.30 brought it",
    rename("failed_recving", "failed_receiving"),
)
_drift(
    "KVConnectorOutput requires a field more",
    "0.11.1 - 0.30: five fields",
    field(_OUTPUTS, "KVConnectorOutput", "worker_rank: int"),
)

# --- events ---

_drift(
    "BlockStored requires a field more",
    "0.14: lora_name",
    swap(
        _EVENTS, "    lora_name: str | None\n\n", "    lora_name: str | None\n    tenant: str\n\n"
    ),
)
_drift(
    "BlockStored.block_hashes renamed",
    "0.20: block hashes became keys",
    rename("block_hashes", "block_keys"),
)
_drift(
    "BlockStored.medium an enum",
    "0.27: media of the offloading events",
    swap(
        _EVENTS,
        "    medium: str | None\n    lora_name",
        "    medium: Medium | None\n    lora_name",
        'MEDIUM_GPU = "GPU"\n',
        'MEDIUM_GPU = "GPU"\nimport enum\n\n\nclass Medium(enum.Enum):\n    GPU = "GPU"\n    CPU = "CPU"\n\n\n',
    ),
)
_drift("group_idx of events renamed", "0.20 brought it", rename("group_idx", "kv_cache_group"))
_drift(
    "maybe_convert_block_hash renamed",
    "0.11.1, 0.29: hash functions",
    rename("maybe_convert_block_hash", "to_external_hash"),
)

# --- geometry ---

_drift(
    "KVCacheConfig.kv_cache_groups renamed",
    "0.29: shared_by -> layers",
    rename("kv_cache_groups", "cache_groups"),
)
_drift(
    "KVCacheGroupSpec.layer_names renamed",
    "0.29: shared_by -> layers",
    rename("layer_names", "layers_of_group"),
)
_drift(
    "KVCacheConfig.num_blocks renamed",
    "0.33: hisparse_host_num_blocks beside it",
    rename("kv_cache_config\\.num_blocks", "kv_cache_config.num_device_blocks"),
    swap(
        "vllm/v1/kv_cache_interface.py",
        '    num_blocks: int\n    """The number of KV cache blocks"""\n',
        '    num_device_blocks: int\n    """The number of KV cache blocks"""\n',
        "            return self.num_blocks\n",
        "            return self.num_device_blocks\n",
    ),
)
_drift(
    "block_size of cache specs renamed",
    "0.26: tokens_per_block in offloading",
    rename("block_size", "tokens_per_block"),
)
_drift(
    "page_size_bytes renamed",
    "0.29: layouts of KVCacheTensor",
    rename("page_size_bytes", "page_bytes"),
)
_drift(
    "resolve_kv_cache_block_sizes answers an object",
    "0.16: TransferResult from a tuple to an object",
    swap(
        _UTILS,
        "def resolve_kv_cache_block_sizes(",
        "class BlockSizes:\n    def __init__(self, sizes):\n        self.scheduler, self.hash = sizes\n\n\ndef resolve_kv_cache_block_sizes(kv_cache_config, vllm_config):\n    return BlockSizes(_resolve(kv_cache_config, vllm_config))\n\n\ndef _resolve(",
    ),
)
_drift(
    "resolve_kv_cache_block_sizes in another order",
    "0.21: req_context before success",
    swap(
        _UTILS,
        "    kv_cache_config: KVCacheConfig,\n    vllm_config: VllmConfig,\n) -> tuple[int, int]:",
        "    vllm_config: VllmConfig,\n    kv_cache_config: KVCacheConfig,\n) -> tuple[int, int]:",
    ),
)
_drift(
    "SlidingWindowSpec.sliding_window renamed",
    "0.28: extra_retained_tokens",
    rename("sliding_window", "window_tokens"),
)

# --- the pool ---

_drift(
    "BlockPool.num_gpu_blocks renamed",
    "0.33: host blocks beside the GPU's",
    rename("num_gpu_blocks", "num_device_blocks"),
)
_drift(
    "free_blocks requires an argument",
    "0.23.0: prepend",
    swap(
        _POOL,
        "def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:",
        "def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock], reason: str) -> None:",
    ),
)
_drift(
    "touch takes groups again",
    "up to 0.13",
    swap(
        _POOL,
        "        for block in blocks:\n            if block.is_null:\n                continue\n            # ref",
        "        for block in (b for group in blocks for b in group):\n            if block.is_null:\n                continue\n            # ref",
    ),
)
_drift(
    "get_cached_block answers blocks by group",
    "0.24: block hashes by block",
    swap(
        _POOL,
        '    ) -> list[KVCacheBlock] | None:\n        """Get the cached block by the block hash for each group in',
        '    ) -> dict[int, KVCacheBlock] | None:\n        return dict(zip(kv_cache_group_ids, self._cached(block_hash, kv_cache_group_ids) or ())) or None\n\n    def _cached(self, block_hash, kv_cache_group_ids):\n        """Get the cached block by the block hash for each group in',
    ),
    rename("block_pool\\.get_cached_block", "block_pool._cached"),
)
_drift(
    "unpin_blocks in another order",
    "0.21: req_context before success",
    swap(
        _POOL,
        "        blocks: Iterable[KVCacheBlock],\n        on_reuse: Callable[[KVCacheBlock], None],\n",
        "        on_reuse: Callable[[KVCacheBlock], None],\n        blocks: Iterable[KVCacheBlock],\n",
    ),
)
_drift("_reuse_watchers renamed", "0.30 brought it", rename("_reuse_watchers", "_watchers"))
_drift(
    "cached_block_hashes_by_block renamed",
    "0.24 brought it",
    rename("cached_block_hashes_by_block", "extra_block_hashes"),
)
_drift(
    "num_free_blocks of the queue renamed",
    "0.26: iter_blocks_after",
    rename("num_free_blocks", "free_count"),
)
_drift(
    "hashes of blocks with the group in front",
    "0.11.1: bytes with the group behind",
    swap(
        _UTILS,
        'return BlockHashWithGroupId(block_hash + group_id.to_bytes(4, "big", signed=False))',
        'return BlockHashWithGroupId(group_id.to_bytes(4, "big", signed=False) + block_hash)',
        "return BlockHash(key[:-4])",
        "return BlockHash(key[4:])",
        'return int.from_bytes(key[-4:], "big", signed=False)',
        'return int.from_bytes(key[:4], "big", signed=False)',
    ),
)
_drift(
    "Scheduler.kv_cache_manager renamed",
    "0.30: bind_kv_cache_manager",
    swap(
        _SCHEDULER,
        "self.kv_cache_manager = KVCacheManager(",
        "self.cache_manager = KVCacheManager(",
    ),
    rename("self\\.kv_cache_manager", "self.cache_manager"),
)

# --- offloading ---

_drift(
    "OffloadingManager requires a method more",
    "0.23: on_new_request",
    method(_OFFLOAD, "OffloadingManager", "on_idle(self) -> None"),
    swap(
        _CPU,
        "class CPUOffloadingManager(OffloadingManager):",
        "class CPUOffloadingManager(OffloadingManager):\n    def on_idle(self) -> None: ...\n",
    ),
)
_drift(
    "OffloadingSpec requires a method more",
    "0.25: get_worker",
    method(_OFFLOAD, "OffloadingSpec", "get_tiers(self) -> list[Any]"),
)
_drift(
    "OffloadingWorker requires a method more",
    "0.14: wait of OffloadingHandler",
    method(_OFFLOAD, "OffloadingWorker", "cancel(self, job_id: int) -> None"),
)
_drift(
    "LoadStoreSpec requires a method",
    "up to 0.25.1: medium",
    swap(_OFFLOAD, "class LoadStoreSpec:", "class LoadStoreSpec(ABC):"),
    method(_OFFLOAD, "LoadStoreSpec", "medium(self) -> str"),
    swap(
        _OFFLOAD,
        "class GPULoadStoreSpec(BlockIDsLoadStoreSpec):",
        "class GPULoadStoreSpec(BlockIDsLoadStoreSpec):\n    medium = None\n",
    ),
)
_drift(
    "LookupResult.HIT_PENDING renamed",
    "0.30: BLOCK_LEVEL -> CHUNK_LEVEL",
    rename("HIT_PENDING", "HIT_LATER"),
)
_drift(
    "LookupResult.RETRY removed", "0.25: bool or None -> LookupResult", rename("RETRY", "DEFERRED")
)
_drift(
    "lookup answers an object",
    "0.25: bool or None -> LookupResult",
    swap(
        _OFFLOAD,
        '    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:\n        """Checks',
        '    def lookup(self, key: OffloadKey, req_context: ReqContext) -> tuple[LookupResult, str]:\n        """Checks',
    ),
)
_drift(
    "lookup takes several keys",
    "up to 0.19.1",
    swap(
        _OFFLOAD,
        "    def lookup(self, key: OffloadKey, req_context",
        "    def lookup(self, keys: Sequence[OffloadKey], req_context",
    ),
)
_drift(
    "prepare_store answers a tuple",
    "0.16: TransferResult from a tuple to an object",
    swap(
        _OFFLOAD,
        "    ) -> PrepareStoreOutput | None:",
        "    ) -> tuple[list[OffloadKey], LoadStoreSpec, list[OffloadKey]] | None:",
    ),
)
_drift(
    "PrepareStoreOutput.evicted_keys renamed",
    "0.20: block_hashes_evicted -> evicted_keys",
    rename("evicted_keys", "keys_evicted"),
)
_drift(
    "PrepareStoreOutput requires a field more",
    "0.26 - 0.33: fields of OffloadingEvent",
    field(_OFFLOAD, "PrepareStoreOutput", "tier: str"),
    rename("PrepareStoreOutput\\(", "PrepareStoreOutput(tier='cpu', "),
)
_drift(
    "OffloadingEvent.keys renamed",
    "0.20: block_hashes -> keys",
    swap(
        _OFFLOAD,
        "    keys: list[OffloadKey]\n    medium: Medium",
        "    offload_keys: list[OffloadKey]\n    medium: Medium",
    ),
)
_drift(
    "OffloadingEvent requires a field more",
    "0.29: ownership",
    field(_OFFLOAD, "OffloadingEvent", "tier: str"),
)
_drift(
    "ReqContext requires a field more",
    "0.22: req_id",
    field(_OFFLOAD, "ReqContext", "tenant: str"),
    rename("ReqContext\\(req_id", "ReqContext(tenant='', req_id"),
)
_drift(
    "ReqContext.req_id renamed",
    "0.22 brought it",
    swap(_OFFLOAD, "class ReqContext:\n    req_id: str", "class ReqContext:\n    request_id: str"),
    rename("req_context\\.req_id", "req_context.request_id"),
    rename("ctx\\.req_id", "ctx.request_id"),
)
_drift(
    "TransferResult requires a field more",
    "0.16: sizes and times",
    field(_OFFLOAD, "TransferResult", "direction: str"),
)
_drift(
    "TransferResult.transfer_time renamed",
    "0.25: transfer_type gone",
    rename("transfer_time", "seconds"),
)
_drift(
    "submit_load requires an argument more",
    "0.33: expedited",
    swap(
        _OFFLOAD,
        "        expedited: bool = False,\n    ) -> bool:",
        "        expedited: bool,\n        deadline: float,\n    ) -> bool:",
    ),
)
_drift(
    "submit_store in another order",
    "0.25: directions of OffloadingHandler",
    swap(
        _OFFLOAD,
        "self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec",
        "self, job_id: int, dst_spec: LoadStoreSpec, src_spec: GPULoadStoreSpec",
    ),
)
_drift(
    "complete_store fails by default",
    "0.21: req_context before success",
    swap(
        _OFFLOAD, "        success: bool = True,\n    ):", "        success: bool = False,\n    ):"
    ),
)
_drift(
    "GPULoadStoreSpec.block_ids renamed",
    "0.20: block_indices required",
    swap(
        _OFFLOAD,
        "self.block_ids = np.array",
        "self.page_ids = np.array",
        "return repr(self.block_ids)",
        "return repr(self.page_ids)",
    ),
)
_drift(
    "Medium.CPU renamed",
    "0.26: FS and OBJ -> STORAGE",
    swap(_OFFLOAD, '    CPU = "CPU"\n', '    HOST = "HOST"\n'),
    rename("Medium\\.CPU", "Medium.HOST"),
)
_drift(
    "RequestOffloadingContext requires a policy",
    "0.30: BLOCK_LEVEL -> CHUNK_LEVEL",
    swap(
        _OFFLOAD,
        "    policy: OffloadPolicy = OffloadPolicy.CHUNK_LEVEL",
        "    policy: OffloadPolicy",
    ),
)
_drift(
    "ScheduleEndContext requires a field more",
    "0.25 brought it",
    field(_OFFLOAD, "ScheduleEndContext", "step: int"),
    rename("ScheduleEndContext\\(", "ScheduleEndContext(step=0, "),
    swap(
        _OFFLOAD,
        "class ScheduleEndContext(step=0, NamedTuple)",
        "class ScheduleEndContext(NamedTuple)",
    ),
)
_drift(
    "CanonicalKVCaches.tensors renamed",
    "0.19 brought it",
    swap(
        _OFFLOAD,
        "    tensors: list[CanonicalKVCacheTensor]",
        "    pages: list[CanonicalKVCacheTensor]",
    ),
    rename("CanonicalKVCaches\\(tensors", "CanonicalKVCaches(pages"),
    rename("kv_caches\\.tensors", "kv_caches.pages"),
)
_drift(
    "OffloadingSpec.extra_config renamed",
    "0.26: OffloadingConfig",
    rename("self\\.extra_config", "self.options"),
)
_drift(
    "OffloadingSpec.blocks_per_chunk renamed",
    "0.26: block_size_factor -> blocks_per_chunk",
    rename("blocks_per_chunk", "blocks_per_unit"),
)
_drift(
    "OffloadingManager.lock a method",
    "0.33 brought it",
    swap(_OFFLOAD, "    @property\n    def lock(self)", "    def lock(self)"),
    rename("manager\\.lock", "manager.lock()"),
)
_drift(
    "get_worker requires an argument more",
    "0.12: attn_backends",
    swap(
        _OFFLOAD,
        "def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:",
        "def get_worker(self, kv_caches: CanonicalKVCaches, rank: int) -> OffloadingWorker:",
    ),
)


# --- trees of sources ---


def _write_tree(whole: Path, folder: Path, changed: Files) -> None:
    """Sources with some files changed: links, but for those and the folders above them."""
    if folder.exists():
        for path, folders, files in os.walk(folder, topdown=False):
            for name in (*files, *folders):
                one = Path(path, name)
                one.rmdir() if one.is_dir() and not one.is_symlink() else one.unlink()
        folder.rmdir()
    above = {str(parent) for path in changed for parent in Path(path).parents} | {"."}

    def write(inside: str) -> None:
        (folder / inside).mkdir()
        for one in (whole / inside).iterdir():
            path = os.path.normpath(Path(inside, one.name))
            if path in above:
                write(path)
            elif path in changed:
                (folder / path).write_text(changed[path])
            else:
                (folder / path).symlink_to(one)

    write(".")


# --- the verdict ---


@dataclass(frozen=True)
class Verdict:
    """What became of one drift.

    Args:
        name: Of the drift.
        outcomes: ``works``, ``refused``, or how it got through, by way in.
        messages: What was said, by way in.
    """

    name: str
    outcomes: dict[str, str]
    messages: dict[str, str]

    @property
    def got_through(self) -> bool:
        """Whether anything is neither right nor refused, or refused where doctor is healthy."""
        ways = [outcome for way, outcome in self.outcomes.items() if way != "doctor"]
        if any(outcome not in ("works", "refused") for outcome in ways):
            return True
        return "refused" in ways and self.outcomes["doctor"] != "refused"


def judge(name: str, answers: dict[str, Answer], normal: dict[str, Answer]) -> Verdict:
    """Compare a drift's answers with those of the sources as they are."""
    outcomes: dict[str, str] = {}
    messages: dict[str, str] = {}
    for way, answer in answers.items():
        said = str(answer["error"])
        if way == "vllm":
            outcomes[way] = "vLLM itself is broken"
        elif way == "doctor" and answer["stage"] == "done":
            outcomes[way] = "refused" if answer["saw"] else "healthy"
            said = "; ".join(f"{seam}: {detail}" for seam, detail in answer["saw"])
        elif answer["stage"] == "done":
            same = answer["saw"] == normal[way]["saw"]
            outcomes[way] = "works" if same else "swallowed: it saw something else"
        elif answer["stage"] == "bind" and answer["kind"] == "UnsupportedEngineError":
            outcomes[way] = "refused" if "\n" not in said else "refused in several lines"
        else:
            when = "at bind" if answer["stage"] == "bind" else "at a request"
            outcomes[way] = f"{answer['kind']} {when}"
        messages[way] = said
    return Verdict(name, outcomes, messages)


def play(names: Sequence[str], processes: int) -> Iterator[Verdict]:
    """Plant drifts and play on each.

    Raises:
        DriftError: A drift does not fit the newest sources.
    """
    files = Sources(sources(NEWEST))
    files.all()
    normal = prepare(files.folder)
    broken = {way: answer["error"] for way, answer in normal.items() if answer["stage"] != "done"}
    if broken or normal["doctor"]["saw"]:
        raise DriftError(f"{NEWEST} as it is does not play: {broken} {normal['doctor']['saw']}")
    trees = [(name, partial(DRIFTS[name].plant, files)) for name in names]
    with tempfile.TemporaryDirectory(prefix="kvview-drifts-") as scratch:
        for name, answers in play_each(trees, Path(scratch), processes):
            yield judge(name, answers, normal)


def main() -> int:
    parser = argparse.ArgumentParser(description="Drifts planted into the newest vLLM.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of names; default: all")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts here")
    arguments = parser.parse_args()
    names = [
        name
        for name in DRIFTS
        if not arguments.names or any(part in name for part in arguments.names)
    ]
    verdicts = []
    for verdict in play(names, arguments.processes):
        verdicts.append(verdict)
        mark = "THROUGH" if verdict.got_through else "ok"
        ways = ", ".join(f"{way} {outcome}" for way, outcome in verdict.outcomes.items())
        print(f"{mark:8}{verdict.name}: {ways}", flush=True)
    through = [verdict for verdict in verdicts if verdict.got_through]
    print(f"{len(through)} of {len(verdicts)} drifts get through")
    if arguments.json:
        arguments.json.write_text(json.dumps([vars(one) for one in verdicts], indent=2) + "\n")
    return 1 if through else 0


if __name__ == "__main__":
    sys.exit(main())
