"""The shape of every member of vLLM that the adapter reads, builds or overrides, by release.

1. A release **must** have every member that it has by this table, in the shape said here:
   names, order and defaults of parameters, and what comes back; or the type of a field.
2. Of a version that names no release, each member that it has **must** have a shape of
   this table.
3. What a release has beyond the table is nobody's concern, unless it must be written:
   :func:`require_concrete`.

A row that a later release changes gets an ``until``, and a row beside it says what came.

Source: the modules named in the table, every tested release.
"""

from __future__ import annotations

import ast
import dis
import enum
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from kvview import KVViewError
from kvview_vllm.releases.release import (
    BindingSeam,
    ConnectorSeam,
    GeometrySeam,
    OffloadingSeam,
    PoolSeam,
    find_class,
    signature_of,
)
from kvview_vllm.releases.versions import (
    OLDEST_TESTED,
    importing,
    number,
    refusal,
    require_usable,
)

_MEMBER = "a member"
_PROPERTY = "a property"
_ANY = ""  # whatever it is typed


@dataclass(frozen=True)
class Shape:
    """One row.

    Args:
        owner: Class, or module where the name is a function's.
        name: Of the member.
        shape: ``(a, b=1) -> int`` of a method, ``int`` of a field, ``a property``,
            ``a member`` of an enum; empty where only the name counts, and of what the
            constructor sets.
        since: First release that has it so.
        until: Last release that has it so, None when the newest tested has.
    """

    owner: str
    name: str
    shape: str
    since: str = OLDEST_TESTED
    until: str | None = None

    def is_in(self, version: str) -> bool:
        """Whether a release has it so; no version that names no release has."""
        found, last = number(version), number(self.until or "")
        return (
            found is not None
            and found >= (number(self.since) or found)
            and (last is None or found <= last)
        )


def _rows(owner: str, *rows: tuple[str, ...]) -> tuple[Shape, ...]:
    return tuple(Shape(owner, *row) for row in rows)


_KV = "vllm.distributed.kv_transfer.kv_connector.v1"
_STEP = "vllm.v1.core.sched.output"
_UTILS = "vllm.v1.core.kv_cache_utils"
_INTERFACE = "vllm.v1.kv_cache_interface"

_FINISHED = "tuple[bool, dict[str, Any] | None]"

_CONNECTOR = (
    *_rows(
        f"{_KV}.base:KVConnectorBase_V1",
        ("__init__", "(vllm_config, role)", OLDEST_TESTED, "0.11.0"),
        ("__init__", "(vllm_config, role, kv_cache_config=None)", "0.11.1", "0.20.2"),
        ("__init__", "(vllm_config, role, kv_cache_config)", "0.21.0"),
        ("get_num_new_matched_tokens", "(request, num_computed_tokens) -> tuple[int | None, bool]"),
        ("update_state_after_alloc", "(request, blocks, num_external_tokens)"),
        ("build_connector_meta", "(scheduler_output) -> KVConnectorMetadata"),
        ("update_connector_output", "(connector_output)"),
        ("request_finished", f"(request, block_ids) -> {_FINISHED}"),
        ("take_events", "() -> Iterable[KVCacheEvent]"),
        ("register_kv_caches", "(kv_caches)"),
        ("start_load_kv", "(forward_context, **kwargs) -> None"),
        ("wait_for_layer_load", "(layer_name) -> None"),
        ("save_kv_layer", "(layer_name, kv_layer, attn_metadata, **kwargs) -> None"),
        ("wait_for_save", "()"),
        ("get_finished", "(finished_req_ids) -> tuple[set[str] | None, set[str] | None]"),
        ("get_kv_connector_stats", "() -> KVConnectorStats | None"),
        ("build_kv_connector_stats", "(data=None) -> KVConnectorStats | None"),
        (
            "build_prom_metrics",
            "(vllm_config, metric_types, labelnames, per_engine_labelvalues)"
            " -> KVConnectorPromMetrics | None",
            "0.11.1",
        ),
        ("shutdown", "()"),
        ("_get_connector_metadata", "() -> KVConnectorMetadata"),
        ("get_block_ids_with_load_errors", "() -> set[int]", "0.11.1"),
        ("reset_cache", "() -> bool | None", "0.13.0"),
        ("build_connector_worker_meta", "() -> KVConnectorWorkerMetadata | None", "0.18.0"),
        ("bind_gpu_block_pool", "(gpu_block_pool) -> None", "0.22.0"),
        ("has_pending_push_work", "() -> bool", "0.24.0"),
        ("requires_kv_delivery", _PROPERTY, "0.27.0"),
        ("get_transfer_results", "(finished_req_ids) -> KVConnectorTransferResults", "0.30.0"),
        ("bind_kv_cache_manager", "(kv_cache_manager) -> None", "0.30.0"),
    ),
    *_rows(
        f"{_KV}.base:SupportsHMA",
        ("request_finished_all_groups", f"(request, block_ids) -> {_FINISHED}", "0.11.1"),
    ),
    *_rows(
        f"{_KV}.base:KVConnectorWorkerMetadata",
        ("aggregate", "(other) -> KVConnectorWorkerMetadata", "0.18.0"),
    ),
    *_rows(
        f"{_KV}.base:KVConnectorTransferResults",
        ("finished_recving", "set[str]", "0.30.0"),
        ("failed_recving", "set[str]", "0.30.0"),
    ),
    *_rows(f"{_KV}.base:KVConnectorRole", ("SCHEDULER", _MEMBER), ("WORKER", _MEMBER)),
    *_rows(
        f"{_KV}.metrics:KVConnectorStats",
        ("data", "dict[str, Any]"),
        ("reset", "()"),
        ("aggregate", "(other) -> KVConnectorStats"),
        ("reduce", "() -> dict[str, int | float]"),
        ("is_empty", "() -> bool"),
    ),
    *_rows(
        f"{_STEP}:SchedulerOutput",
        ("scheduled_new_reqs", "list[NewRequestData]"),
        ("scheduled_cached_reqs", "CachedRequestData"),
        ("num_scheduled_tokens", "dict[str, int]"),
        ("preempted_req_ids", "set[str] | None", "0.12.0"),
    ),
    *_rows(
        f"{_STEP}:CachedRequestData",
        ("req_ids", "list[str]"),
        ("new_block_ids", "list[tuple[list[int], ...] | None]"),
        ("num_computed_tokens", "list[int]"),
        ("resumed_from_preemption", "list[bool]", OLDEST_TESTED, "0.11.0"),
        ("resumed_req_ids", "set[str]", "0.11.1"),
    ),
    *_rows(
        f"{_STEP}:NewRequestData",
        ("req_id", "str"),
        ("block_ids", "tuple[list[int], ...]"),
        ("num_computed_tokens", "int"),
    ),
    *_rows(
        "vllm.v1.outputs:KVConnectorOutput",
        ("finished_sending", "set[str] | None"),
        ("finished_recving", "set[str] | None"),
        ("kv_connector_stats", _ANY),
        ("invalid_block_ids", "set[int]", "0.11.1"),
        ("kv_connector_worker_meta", _ANY, "0.18.0"),
        ("failed_recving", "set[str]", "0.30.0"),
    ),
    *_rows(
        "vllm.v1.request:RequestStatus",
        ("PREEMPTED", _MEMBER),
        ("FINISHED_ABORTED", _MEMBER),
        ("FINISHED_IGNORED", _MEMBER),
        ("FINISHED_ERROR", _MEMBER, "0.13.0"),
    ),
    *_rows(
        "vllm.v1.core.kv_cache_manager:KVCacheBlocks",
        (
            *("get_block_ids", "(allow_none=False) -> tuple[list[int], ...] | None"),
            *(OLDEST_TESTED, "0.29.0"),
        ),
        (
            "get_block_ids",
            "(allow_none=False, group_ids=None) -> tuple[list[int], ...] | None",
            "0.30.0",
        ),
    ),
    *_rows(
        "vllm.distributed.kv_events:BlockStored",
        ("block_hashes", _ANY),
        ("parent_block_hash", _ANY),
        ("token_ids", "list[int]"),
        ("block_size", "int"),
        ("lora_id", "int | None"),
        ("medium", "str | None"),
        ("lora_name", "str | None", "0.14.0"),
        ("group_idx", "int | None", "0.20.0"),
    ),
    *_rows(
        "vllm.distributed.kv_events:BlockRemoved",
        ("block_hashes", _ANY),
        ("medium", "str | None"),
        ("group_idx", "int | None", "0.20.0"),
    ),
    *_rows(
        _UTILS,
        ("maybe_convert_block_hash", "(hash_bytes) -> bytes | int"),
        (
            "generate_block_hash_extra_keys",
            "(request, start_token_idx, end_token_idx, start_mm_idx)"
            " -> tuple[tuple[Any, ...] | None, int]",
        ),
    ),
)

_GEOMETRY = (
    *_rows(
        _UTILS,
        (
            "resolve_kv_cache_block_sizes",
            "(kv_cache_config, vllm_config) -> tuple[int, int]",
            "0.20.0",
        ),
    ),
    *_rows(
        f"{_INTERFACE}:KVCacheConfig",
        ("num_blocks", "int"),
        ("kv_cache_groups", "list[KVCacheGroupSpec]"),
    ),
    *_rows(
        f"{_INTERFACE}:KVCacheGroupSpec",
        ("layer_names", "list[str]"),
        ("kv_cache_spec", "KVCacheSpec"),
    ),
    *_rows(f"{_INTERFACE}:KVCacheSpec", ("block_size", "int"), ("page_size_bytes", _PROPERTY)),
    *_rows(f"{_INTERFACE}:SlidingWindowSpec", ("sliding_window", "int")),
    *_rows(f"{_INTERFACE}:ChunkedLocalAttentionSpec", ("attention_chunk_size", "int")),
    *_rows(f"{_INTERFACE}:MambaSpec", ("num_speculative_blocks", "int")),
)

_POOL = _rows(
    "vllm.v1.core.block_pool:BlockPool",
    ("touch", "(blocks) -> None"),
    ("free_blocks", "(ordered_blocks) -> None", OLDEST_TESTED, "0.22.1"),
    ("free_blocks", "(ordered_blocks, prepend=False) -> None", "0.23.0", "0.23.0"),
    ("free_blocks", "(ordered_blocks) -> None", "0.24.0"),
    ("get_cached_block", "(block_hash, kv_cache_group_ids) -> list[KVCacheBlock] | None"),
    ("get_num_free_blocks", "() -> int"),
    ("_maybe_evict_cached_block", "(block) -> bool", OLDEST_TESTED, "0.12.0"),
    ("evict_blocks", "(block_ids) -> None", "0.13.0", "0.17.1"),
    ("unpin_blocks", "(blocks, on_reuse) -> None", "0.30.0"),
)

_BINDING = _rows(
    f"{_KV}.base:KVConnectorBase_V1",
    ("bind_gpu_block_pool", "(gpu_block_pool) -> None", "0.22.0"),
    ("bind_kv_cache_manager", "(kv_cache_manager) -> None", "0.30.0"),
)

_CACHES = "CanonicalKVCaches"
_OFFLOADING = (
    *_rows(
        "OffloadingManager",
        ("lookup", "(block_hashes) -> int", OLDEST_TESTED, "0.14.1"),
        ("lookup", "(block_hashes) -> int | None", "0.15.0", "0.19.1"),
        ("lookup", "(key, req_context) -> bool | None", "0.20.0", "0.24.0"),
        ("lookup", "(key, req_context) -> LookupResult", "0.25.0"),
        ("prepare_load", "(block_hashes) -> LoadStoreSpec", OLDEST_TESTED, "0.19.1"),
        ("prepare_load", "(keys, req_context) -> LoadStoreSpec", "0.20.0"),
        ("prepare_store", "(block_hashes) -> PrepareStoreOutput | None", OLDEST_TESTED, "0.19.1"),
        ("prepare_store", "(keys, req_context) -> PrepareStoreOutput | None", "0.20.0"),
        ("touch", "(block_hashes)", OLDEST_TESTED, "0.19.1"),
        ("touch", "(keys)", "0.20.0", "0.20.2"),
        ("touch", "(keys, req_context)", "0.21.0"),
        ("complete_load", "(block_hashes)", OLDEST_TESTED, "0.19.1"),
        ("complete_load", "(keys)", "0.20.0", "0.20.2"),
        ("complete_load", "(keys, req_context)", "0.21.0"),
        ("complete_store", "(block_hashes, success=True)", OLDEST_TESTED, "0.19.1"),
        ("complete_store", "(keys, success=True)", "0.20.0", "0.20.2"),
        ("complete_store", "(keys, req_context, success=True)", "0.21.0"),
        ("take_events", "() -> Iterable[OffloadingEvent]"),
        ("shutdown", "() -> None", "0.20.0"),
        ("reset_cache", "() -> None", "0.22.0"),
        ("on_new_request", "(req_context) -> RequestOffloadingContext", "0.23.0"),
        ("on_request_finished", "(req_context) -> None", "0.23.0"),
        ("on_schedule_end", "() -> None", "0.23.0", "0.24.0"),
        ("on_schedule_end", "(context) -> None", "0.25.0"),
        ("has_pending_work", "() -> bool", "0.24.0"),
        ("lock", _PROPERTY, "0.33.0"),
    ),
    *_rows(
        "OffloadingSpec",
        ("__init__", "(vllm_config)", OLDEST_TESTED, "0.13.0"),
        ("__init__", "(vllm_config, kv_cache_config)", "0.14.0", "0.25.1"),
        ("__init__", "(config)", "0.26.0"),
        ("get_manager", "() -> OffloadingManager"),
        ("get_handlers", _ANY, OLDEST_TESTED, "0.24.0"),
        ("get_worker", "(kv_caches) -> OffloadingWorker", "0.25.0"),
        ("extra_config", _ANY),
        ("gpu_block_size", _ANY, OLDEST_TESTED, "0.25.1"),
        ("offloaded_block_size", _ANY, OLDEST_TESTED, "0.17.1"),
        ("kv_cache_config", _ANY, "0.14.0", "0.25.1"),
        ("block_size_factor", _ANY, "0.18.0", "0.25.1"),
        ("blocks_per_chunk", _ANY, "0.26.0"),
    ),
    *_rows(
        "OffloadingHandler",
        ("transfer_async", "(job_id, spec) -> bool", OLDEST_TESTED, "0.24.0"),
        ("get_finished", "() -> list[tuple[int, bool]]", OLDEST_TESTED, "0.15.1"),
        ("get_finished", "() -> list[TransferResult]", "0.16.0", "0.24.0"),
        ("wait", "(job_ids) -> None", "0.14.0", "0.24.0"),
    ),
    *_rows(
        "OffloadingWorker",
        ("submit_store", "(job_id, src_spec, dst_spec) -> bool", "0.25.0"),
        ("submit_load", "(job_id, src_spec, dst_spec) -> bool", "0.25.0", "0.32.0"),
        ("submit_load", "(job_id, src_spec, dst_spec, expedited=False) -> bool", "0.33.0"),
        ("get_finished", "() -> list[TransferResult]", "0.25.0"),
        ("wait", "(job_ids) -> None", "0.25.0"),
        ("shutdown", "() -> None", "0.25.0"),
    ),
    *_rows(
        "LookupResult",
        *((name, _MEMBER, "0.25.0") for name in ("MISS", "HIT", "HIT_PENDING", "RETRY")),
    ),
    *_rows("Medium", ("CPU", _MEMBER, "0.27.0"), ("STORAGE", _MEMBER, "0.27.0")),
    *_rows(
        "ReqContext",
        ("kv_transfer_params", "dict[str, Any] | None", "0.20.0"),
        ("req_id", "str", "0.22.0"),
        ("get_offload_key_position", "(key) -> int | None", "0.31.0"),
    ),
    *_rows(
        "PrepareStoreOutput",
        ("block_hashes_to_store", _ANY, OLDEST_TESTED, "0.19.1"),
        ("block_hashes_evicted", _ANY, OLDEST_TESTED, "0.19.1"),
        ("keys_to_store", "list[OffloadKey]", "0.20.0"),
        ("evicted_keys", "list[OffloadKey]", "0.20.0"),
        ("store_spec", "LoadStoreSpec"),
    ),
    *_rows(
        "OffloadingEvent",
        ("block_hashes", _ANY, OLDEST_TESTED, "0.19.1"),
        ("keys", "list[OffloadKey]", "0.20.0"),
        ("medium", "str", OLDEST_TESTED, "0.26.0"),
        ("medium", "Medium", "0.27.0"),
        ("removed", "bool"),
        ("metadata_only", "bool", "0.33.0"),
    ),
    *_rows(
        "CanonicalKVCacheTensor", ("tensor", _ANY, "0.19.0"), ("page_size_bytes", "int", "0.19.0")
    ),
    *_rows(
        "CanonicalKVCacheRef", ("tensor_idx", "int", "0.19.0"), ("page_size_bytes", "int", "0.19.0")
    ),
    *_rows(
        _CACHES,
        ("tensors", "list[CanonicalKVCacheTensor]", "0.19.0"),
        ("group_data_refs", "list[list[CanonicalKVCacheRef]]", "0.19.0"),
    ),
)

SHAPES: Mapping[str, tuple[Shape, ...]] = {
    PoolSeam.seam: _POOL,
    BindingSeam.seam: _BINDING,
    GeometrySeam.seam: _GEOMETRY,
    OffloadingSeam.seam: _OFFLOADING,
    ConnectorSeam.seam: _CONNECTOR,
}
"""The table, by seam."""


@cache
def check_shapes(seam: str) -> None:
    """Compare the installed vLLM with the table, once in a process.

    Raises:
        UnsupportedEngineError: A member is missing, or has a shape of no tested release.
        VLLMNotInstalledError: No vLLM can be imported.
    """
    version = require_usable(seam)
    known: dict[tuple[str, str], list[Shape]] = {}
    for row in SHAPES[seam]:
        known.setdefault((row.owner, row.name), []).append(row)
    for (owner, name), rows in known.items():
        here = [row for row in rows if row.is_in(version)]
        if number(version) is not None and not here:
            continue  # before it came, or after it went
        found = shape_of(owner_of(owner), name)
        wanted = [row.shape for row in here or rows]
        if found is None and not here:
            continue  # a version of no name may be of any age
        if found is None or (_ANY not in wanted and found not in wanted):
            what = f"{owner.rpartition(':')[2].rpartition('.')[2]}.{name}"
            shape = "missing" if found is None else found
            raise refusal(seam, f"{what} {shape}", " or ".join(f"{what} {each}" for each in wanted))


def shape_of(owner: Any, name: str) -> str | None:
    """The shape of a member, in the words of the table; None when there is no such member."""
    if owner is None:
        return None
    if isinstance(owner, enum.EnumMeta):
        return _MEMBER if name in owner.__members__ else None
    for kind in inspect.getmro(owner) if isinstance(owner, type) else ():
        if name in (annotations := inspect.get_annotations(kind)):
            return _plain(annotations[name])
    found = inspect.getattr_static(owner, name, None)
    if found is None:
        return _ANY if _is_set_by_constructor(owner, name) else None
    if isinstance(found, property):
        return _PROPERTY
    if not callable(member := getattr(owner, name)):
        return _ANY
    shape = signature_of(owner, name)
    try:
        returned = inspect.signature(member).return_annotation
    except (TypeError, ValueError):  # signature_of said so
        return shape
    if name == "__init__" or returned is inspect.Signature.empty:
        return shape
    return f"{shape} -> {_plain(returned)}"


def _is_set_by_constructor(owner: Any, name: str) -> bool:
    """Whether every object of a class has an attribute, though the class has none.

    The constructor of a dataclass sets fields alone, and those are looked up by their types.
    """
    if not isinstance(owner, type) or is_dataclass(owner):
        return False
    for kind in inspect.getmro(owner):
        code = getattr(vars(kind).get("__init__"), "__code__", None)
        for step in dis.get_instructions(code) if code else ():
            if step.opname == "STORE_ATTR" and step.argval == name:
                return True
    return False


def require_concrete(seam: str, kind: type) -> None:
    """Refuse a base class of vLLM's that requires what a class of ours does not have.

    Raises:
        UnsupportedEngineError: It could not be built.
    """
    missing: frozenset[str] = vars(kind).get("__abstractmethods__", frozenset())
    if missing:
        base = next(base for base in kind.__mro__ if missing & vars(base).keys())
        raise refusal(
            seam,
            f"{base.__name__} that requires {', '.join(sorted(missing))}",
            f"that it requires nothing beyond what {kind.__name__} has",
        )


@contextmanager
def reading(seam: str, what: str) -> Iterator[None]:
    """Whatever goes wrong in here is an unknown shape, and is refused in one line.

    Args:
        seam: Which vLLM surface is read.
        what: What is read of it.

    Raises:
        UnsupportedEngineError: Something went wrong.
    """
    try:
        with importing():
            yield
    except KVViewError:
        raise
    except Exception as error:
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        where = (
            f" at {Path(place.tb_frame.f_code.co_filename).name}:{place.tb_lineno}" if place else ""
        )
        said = " ".join(str(error).split())
        raise refusal(seam, f"{what} fails: {type(error).__name__}: {said}{where}", what) from error


def expect(seam: str, what: str, found: object, expected: object) -> None:
    """Refuse a vLLM that answers otherwise than every tested release.

    Raises:
        UnsupportedEngineError: It does.
    """
    if found != expected:
        raise refusal(seam, f"{what}: {found!r}", repr(expected))


def members_of(kind: type) -> dict[str, str | None]:
    """The shapes of all that a class has of its own and in public."""
    names = [*vars(kind), *inspect.get_annotations(kind)]
    return {name: shape_of(kind, name) for name in names if not name.startswith("_")}


def owner_of(name: str) -> Any:
    """The class or module of a row; None where the release has no such class."""
    module, _, kind = name.partition(":")
    if "." not in module:
        return find_class(module)
    try:
        found = import_module(module)
    except ImportError:
        return None
    return getattr(found, kind, None) if kind else found


def _plain(annotation: Any) -> str:
    """An annotation as text, whichever way it was written."""
    if annotation is None or annotation is type(None):
        return "None"
    if isinstance(annotation, type) and not hasattr(annotation, "__args__"):
        return annotation.__name__
    text = annotation if isinstance(annotation, str) else repr(annotation)
    return plain_text(text)


@cache
def plain_text(text: str) -> str:
    """An annotation without modules, strings and other ways to write the same."""
    text = re.sub(r"<(?:class|enum) '([^']*)'>", r"\1", text)
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        return text
    return ast.unparse(_Plain().visit(tree))


class _Plain(ast.NodeTransformer):
    """Names without their modules, ``X | None`` for ``Optional[X]``, no strings."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return ast.Name(node.attr)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            return self.visit(ast.parse(node.value, mode="eval").body)  # type: ignore[no-any-return]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:  # ForwardRef('X', ...)
        return self.visit(node.args[0])  # type: ignore[no-any-return]

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(None) if node.id == "NoneType" else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        kind = node.value.id if isinstance(node.value, ast.Name) else ""
        if kind == "Optional":
            return ast.BinOp(node.slice, ast.BitOr(), ast.Constant(None))
        if kind == "Union" and isinstance(node.slice, ast.Tuple):
            first, *others = node.slice.elts
            for other in others:
                first = ast.BinOp(first, ast.BitOr(), other)
            return first
        return node
