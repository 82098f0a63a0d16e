"""Calls of vLLM that differ between releases, and queries of members that some releases lack.

1. Constructors and functions receive only the arguments that they accept, by name. If such a
   callable requires another argument, the release is refused (:func:`make_known`).
2. Each query has one meaning in every release.

Source: the paths named at each function, 0.11.0 to the newest tested release.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

from kvview import RequestContent
from kvview_vllm.releases.compat.seams import GeometrySeam
from kvview_vllm.releases.compat.shapes import find_class, parameters_of, required_arguments
from kvview_vllm.releases.compat.versions import refusal, vllm

EVENT_FIELDS = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "group_idx"),  # from 0.14.0, which requires the first, and 0.20.0
    *("extra_keys", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),  # 0.17.0, 0.22.0
)
"""The fields that :func:`make_event` can fill in."""

_UTILS = "v1.core.kv_cache_utils"
_SCHEDULER = "v1.core.sched.scheduler"


def known_arguments(target: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values for which a callable has a parameter."""
    parameters = parameters_of(target)
    return {name: value for name, value in values.items() if name in parameters}


def make_known(target: Callable[..., Any], **values: Any) -> Any:
    """Call a constructor or function with only the arguments that this release has.

    Raises:
        UnsupportedEngineError: The release requires another argument.
    """
    if new := sorted(required_arguments(target) - values.keys()):
        name = target.__name__
        raise refusal(
            name,
            f"{name} that requires {', '.join(new)}",
            f"no required argument except {', '.join(values)}",
        )
    return target(**known_arguments(target, values))


# --- the pool ---


def hash_getter(block_pool: Any) -> Callable[[Any], Any]:
    """Return a function that reads the primary hash of a block.

    Since 0.24 ``block_hash`` is a property, which costs a Python call per block, so its field is
    read.
    """
    has_field = hasattr(block_pool.null_block, "_block_hash")
    return attrgetter("_block_hash" if has_field else "block_hash")


def uncache_blocks(block_pool: Any, block_ids: Iterable[int]) -> None:
    """Remove blocks from the prefix cache, even held ones, in releases that load within a step."""
    evict = getattr(block_pool, "evict_blocks", None)  # 0.13.0
    if evict is not None:
        evict(set(block_ids))
        return
    for block_id in block_ids:
        block_pool._maybe_evict_cached_block(block_pool.blocks[block_id])


def make_block_pool(num_blocks: int) -> Any:
    """Make a ``BlockPool`` of vllm/v1/core/block_pool.py."""
    kind = vllm("v1.core.block_pool").BlockPool
    return make_known(kind, num_gpu_blocks=num_blocks, enable_caching=True, hash_block_size=16)


# --- binding ---


def child_connectors(connector: Any) -> Sequence[Any]:
    """Return the children of a ``MultiConnector``; empty for any other connector."""
    children: Sequence[Any] = getattr(connector, "_connectors", ())
    return children


# --- geometry ---


def context_parallel_sizes(parallel_config: Any, seam: GeometrySeam) -> dict[str, int]:
    """Return the numbers of workers over which the tokens of a block are spread, by setting."""
    names = ["decode_context_parallel_size"]
    if seam.prefill_context_parallel:
        names.append("prefill_context_parallel_size")
    return {name: getattr(parallel_config, name) for name in names}


# --- requests ---


class _ExtraKeys(Sequence[Any]):
    """The extra keys of a request's block hashes, computed at each access."""

    def __init__(self, request: Any, hash_block_size: int) -> None:
        self._request = request
        self._size = hash_block_size

    def __len__(self) -> int:
        return len(self._request.block_hashes)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        start = range(len(self))[index] * self._size
        keys, _ = vllm(_UTILS).generate_block_hash_extra_keys(
            self._request, start, start + self._size, 0
        )
        return keys


def extra_keys_of(request: Any, block_size: int) -> Sequence[Any]:
    """Return the extra keys of each block of this size, computed at each access."""
    return _ExtraKeys(request, block_size)


def request_content(request: Any, hash_block_size: int) -> RequestContent:
    """Make the content of a ``Request``, without a copy.

    Args:
        request: A ``Request`` of vllm/v1/request.py.
        hash_block_size: Number of tokens that one hash of the request covers.
    """
    lora = request.lora_request
    return RequestContent(
        token_ids=request.all_token_ids,
        lora_name=lora and lora.lora_name,
        lora_id=lora and lora.lora_int_id,
        cache_salt=request.cache_salt,
        extra_keys=_ExtraKeys(request, hash_block_size),
        transfer_params=request.kv_transfer_params,
    )


def unfinished_statuses() -> frozenset[Any]:
    """Return the statuses of requests that ended early (0.13.0 adds errors)."""
    statuses = vllm("v1.request").RequestStatus
    names = ("FINISHED_ABORTED", "FINISHED_IGNORED", "FINISHED_ERROR")
    return frozenset(statuses[name] for name in names if name in statuses.__members__)


# --- events ---


def make_event(removed: bool, hashes: list[bytes], fields: Mapping[str, Any]) -> Any:
    """Make a ``BlockStored`` or ``BlockRemoved`` of vllm/distributed/kv_events.py.

    The medium of these events is any string in every release, because only the events of offloading
    managers use the enum of 0.27.

    Args:
        removed: Whether to make a ``BlockRemoved``.
        hashes: Hashes of the blocks, which are converted to the form of the GPU's own events.
        fields: Values of :data:`EVENT_FIELDS`; fields that the release lacks are dropped.
    """
    kv_events, convert = vllm("distributed.kv_events"), vllm(_UTILS).maybe_convert_block_hash
    kind = kv_events.BlockRemoved if removed else kv_events.BlockStored
    values = dict.fromkeys(EVENT_FIELDS) | {"token_ids": []} | dict(fields)
    values["block_hashes"] = [convert(block_hash) for block_hash in hashes]
    if values["parent_block_hash"] is not None:
        values["parent_block_hash"] = convert(values["parent_block_hash"])
    return kind(**{name: values[name] for name in kind.__struct_fields__ if name in values})


def event_extra_keys(extra_keys: list[Any]) -> list[Any]:
    """Convert the extra keys of hashes to those of events, without the tags of 0.31 and later."""
    convert = getattr(vllm(_UTILS), "to_event_extra_keys", list)
    converted: list[Any] = convert(extra_keys)
    return converted


def event_group_kinds(kv_cache_config: Any) -> list[dict[str, Any]]:
    """Return the event fields of each group; none up to 0.21, and none without groups (0.11.0)."""
    interface = vllm("v1.kv_cache_interface")
    if kv_cache_config is None or not hasattr(interface, "get_kv_cache_spec_kind"):
        return []
    return [
        {
            "kv_cache_spec_kind": interface.get_kv_cache_spec_kind(group.kv_cache_spec).value,
            "kv_cache_spec_sliding_window": getattr(group.kv_cache_spec, "sliding_window", None),
        }
        for group in kv_cache_config.kv_cache_groups
    ]


def can_name_groups() -> bool:
    """Whether events name the group of their blocks (0.20.0)."""
    return "group_idx" in vllm("distributed.kv_events").BlockStored.__struct_fields__


def publishes_events(vllm_config: Any) -> bool:
    """Whether the engine publishes KV events."""
    config = vllm_config.kv_events_config
    return config is not None and bool(config.enable_kv_cache_events)


# --- offloading: vllm/v1/kv_offload ---


def make_medium(name: str) -> Any:
    """Convert a medium to the type that events of offloading managers have."""
    medium = find_class("Medium")
    return name if medium is None else medium(name)


def blocks_per_chunk(spec: Any) -> int:
    """Return the number of GPU blocks in an offloaded block of an ``OffloadingSpec``."""
    for name in ("blocks_per_chunk", "block_size_factor"):  # 0.26, 0.18
        if hasattr(spec, name):
            return int(getattr(spec, name))
    return int(spec.offloaded_block_size // spec.gpu_block_size)


def tokens_per_chunk(spec: Any) -> int:
    """Return the block size for events up to 0.19; 0 from 0.26 on, which needs no block size."""
    sizes = getattr(spec, "gpu_block_size", 0)
    return int(sizes if isinstance(sizes, int) else sizes[0]) * blocks_per_chunk(spec)


def cache_config_of(spec: Any) -> Any:
    """Return the ``KVCacheConfig`` of an ``OffloadingSpec``; None up to 0.13."""
    return getattr(spec, "kv_cache_config", None)


def recomputes_failed_loads(transfer_config: Any) -> bool:
    """Whether a request whose load failed is computed, not ended; always True up to 0.12."""
    return str(getattr(transfer_config, "kv_load_failure_policy", "recompute")) == "recompute"


# --- a scheduler and a worker without a model ---


def handle_preemptions(worker: Any, output: Any, metadata: Any) -> None:
    """Notify a worker of preemptions, as a model runner does before it starts loads (0.14)."""
    base = vllm("distributed.kv_transfer.kv_connector.v1.base")
    # The release's base class decides: a connector may be written for another release.
    method = getattr(base.KVConnectorBase_V1, "handle_preemptions", None)
    if method is None:
        return
    if "preempted_req_ids" not in parameters_of(method):
        worker.handle_preemptions(metadata)
    elif output.preempted_req_ids:  # up to 0.18
        worker.handle_preemptions(output.preempted_req_ids)


def set_concurrent_batches(vllm_config: Any, number: int) -> None:
    """Set the number of steps in flight that a scheduler expects, if the release has it (0.24).

    vLLM derives this number from the sizes of a deployment; three steps correspond to two pipeline
    stages.
    """
    kind = type(vllm_config)
    if hasattr(kind, "max_concurrent_batches"):
        batches = property(lambda _: number)
        vllm_config.__class__ = type(kind.__name__, (kind,), {"max_concurrent_batches": batches})


def blocks_freed_later(scheduler: Any) -> list[Any]:
    """Return blocks of ended requests that a scheduler frees after the steps in flight (0.24)."""
    return [block for _, blocks in getattr(scheduler, "deferred_frees", ()) for block in blocks]


def set_prefix_match_unit(vllm_config: Any, number: int | None) -> None:
    """Set the number of tokens that a hash covers, if the release has this setting (0.32)."""
    if hasattr(vllm_config.cache_config, "prefix_match_unit"):
        vllm_config.cache_config.prefix_match_unit = number


def has_draft_models() -> bool:
    """Whether a release has draft models, which need slots beyond the tokens of a step (0.18)."""
    return hasattr(vllm("config").SpeculativeConfig, "uses_draft_model")


def preemptions_drop_drafts() -> bool:
    """Whether a preempted request loses its draft tokens; 0.11 schedules them with the prompt."""
    preempt = getattr(vllm(_SCHEDULER).Scheduler, "_preempt_request", None)
    return preempt is not None and "spec_token_ids" in inspect.getsource(preempt)


def windows_outlive_drafts() -> bool:
    """Whether a block of a window stays until the outputs in flight cannot need it (0.26.0)."""
    allocate = vllm("v1.core.kv_cache_manager").KVCacheManager.allocate_slots
    return "num_in_flight_tokens" in inspect.getsource(allocate)


def states_take_loads() -> bool:
    """Whether a request with Mamba groups may load: 0.15.0 to 0.22.1 assert that it does not."""
    split = getattr(vllm(_SCHEDULER).Scheduler, "_mamba_block_aligned_split", None)
    return split is None or "assert num_external_computed_tokens == 0" not in inspect.getsource(
        split
    )


def states_are_hit_with_the_rest() -> bool:
    """Whether, with a connector and Mamba groups, a hit ends where all groups have the prefix.

    0.24.0 to 0.26.0 apply the longest hit of one group to all groups, so tokens are wrong.
    """
    return "max(per_group_hits)" not in inspect.getsource(vllm(_SCHEDULER))


def ended_requests_take_no_output() -> bool:
    """Whether outputs of steps in flight are dropped for a request that has ended.

    Up to 0.15, if a connector keeps the blocks of an ended request, this request receives another
    token and is freed twice (vLLM PR 33377).
    """
    update = vllm(_SCHEDULER).Scheduler.update_from_output
    return "is None or request.is_finished()" in inspect.getsource(update)


def aborted_loads_keep_blocks() -> bool:
    """Whether an aborted request keeps its blocks until its load has ended.

    Up to 0.15 the blocks may be allocated again while the connector still writes into them (vLLM PR
    32255).
    """
    finish = vllm(_SCHEDULER).Scheduler.finish_requests
    return "WAITING_FOR_REMOTE_KVS" in inspect.getsource(finish)


def idle_steps_report() -> bool:
    """Whether the scheduler receives a worker's report of a step without compute.

    0.11.0 drops the report unless a request ended its transfers, so the adapter sends the report
    again in the next step with compute (MSG-1).
    """
    mixin = vllm("v1.worker.kv_connector_model_runner_mixin").KVConnectorModelRunnerMixin
    return "not kv_connector_output.finished_sending" not in inspect.getsource(mixin)


def active_connector_class() -> Any:
    """Return the class through which Model Runner V2 drives a connector; None before 0.15."""
    try:
        return vllm("v1.worker.gpu.kv_connector").ActiveKVConnector
    except ImportError:
        return None


def finalizes_steps(*, is_v2: bool) -> bool:
    """Whether a model runner saves a step after its draft model has run (0.18.0, V2: 0.33.0)."""
    if is_v2:
        return hasattr(active_connector_class(), "finalize_step")
    mixin = vllm("v1.worker.kv_connector_model_runner_mixin").KVConnectorModelRunnerMixin
    return hasattr(mixin, "finalize_kv_connector")


def call_known(owner: Any, method: str, *args: Any) -> Any:
    """Call a method of vLLM if this release has it; returns None otherwise."""
    return getattr(owner, method)(*args) if hasattr(owner, method) else None


def takes_batch() -> bool:
    """Whether Model Runner V2 passes the batch of a step to ``start_load_kv`` (0.32.0)."""
    return "input_batch" in parameters_of(active_connector_class().pre_forward)


def gpus_use_runner_v2() -> bool:
    """Whether a GPU uses Model Runner V2 for each model that V2 supports (0.29.0)."""
    config = vllm("config").VllmConfig
    is_for_all = not hasattr(inspect.getmodule(config), "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES")
    return is_for_all and hasattr(config, "use_v2_model_runner")


def cpus_have_runner_v2() -> bool:
    """Whether the workers of the CPU build can use Model Runner V2 (vllm/v1/worker/cpu, 0.23.0)."""
    try:
        return find_spec("vllm.v1.worker.cpu.model_runner") is not None
    except ModuleNotFoundError:
        return False


def has_sleep_hooks() -> bool:
    """Whether a connector is notified before the KV cache is unmapped for a sleep (0.33.0)."""
    base = vllm("distributed.kv_transfer.kv_connector.v1.base").KVConnectorBase_V1
    return hasattr(base, "unregister_kv_caches")


def num_preemptions(request: Any) -> int:
    """Return the number of preemptions of a request; 0 in 0.11.0, which does not count them."""
    number: int = getattr(request, "num_preemptions", 0)
    return number


def sampled_tokens(tokens: list[list[int]]) -> list[Any]:
    """Convert tokens for a ``ModelRunnerOutput``, which needs arrays in 0.11.1 and 0.11.2."""
    wanted = parameters_of(vllm("v1.outputs").ModelRunnerOutput)["sampled_token_ids"]
    if "ndarray" not in str(wanted.annotation):
        return tokens
    import numpy as np

    return [np.array(each, dtype=np.int64) for each in tokens]


def complete_torch() -> None:
    """Add functions that 0.17 imports but torch 2.13 no longer has; no result depends on them."""
    import torch

    cpu: Any = torch._C._cpu
    for name in ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        if not hasattr(cpu, name):
            setattr(cpu, name, lambda: False)


def keep_async_scheduling() -> None:
    """Keep a user's ``async_scheduling`` on a CPU, where vLLM's platform switches it off.

    Source: ``CpuPlatform.check_and_update_config``, vllm/platforms/cpu.py.
    """
    platform = vllm("platforms.cpu").CpuPlatform
    check = platform.check_and_update_config

    def check_and_keep(vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    platform.check_and_update_config = staticmethod(check_and_keep)


def offloaded_block_bytes(spec: Any) -> int:
    """Return the bytes of a block that vLLM's ``OffloadingSpec`` states; 0 before 0.26."""
    config = getattr(spec, "config", None)
    number: int = getattr(config, "worker_kv_bytes_per_block", 0)
    return number


def takes_cache_config(connector_class: type) -> bool:
    """Whether a connector's constructor takes the ``KVCacheConfig``, which 0.11.0 does not pass."""
    return "kv_cache_config" in parameters_of(connector_class)


def finds_old_constructor(factory: Any, connector_class: type) -> dict[str, Any]:
    """Return the method of vLLM's factory that lets it pass two arguments to a registered class.

    Up to 0.20 vLLM passes two arguments to a class that takes two, but not if it is registered.
    """
    name = "_get_connector_class_with_compat"
    if not hasattr(factory, name):
        return {}
    find = getattr(factory, name)

    def find_class(config: Any) -> tuple[type, bool]:
        kind, takes_two = find(config)
        if kind is connector_class:
            takes_two = not takes_cache_config(kind)
        return kind, takes_two

    return {name: find_class}


def stats_data(stats: Any) -> dict[str, Any]:
    """Return the values that a connector's stats send to the front end (``to_dict``, 0.32.0)."""
    data: dict[str, Any] = stats.to_dict() if hasattr(stats, "to_dict") else stats.data
    return data
