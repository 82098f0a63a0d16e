"""What differs between vLLM releases: one table, and one object that answers it.

1. A difference **must** be probed on the shape of the object at hand: signatures and
   attributes. A fork or a build whose version string lies is then still served.
2. A difference that the version has by the table **must** be found: what a later
   release renames is refused, never taken for an older release. A defect need not be
   found, because a build of that release may have its fix.
3. No module outside this package **may** decide by a release, nor look for what an
   object of vLLM has; :mod:`.calls` calls what is not everywhere the same.

A field of a seam is true where the difference is found. The docs' table and ``kvview
doctor`` are made of the same fields (:func:`differences`).

Source: ``vllm/v1/core/``, ``vllm/v1/kv_offload/`` and
``vllm/distributed/kv_transfer/kv_connector/v1/base.py`` of every tested release.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import Any, ClassVar, Self

from kvview_vllm.releases.versions import (
    OLDEST_TESTED,
    importing,
    number,
    refusal,
    require_usable,
)

_KV_UTILS = "vllm.v1.core.kv_cache_utils"
_BLOCK_POOL = "vllm/v1/core/block_pool.py"
_BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
_OFFLOAD = "vllm/v1/kv_offload/base.py"


@dataclass(frozen=True)
class Difference:
    """One line of the table.

    Args:
        name: The field of the seam.
        seam: Which vLLM surface it belongs to.
        what: What a release with it does, and what one without does.
        first_release: First release that has it.
        last_release: Last release that has it, None when the newest tested has.
        source: The upstream pull request, or the path where it shows.
        probe: Whether an object of that seam has it.
        is_defect: Whether it is a mistake of vLLM's own.
    """

    name: str
    seam: str
    what: str
    first_release: str
    last_release: str | None
    source: str
    probe: Callable[[Any], bool]
    is_defect: bool = False

    def is_in(self, version: str) -> bool:
        """Whether a version has it by the table; no version that names no release has."""
        found = number(version)
        last = number(self.last_release or "")
        return (
            found is not None
            and found >= (number(self.first_release) or found)
            and (last is None or found <= last)
        )


def _difference(
    what: str,
    probe: Callable[[Any], bool],
    source: str,
    *,
    since: str = OLDEST_TESTED,
    until: str | None = None,
    is_defect: bool = False,
) -> Any:
    return field(
        metadata={
            "what": what,
            "first_release": since,
            "last_release": until,
            "source": source,
            "probe": probe,
            "is_defect": is_defect,
        }
    )


@dataclass(frozen=True)
class Seam:
    """One surface of vLLM, as it was found.

    Args:
        version: Version string of the vLLM that it was found in.
    """

    seam: ClassVar[str]
    version: str

    @classmethod
    def differences(cls) -> tuple[Difference, ...]:
        """The fields of this seam, as lines of the table."""
        return tuple(Difference(f.name, cls.seam, **f.metadata) for f in fields(cls) if f.metadata)

    @classmethod
    def found_on(cls, owner: Any) -> Self:
        """Read the differences off an object of a known shape.

        Raises:
            UnsupportedEngineError: Its release may not be used, or lacks what it has by
                the table.
            VLLMNotInstalledError: No vLLM can be imported.
        """
        version = require_usable(cls.seam)
        found = {each.name: each.probe(owner) for each in cls.differences()}
        for each in cls.differences():
            if each.is_in(version) and not (found[each.name] or each.is_defect):
                raise refusal(
                    cls.seam,
                    f"nothing of '{each.what}' ({each.name})",
                    f"it as in every release from {each.first_release} on ({each.source})",
                )
        return cls(version, **found)


def signature_of(owner: Any, method: str) -> str:
    """The names and defaults of a method's parameters but ``self`` or ``cls``, as "(a, b=1)"."""
    try:
        found = getattr(owner, method)
        parameters = list(inspect.signature(found).parameters.values())
    except (AttributeError, TypeError, ValueError) as error:
        return f" (unreadable: {error})"
    if isinstance(owner, type) and not inspect.ismethod(found):  # no class method
        del parameters[:1]
    return f"({', '.join(str(p.replace(annotation=p.empty)) for p in parameters)})"


def takes(touch: Callable[[Any], object], blocks: object) -> bool:
    """Whether ``touch`` takes a group of blocks in which there is no block."""
    try:
        touch(blocks)
    except (AttributeError, TypeError):
        return False
    return True


def _has_field(module: str, kind: str, name: str) -> bool:
    found: Any = getattr(import_module(module), kind, None)
    return name in getattr(found, "__dataclass_fields__", ())


@dataclass(frozen=True)
class PoolSeam(Seam):
    """``vllm.v1.core.block_pool.BlockPool``."""

    seam: ClassVar[str] = "pool"

    touch_nested: bool = _difference(
        "touch takes a tuple of lists, one per KV-cache group; later a flat sequence",
        # The flat form looks for the reference count of the inner list, and fails.
        lambda pool: takes(pool.touch, ([],)),
        _BLOCK_POOL,
        until="0.13.0",
    )
    free_prepend: bool = _difference(
        "free_blocks(prepend=True) puts blocks to the front of the free queue",
        lambda pool: "prepend" in signature_of(pool, "free_blocks"),
        _BLOCK_POOL,
        since="0.23.0",
        until="0.23.0",
    )
    unhashed_first: bool = _difference(
        "freed blocks without a hash go to the front of the free queue; before, to the tail",
        lambda pool: (
            hasattr(pool.free_block_queue, "prepend_n")
            and "prepend" not in signature_of(pool, "free_blocks")
        ),
        "vllm-project/vllm PR #42656",
        since="0.24.0",
    )
    several_hashes: bool = _difference(
        "a block may have hashes beside its primary one",
        lambda pool: hasattr(pool, "cached_block_hashes_by_block"),
        "vllm-project/vllm PR #45939",
        since="0.24.0",
    )
    reuse_watchers: bool = _difference(
        "unpin_blocks frees blocks and says when they are handed out again",
        lambda pool: hasattr(pool, "unpin_blocks"),
        _BLOCK_POOL,
        since="0.30.0",
    )

    @property
    def joins_in_front(self) -> bool:
        """Whether a freed block may become the next victim."""
        return self.unhashed_first or self.free_prepend


@dataclass(frozen=True)
class BindingSeam(Seam):
    """How ``KVConnectorBase_V1`` gets the pool."""

    seam: ClassVar[str] = "binding"

    optional_pool_hook: bool = _difference(
        "the scheduler binds its block pool to a connector that has bind_gpu_block_pool",
        lambda base: hasattr(base, "bind_kv_cache_manager") or _scheduler_names_pool_hook(),
        "vllm/v1/core/sched/scheduler.py",
        since="0.19.0",
    )
    pool_hook: bool = _difference(
        "the scheduler binds its block pool to every connector, children too",
        lambda base: hasattr(base, "bind_gpu_block_pool"),
        "vllm-project/vllm PR #39654",
        since="0.22.0",
    )
    manager_hook: bool = _difference(
        "the scheduler binds its KV-cache manager, which names the pool",
        lambda base: hasattr(base, "bind_kv_cache_manager"),
        _BASE,
        since="0.30.0",
    )


def _single_type_manager() -> Any:
    module: Any = import_module("vllm.v1.core.single_type_kv_cache_manager")
    return module.SingleTypeKVCacheManager


def _scheduler() -> Any:
    return import_module("vllm.v1.core.sched.scheduler").Scheduler


def _scheduler_names_pool_hook() -> bool:
    code = inspect.unwrap(_scheduler().__init__).__code__
    return "bind_gpu_block_pool" in (*code.co_consts, *code.co_names)


@dataclass(frozen=True)
class GeometrySeam(Seam):
    """Block sizes and the specs of KV-cache groups, ``vllm/v1/kv_cache_interface.py``."""

    seam: ClassVar[str] = "geometry"

    prefill_context_parallel: bool = _difference(
        "a block's tokens may lie on several workers since the prefill",
        lambda _: _has_field(
            "vllm.config.parallel", "ParallelConfig", "prefill_context_parallel_size"
        ),
        "vllm/config/parallel.py",
        since="0.12.0",
    )
    mamba_cache_modes: bool = _difference(
        "states of Mamba layers may be cached",
        lambda interface: "mamba_cache_mode" in interface.MambaSpec.__dataclass_fields__,
        "vllm/v1/kv_cache_interface.py",
        since="0.15.0",
    )
    block_sizes_resolved: bool = _difference(
        "a function resolves the block sizes; before, the coordinator alone knew them",
        lambda _: hasattr(import_module(_KV_UTILS), "resolve_kv_cache_block_sizes"),
        "vllm/v1/core/kv_cache_utils.py",
        since="0.20.0",
    )
    named_by_last_hash: bool = _difference(
        "a block of several hashes is named by the last; before, by all of them joined",
        lambda _: _names_by_last_hash(),
        "vllm/v1/core/kv_cache_utils.py",
        since="0.24.0",
    )
    retained_tokens: bool = _difference(
        "a sliding window keeps tokens longer for speculative decoding",
        lambda interface: (
            "extra_retained_tokens" in interface.SlidingWindowSpec.__dataclass_fields__
        ),
        "vllm/v1/kv_cache_interface.py",
        since="0.28.0",
    )


def _names_by_last_hash() -> bool:
    convert = getattr(import_module(_KV_UTILS), "BlockHashListWithBlockSize", None)
    return convert is not None and convert([b"a", b"b"], 1, 2)[0] == b"b"


@dataclass(frozen=True)
class OffloadingSeam(Seam):
    """The managers of ``vllm.v1.kv_offload``, and what they are called with."""

    seam: ClassVar[str] = "offloading"

    prefix_lookup: bool = _difference(
        "lookup takes a prefix and counts its hits; later one key and a context",
        lambda manager: signature_of(manager, "lookup") == "(block_hashes)",
        "vllm/v1/kv_offload/abstract.py",
        until="0.19.1",
    )
    handlers: bool = _difference(
        "a handler moves pages in both directions; later a worker with a method for each",
        lambda _: find_class("OffloadingHandler") is not None,
        "vllm/v1/kv_offload/worker/worker.py",
        until="0.24.0",
    )
    lookup_retry: bool = _difference(
        "lookup may say later; before, that was a miss",
        lambda manager: any(
            word in str(inspect.signature(manager.lookup).return_annotation)
            for word in ("None", "LookupResult")
        ),
        _OFFLOAD,
        since="0.15.0",
    )
    transfer_dataclass: bool = _difference(
        "the end of a transfer is an object; before, a pair",
        lambda _: hasattr(find_class("TransferResult"), "__dataclass_fields__"),
        _OFFLOAD,
        since="0.16.0",
    )
    manager_shutdown: bool = _difference(
        "a manager is shut down",
        lambda manager: hasattr(manager, "shutdown"),
        _OFFLOAD,
        since="0.20.0",
    )
    block_indices: bool = _difference(
        "a transfer says where in a chunk it begins, group by group; before, it ends at its end",
        lambda _: "block_indices" in signature_of(find_class("GPULoadStoreSpec"), "__init__"),
        _OFFLOAD,
        since="0.19.0",
    )
    completion_context: bool = _difference(
        "touch and the completions take the request's context too",
        lambda manager: signature_of(manager, "touch") == "(keys, req_context)",
        _OFFLOAD,
        since="0.21.0",
    )
    cache_reset: bool = _difference(
        "reset_cache forgets every key, those in flight too",
        lambda manager: hasattr(manager, "reset_cache"),
        _OFFLOAD,
        since="0.22.0",
    )
    request_ids: bool = _difference(
        "the context names its request",
        lambda _: "req_id" in signature_of(find_class("ReqContext"), "__init__"),
        _OFFLOAD,
        since="0.22.0",
    )
    request_hooks: bool = _difference(
        "the manager hears of new and finished requests and of the end of a step",
        lambda manager: hasattr(manager, "on_new_request"),
        _OFFLOAD,
        since="0.23.0",
    )
    manager_work: bool = _difference(
        "a manager keeps the engine stepping while it has work",
        lambda manager: hasattr(manager, "has_pending_work"),
        _OFFLOAD,
        since="0.24.0",
    )
    step_context: bool = _difference(
        "on_schedule_end takes what was scheduled",
        lambda manager: signature_of(manager, "on_schedule_end") == "(context)",
        _OFFLOAD,
        since="0.25.0",
    )
    lookup_results: bool = _difference(
        "lookup tells a key that is being stored from a miss; before, a bool or None",
        lambda manager: "LookupResult" in str(inspect.signature(manager.lookup).return_annotation),
        _OFFLOAD,
        since="0.25.0",
    )
    media: bool = _difference(
        "media are named by an enum; before, by any string",
        lambda _: find_class("Medium") is not None,
        _OFFLOAD,
        since="0.27.0",
    )
    key_positions: bool = _difference(
        "the connector touches no keys and tells their positions instead",
        lambda _: hasattr(find_class("ReqContext"), "get_offload_key_position"),
        _OFFLOAD,
        since="0.31.0",
    )
    metadata_events: bool = _difference(
        "events may speak of metadata alone, and are not published",
        lambda _: "metadata_only" in signature_of(find_class("OffloadingEvent"), "__init__"),
        _OFFLOAD,
        since="0.33.0",
    )


def find_class(name: str) -> Any:
    """A class of vLLM's offloading interface, wherever the release has it; None without."""
    package = "vllm.v1.kv_offload"
    for module in ("base", "abstract", "spec", "mediums", "worker.worker"):
        try:
            with importing():
                found = getattr(import_module(f"{package}.{module}"), name, None)
        except ModuleNotFoundError as error:
            if not str(error.name).startswith(package):
                raise
            continue  # merged into base, or not split off yet
        if found is not None:
            return found
    return None


@dataclass(frozen=True)
class ConnectorSeam(Seam):
    """``KVConnectorBase_V1``, and what the scheduler and the workers tell it."""

    seam: ClassVar[str] = "connector"

    cache_config_argument: bool = _difference(
        "the constructor of a connector takes the KVCacheConfig",
        lambda surface: "kv_cache_config" in signature_of(surface.base, "__init__"),
        _BASE,
        since="0.11.1",
    )
    several_groups: bool = _difference(
        "a connector may serve several KV-cache groups (SupportsHMA)",
        lambda surface: hasattr(surface.base_module, "SupportsHMA"),
        _BASE,
        since="0.11.1",
    )
    failed_blocks: bool = _difference(
        "a worker says which blocks were not loaded",
        lambda surface: "invalid_block_ids" in surface.fields["KVConnectorOutput"],
        "vllm/v1/outputs.py",
        since="0.11.1",
    )
    resumed_ids: bool = _difference(
        "the step names the resumed requests; before, a list of flags",
        lambda surface: "resumed_req_ids" in surface.fields["CachedRequestData"],
        "vllm/v1/core/sched/output.py",
        since="0.11.1",
    )
    unread_prefixes: bool = _difference(
        "a request may need every token computed",
        lambda surface: hasattr(surface.request, "get_skip_reading_prefix_cache"),
        "vllm/v1/request.py",
        since="0.11.1",
    )
    preempted_ids: bool = _difference(
        "the step names the preempted requests",
        lambda surface: "preempted_req_ids" in surface.fields["SchedulerOutput"],
        "vllm/v1/core/sched/output.py",
        since="0.12.0",
    )
    connector_reset: bool = _difference(
        "a reset of the prefix cache reaches the connector",
        lambda surface: hasattr(surface.base, "reset_cache"),
        _BASE,
        since="0.13.0",
    )
    null_window_blocks: bool = _difference(
        "a load gets null blocks for what a window skips; before, blocks for the whole span",
        lambda surface: (
            "num_external_computed_tokens" in signature_of(surface.blocks, "allocate_slots")
        ),
        "vllm/v1/core/kv_cache_manager.py",
        since="0.14.0",
    )
    reserved_blocks: bool = _difference(
        "a load begins beside what the prefills under way have yet to allocate; before, requests "
        "may wait for each other's blocks for ever",
        lambda surface: "reserved_blocks" in signature_of(surface.blocks, "allocate_slots"),
        "vllm/v1/core/sched/scheduler.py",
        since="0.23.0",
    )
    hits_come_first: bool = _difference(
        "a request takes what it hits of all groups, then blocks to load into; from 0.14.0 to "
        "0.23.0 group by group, and what one loads into may be what the next hits",
        lambda _: hasattr(_single_type_manager(), "add_local_computed_blocks"),
        "https://github.com/vllm-project/vllm/pull/44409",
        since="0.24.0",
    )
    uncounted_window_blocks: bool = _difference(
        "blocks of windows and chunks past a cap are not counted before they are taken, so a full "
        "pool ends the engine",
        lambda _: (
            "max_admission_blocks" in signature_of(_single_type_manager(), "__init__")
            and "apply_admission_cap"
            not in signature_of(_single_type_manager(), "get_num_blocks_to_allocate")
        ),
        "https://github.com/vllm-project/vllm/pull/41282",
        since="0.20.0",
        until="0.20.1",
        is_defect=True,
    )
    worker_metadata: bool = _difference(
        "workers answer their scheduler's side; before, in the stats",
        lambda surface: (
            hasattr(surface.base_module, "KVConnectorWorkerMetadata")
            and "kv_connector_worker_meta" in surface.fields["KVConnectorOutput"]
        ),
        _BASE,
        since="0.18.0",
    )
    asked_for_stats: bool = _difference(
        "the scheduler's side is asked for stats at every step; before, only beside a worker's",
        lambda surface: hasattr(surface.base, "has_pending_push_work"),  # of the same release
        "vllm/v1/core/sched/scheduler.py",
        since="0.24.0",
    )
    stale_outputs: bool = _difference(
        "a preempted request waits for its outputs in flight; before, it may be given one twice",
        lambda _: "drop_stale_output" in signature_of(_scheduler(), "_preempt_request"),
        "vllm/v1/core/sched/scheduler.py",
        since="0.27.0",
    )
    loads_after_launch: bool = _difference(
        "loads start when the step's forward was launched, unless it needs them; before, first",
        lambda surface: "has_sync_kv_loads" in surface.fields["SchedulerOutput"],
        "vllm/v1/worker/kv_connector_model_runner_mixin.py",
        since="0.29.0",
    )
    failed_requests: bool = _difference(
        "a worker says which requests were not loaded, for several groups",
        lambda surface: (
            hasattr(surface.base, "get_transfer_results")
            and "failed_recving" in surface.fields["KVConnectorOutput"]
        ),
        "vllm/v1/outputs.py",
        since="0.30.0",
    )


def differences() -> tuple[Difference, ...]:
    """The whole table, seam by seam."""
    seams = (PoolSeam, BindingSeam, GeometrySeam, OffloadingSeam, ConnectorSeam)
    return tuple(each for seam in seams for each in seam.differences())
