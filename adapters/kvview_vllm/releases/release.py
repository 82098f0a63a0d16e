"""The table of differences between vLLM releases, and the seams that hold the answers.

1. A difference **must** be probed on the shape of the object at hand: signatures and
   attributes. A fork, or a build with a wrong version string, is then still served.
2. A difference that the version has by the table **must** be found: a member that a later
   release renames is refused, never taken for an older release. A defect need not be
   found, because a build of that release may have its fix.
3. No module outside this package **may** decide by a release, or test which members an
   object of vLLM has; :mod:`.calls` makes the calls that differ between releases.

A field of a seam is true where the difference is found. The table of the documentation and
``kvview doctor`` use the same fields (:func:`differences`).

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
    is_between,
    refusal,
    require_usable,
    vllm,
)

Probe = Callable[[Any], bool]

_BLOCK_POOL = "vllm/v1/core/block_pool.py"
_BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
_OFFLOAD = "vllm/v1/kv_offload/base.py"
_SCHEDULER = "vllm/v1/core/sched/scheduler.py"
_OUTPUT = "vllm/v1/core/sched/output.py"
_UTILS = "vllm/v1/core/kv_cache_utils.py"
_INTERFACE = "vllm/v1/kv_cache_interface.py"


@dataclass(frozen=True)
class Difference:
    """One line of the table.

    Args:
        name: The field of the seam.
        seam: The surface of vLLM that it belongs to.
        description: The behaviour of a release that has it and, where needed, of one without.
        source: The upstream pull request, or the path of the source file.
        probe: Whether an object of that seam has it.
        first_release: First release that has it.
        last_release: Last release that has it, None if the newest tested release has it.
        is_defect: Whether it is a mistake in vLLM.
    """

    name: str
    seam: str
    description: str
    source: str
    probe: Probe
    first_release: str
    last_release: str | None
    is_defect: bool = False

    def is_in(self, version: str) -> bool:
        """Whether a version has it by the table; False for a version that names no release."""
        return is_between(version, self.first_release, self.last_release)


def difference(row: str, probe: Probe, source: str = "", *, is_defect: bool = False) -> Any:
    """Declare a field of a seam.

    Args:
        row: ``SINCE..UNTIL description``; an empty end is the oldest or the newest tested release.
        probe: As in :class:`Difference`.
        source: As in :class:`Difference`; that of the seam by default.
        is_defect: As in :class:`Difference`.
    """
    releases, _, description = row.partition(" ")
    since, _, until = releases.partition("..")
    facts = (description, source, probe, since or OLDEST_TESTED, until or None, is_defect)
    return field(metadata={"facts": facts})


@dataclass(frozen=True)
class Seam:
    """One surface of vLLM, as it was found.

    Args:
        version: Version string of the vLLM that it was found in.
    """

    seam: ClassVar[str]
    source: ClassVar[str]
    version: str

    @classmethod
    def differences(cls) -> tuple[Difference, ...]:
        """The fields of this seam, as lines of the table."""
        facts = {f.name: f.metadata["facts"] for f in fields(cls) if f.metadata}
        return tuple(
            Difference(name, cls.seam, description, source or cls.source, *others)
            for name, (description, source, *others) in facts.items()
        )

    @classmethod
    def found_on(cls, owner: Any) -> Self:
        """Read the differences off an object of a known shape.

        Raises:
            UnsupportedEngineError: The release may not be used, or lacks a difference that
                it has by the table.
            VLLMNotInstalledError: No vLLM can be imported.
        """
        version = require_usable(cls.seam)
        found = {each.name: each.probe(owner) for each in cls.differences()}
        for each in cls.differences():
            if each.is_in(version) and not (found[each.name] or each.is_defect):
                raise refusal(
                    cls.seam,
                    f"nothing of '{each.description}' ({each.name})",
                    f"it as in every release from {each.first_release} on ({each.source})",
                )
        return cls(version, **found)


def signature_of(owner: Any, method: str) -> str:
    """The names and defaults of a method's parameters except ``self`` and ``cls``: "(a, b=1)"."""
    try:
        found = getattr(owner, method)
        parameters = list(inspect.signature(found).parameters.values())
    except (AttributeError, TypeError, ValueError) as error:
        return f" (unreadable: {error})"
    if isinstance(owner, type) and not inspect.ismethod(found):  # not a class method
        del parameters[:1]
    return f"({', '.join(str(p.replace(annotation=p.empty)) for p in parameters)})"


def takes(touch: Callable[[Any], object], blocks: object) -> bool:
    """Whether ``touch`` accepts this form of an empty group of blocks."""
    try:
        touch(blocks)
    except (AttributeError, TypeError):
        return False
    return True


def find_class(name: str) -> Any:
    """A class of vLLM's offloading interface, in whichever module has it; None if none does."""
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


# --- probes ---


def has(name: str) -> Probe:
    """Whether the object has an attribute."""
    return lambda owner: hasattr(owner, name)


def has_parameter(find: Callable[[Any], Any], method: str, name: str) -> Probe:
    """Whether a method of a class has a parameter; ``find`` returns the class."""
    return lambda owner: name in signature_of(find(owner), method)


def has_field(module: str, kind: str, name: str) -> Probe:
    """Whether a dataclass of vLLM has a field."""
    return lambda _: name in getattr(getattr(vllm(module), kind, None), "__dataclass_fields__", ())


def _is_message_field(kind: str, name: str) -> Probe:
    return lambda surface: name in surface.fields[kind]


def _offloading_class(name: str) -> Callable[[Any], Any]:
    return lambda _: find_class(name)


def _scheduler(_: Any = None) -> Any:
    return vllm("v1.core.sched.scheduler").Scheduler


def _single_type_manager(_: Any = None) -> Any:
    return vllm("v1.core.single_type_kv_cache_manager").SingleTypeKVCacheManager


def _scheduler_names_pool_hook() -> bool:
    code = inspect.unwrap(_scheduler().__init__).__code__
    return "bind_gpu_block_pool" in (*code.co_consts, *code.co_names)


def _names_by_last_hash() -> bool:
    convert = getattr(vllm("v1.core.kv_cache_utils"), "BlockHashListWithBlockSize", None)
    return convert is not None and convert([b"a", b"b"], 1, 2)[0] == b"b"


def _lookup_returns(*words: str) -> Probe:
    return lambda manager: any(
        word in str(inspect.signature(manager.lookup).return_annotation) for word in words
    )


# --- the table ---


@dataclass(frozen=True)
class PoolSeam(Seam):
    """``vllm.v1.core.block_pool.BlockPool``."""

    seam: ClassVar[str] = "pool"
    source: ClassVar[str] = _BLOCK_POOL

    touch_nested: bool = difference(
        "..0.13.0 touch takes a tuple of lists, one per KV-cache group; later a flat sequence",
        # The flat form reads the reference count of the inner list, and fails.
        lambda pool: takes(pool.touch, ([],)),
    )
    free_prepend: bool = difference(
        "0.23.0..0.23.0 free_blocks(prepend=True) puts blocks at the front of the free queue",
        lambda pool: "prepend" in signature_of(pool, "free_blocks"),
    )
    unhashed_first: bool = difference(
        "0.24.0.. freed blocks without a hash go to the front of the free queue; before, to the "
        "tail",
        lambda pool: (
            hasattr(pool.free_block_queue, "prepend_n")
            and "prepend" not in signature_of(pool, "free_blocks")
        ),
        "vllm-project/vllm PR #42656",
    )
    several_hashes: bool = difference(
        "0.24.0.. a block may have more hashes than its primary one",
        has("cached_block_hashes_by_block"),
        "vllm-project/vllm PR #45939",
    )
    reuse_watchers: bool = difference(
        "0.30.0.. unpin_blocks frees blocks and calls back when they are allocated again",
        has("unpin_blocks"),
    )

    @property
    def joins_in_front(self) -> bool:
        """Whether a freed block may become the next victim."""
        return self.unhashed_first or self.free_prepend


@dataclass(frozen=True)
class BindingSeam(Seam):
    """How ``KVConnectorBase_V1`` gets the pool."""

    seam: ClassVar[str] = "binding"
    source: ClassVar[str] = _BASE

    optional_pool_hook: bool = difference(
        "0.19.0.. the scheduler binds its block pool to a connector that has bind_gpu_block_pool",
        lambda base: hasattr(base, "bind_kv_cache_manager") or _scheduler_names_pool_hook(),
        _SCHEDULER,
    )
    pool_hook: bool = difference(
        "0.22.0.. the scheduler binds its block pool to every connector, including children",
        has("bind_gpu_block_pool"),
        "vllm-project/vllm PR #39654",
    )
    manager_hook: bool = difference(
        "0.30.0.. the scheduler binds its KV-cache manager, which has the pool",
        has("bind_kv_cache_manager"),
    )


@dataclass(frozen=True)
class GeometrySeam(Seam):
    """Block sizes and the specs of KV-cache groups, ``vllm/v1/kv_cache_interface.py``."""

    seam: ClassVar[str] = "geometry"
    source: ClassVar[str] = _INTERFACE

    prefill_context_parallel: bool = difference(
        "0.12.0.. a block's tokens may be spread over several workers from the prefill on",
        has_field("config.parallel", "ParallelConfig", "prefill_context_parallel_size"),
        "vllm/config/parallel.py",
    )
    mamba_cache_modes: bool = difference(
        "0.15.0.. states of Mamba layers may be cached",
        has_field("v1.kv_cache_interface", "MambaSpec", "mamba_cache_mode"),
    )
    block_sizes_resolved: bool = difference(
        "0.20.0.. a function resolves the block sizes; before, only the coordinator computed them",
        lambda _: hasattr(vllm("v1.core.kv_cache_utils"), "resolve_kv_cache_block_sizes"),
        _UTILS,
    )
    named_by_last_hash: bool = difference(
        "0.24.0.. the key of a block of several hashes is the last hash; before, all of them "
        "joined",
        lambda _: _names_by_last_hash(),
        _UTILS,
    )
    retained_tokens: bool = difference(
        "0.28.0.. a sliding window keeps tokens longer for speculative decoding",
        has_field("v1.kv_cache_interface", "SlidingWindowSpec", "extra_retained_tokens"),
    )


@dataclass(frozen=True)
class OffloadingSeam(Seam):
    """The managers of ``vllm.v1.kv_offload`` and the arguments of their methods."""

    seam: ClassVar[str] = "offloading"
    source: ClassVar[str] = _OFFLOAD

    prefix_lookup: bool = difference(
        "..0.19.1 lookup takes a prefix and counts its hits; later one key and a context",
        lambda manager: signature_of(manager, "lookup") == "(block_hashes)",
        "vllm/v1/kv_offload/abstract.py",
    )
    handlers: bool = difference(
        "..0.24.0 a handler moves pages in both directions; later a worker with a method for each",
        lambda _: find_class("OffloadingHandler") is not None,
        "vllm/v1/kv_offload/worker/worker.py",
    )
    lookup_retry: bool = difference(
        "0.15.0.. lookup may return that the caller should retry; before, that was a miss",
        _lookup_returns("None", "LookupResult"),
    )
    transfer_dataclass: bool = difference(
        "0.16.0.. the end of a transfer is an object; before, a pair",
        lambda _: hasattr(find_class("TransferResult"), "__dataclass_fields__"),
    )
    manager_shutdown: bool = difference(
        "0.20.0.. a manager is shut down",
        has("shutdown"),
    )
    block_indices: bool = difference(
        "0.19.0.. a transfer has its start in a chunk for each group; before, it ends at the "
        "chunk's end",
        has_parameter(_offloading_class("GPULoadStoreSpec"), "__init__", "block_indices"),
    )
    completion_context: bool = difference(
        "0.21.0.. touch and the completions take the request's context too",
        lambda manager: signature_of(manager, "touch") == "(keys, req_context)",
    )
    cache_reset: bool = difference(
        "0.22.0.. reset_cache forgets every key, including keys in flight",
        has("reset_cache"),
    )
    request_ids: bool = difference(
        "0.22.0.. the context has the id of its request",
        has_parameter(_offloading_class("ReqContext"), "__init__", "req_id"),
    )
    request_hooks: bool = difference(
        "0.23.0.. the manager is notified of new and finished requests and of the end of a step",
        has("on_new_request"),
    )
    manager_work: bool = difference(
        "0.24.0.. a manager keeps the engine stepping while it has work",
        has("has_pending_work"),
    )
    step_context: bool = difference(
        "0.25.0.. on_schedule_end takes the scheduled requests",
        lambda manager: signature_of(manager, "on_schedule_end") == "(context)",
    )
    lookup_results: bool = difference(
        "0.25.0.. lookup distinguishes a key that is being stored from a miss; before, a bool "
        "or None",
        _lookup_returns("LookupResult"),
    )
    media: bool = difference(
        "0.27.0.. media are members of an enum; before, any string",
        lambda _: find_class("Medium") is not None,
    )
    key_positions: bool = difference(
        "0.31.0.. the connector touches no keys and passes their positions instead",
        lambda _: hasattr(find_class("ReqContext"), "get_offload_key_position"),
    )
    metadata_events: bool = difference(
        "0.33.0.. events may be about metadata alone, and are then not published",
        has_parameter(_offloading_class("OffloadingEvent"), "__init__", "metadata_only"),
    )


@dataclass(frozen=True)
class ConnectorSeam(Seam):
    """``KVConnectorBase_V1``, and the messages of the scheduler and the workers."""

    seam: ClassVar[str] = "connector"
    source: ClassVar[str] = _BASE

    cache_config_argument: bool = difference(
        "0.11.1.. the constructor of a connector takes the KVCacheConfig",
        has_parameter(lambda surface: surface.base, "__init__", "kv_cache_config"),
    )
    several_groups: bool = difference(
        "0.11.1.. a connector may serve several KV-cache groups (SupportsHMA)",
        lambda surface: hasattr(surface.base_module, "SupportsHMA"),
    )
    failed_blocks: bool = difference(
        "0.11.1.. a worker reports the blocks that were not loaded",
        _is_message_field("KVConnectorOutput", "invalid_block_ids"),
        "vllm/v1/outputs.py",
    )
    resumed_ids: bool = difference(
        "0.11.1.. the step has the ids of resumed requests; before, a list of flags",
        _is_message_field("CachedRequestData", "resumed_req_ids"),
        _OUTPUT,
    )
    unread_prefixes: bool = difference(
        "0.11.1.. a request may need every token computed",
        lambda surface: hasattr(surface.request, "get_skip_reading_prefix_cache"),
        "vllm/v1/request.py",
    )
    preempted_ids: bool = difference(
        "0.12.0.. the step has the ids of preempted requests",
        _is_message_field("SchedulerOutput", "preempted_req_ids"),
        _OUTPUT,
    )
    connector_reset: bool = difference(
        "0.13.0.. a reset of the prefix cache reaches the connector",
        lambda surface: hasattr(surface.base, "reset_cache"),
    )
    null_window_blocks: bool = difference(
        "0.14.0.. a load gets null blocks where a window skips; before, blocks for the whole span",
        has_parameter(lambda s: s.blocks, "allocate_slots", "num_external_computed_tokens"),
        "vllm/v1/core/kv_cache_manager.py",
    )
    reserved_blocks: bool = difference(
        "0.23.0.. a load starts only if the running prefills can still allocate their blocks; "
        "before, requests may wait for each other's blocks forever",
        has_parameter(lambda surface: surface.blocks, "allocate_slots", "reserved_blocks"),
        _SCHEDULER,
    )
    hits_come_first: bool = difference(
        "0.24.0.. a request takes its hits of all groups, then blocks to load into; from 0.14.0 "
        "to 0.23.0 group by group, so that one group may load into a block that the next one "
        "hits",
        lambda _: hasattr(_single_type_manager(), "add_local_computed_blocks"),
        "https://github.com/vllm-project/vllm/pull/44409",
    )
    uncounted_window_blocks: bool = difference(
        "0.20.0..0.20.1 blocks of windows and chunks past a cap are not counted before they are "
        "taken, so a full pool ends the engine",
        lambda _: (
            "max_admission_blocks" in signature_of(_single_type_manager(), "__init__")
            and "apply_admission_cap"
            not in signature_of(_single_type_manager(), "get_num_blocks_to_allocate")
        ),
        "https://github.com/vllm-project/vllm/pull/41282",
        is_defect=True,
    )
    worker_metadata: bool = difference(
        "0.18.0.. workers send metadata to their scheduler's side; before, in the stats",
        lambda surface: (
            hasattr(surface.base_module, "KVConnectorWorkerMetadata")
            and "kv_connector_worker_meta" in surface.fields["KVConnectorOutput"]
        ),
    )
    asked_for_stats: bool = difference(
        "0.24.0.. the stats of the scheduler's side are read at every step; before, only with a "
        "worker's",
        lambda surface: hasattr(surface.base, "has_pending_push_work"),  # of the same release
        _SCHEDULER,
    )
    stale_outputs: bool = difference(
        "0.27.0.. a preempted request waits for its outputs in flight; before, it may get a "
        "token twice",
        has_parameter(_scheduler, "_preempt_request", "drop_stale_output"),
        _SCHEDULER,
    )
    loads_after_launch: bool = difference(
        "0.29.0.. loads start after the launch of the step's forward, unless it needs them; "
        "before, first",
        _is_message_field("SchedulerOutput", "has_sync_kv_loads"),
        "vllm/v1/worker/kv_connector_model_runner_mixin.py",
    )
    failed_requests: bool = difference(
        "0.30.0.. a worker reports the requests that were not loaded, with several groups too",
        lambda surface: (
            hasattr(surface.base, "get_transfer_results")
            and "failed_recving" in surface.fields["KVConnectorOutput"]
        ),
        "vllm/v1/outputs.py",
    )


def differences() -> tuple[Difference, ...]:
    """The whole table, seam by seam."""
    seams = (PoolSeam, BindingSeam, GeometrySeam, OffloadingSeam, ConnectorSeam)
    return tuple(each for seam in seams for each in seam.differences())
