"""The seam of tiers below the host, ``vllm.v1.kv_offload.tiering`` (0.22.0 and later).

vLLM calls this interface experimental, so its shapes are probed only in this module.

Source: ``vllm/v1/kv_offload/tiering/base.py`` and ``spec.py``, 0.22.0 to the newest tested.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, ClassVar

from kvview import OffloadingEvent
from kvview_vllm.releases.compat.calls import (
    blocks_per_chunk,
    make_known,
    make_medium,
    publishes_events as config_publishes_events,
    tokens_per_chunk,
)
from kvview_vllm.releases.compat.probes import check_keys
from kvview_vllm.releases.compat.seams import Seam
from kvview_vllm.releases.compat.shapes import check_shapes, find_class
from kvview_vllm.releases.compat.versions import engine_version, refusal, vllm

_TIERING = "v1.kv_offload.tiering"
_BASE = f"{_TIERING}.base"
_UTILS = "v1.core.kv_cache_utils"


@dataclass(frozen=True)
class TierSeam(Seam):
    """``SecondaryTierManager`` and its jobs."""

    seam: ClassVar[str] = "tier"

    partial_loads: bool
    chunk_ids: bool
    config_objects: bool
    tier_metrics: bool
    tier_events: bool
    fixed_hash_root: bool


def has_random_hash_root() -> bool:
    """Whether the chain of block hashes starts with a random value.

    An engine chooses this value after it has built its tiers. From 0.29.0 on only ``xxhash`` starts
    with a random value, unless a seed is set.
    """
    utils = vllm(_UTILS)
    seed = getattr(utils, "_NONE_HASH_SEED", None)
    fixed = (None, getattr(utils, "DEFAULT_NONE_HASH_SEED", None))
    return "PYTHONHASHSEED" not in os.environ and seed not in fixed


def has_tiers() -> bool:
    """Whether this vLLM has tiers below the host."""
    engine_version()
    return find_spec(f"vllm.{_TIERING}") is not None


@cache
def tier_seam() -> TierSeam:
    """Return the differences of the installed vLLM.

    Raises:
        UnsupportedEngineError: The installed vLLM has no tiers, or tiers of a shape that no tested
            release has.
        VLLMNotInstalledError: No vLLM can be imported.
    """
    found = TierSeam.found_on(require_tier_class("SecondaryTierManager"))
    check_shapes(TierSeam.seam)
    check_keys(TierSeam.seam, find_class("make_offload_key"))
    return found


def require_tier_class(name: str) -> Any:
    """Return a class of vLLM's tiers that every release with tiers has.

    Raises:
        UnsupportedEngineError: The installed release does not have the class.
        VLLMNotInstalledError: No vLLM can be imported.
    """
    if has_tiers():
        for module in ("base", "factory", "spec"):
            found = getattr(vllm(f"{_TIERING}.{module}"), name, None)
            if found is not None:
                return found
    raise refusal(
        TierSeam.seam,
        f"no {name}",
        f"a {name} in vllm.{_TIERING}, which every release from 0.22.0 on has",
    )


def places_of(job: Any) -> Sequence[int]:
    """Return the rows of the host's memory that a job moves."""
    return [int(place) for place in (job.chunk_ids if tier_seam().chunk_ids else job.block_ids)]


def make_tier_job(job_id: int, keys: Sequence[Any], rows: Sequence[int], is_load: bool) -> Any:
    """Make a job like those that vLLM submits to a tier."""
    import numpy as np

    base = vllm(_BASE)
    places = np.array(rows, dtype=np.int64)
    return make_known(
        getattr(base, "TransferJob", None) or base.JobMetadata,
        job_id=job_id,
        keys=[*keys],
        req_context=make_known(find_class("ReqContext"), req_id=str(job_id)),
        chunk_ids=places,
        block_ids=places,
        is_promotion=is_load,
    )


def job_result(job_id: int, keys: Sequence[Any], flags: Sequence[bool]) -> Any:
    """Make a job's result, with the keys that succeeded if the release has partial loads."""
    kind = require_tier_class("JobResult")
    if all(flags) or not tier_seam().partial_loads:
        return make_known(kind, job_id=job_id, success=all(flags))
    good = [key for key, flag in zip(keys, flags, strict=True) if flag]
    return make_known(kind, job_id=job_id, success=False, successful_keys=good)


def succeeded_keys(result: Any) -> set[Any]:
    """Return the keys of a failed load that succeeded, if the release supports partial loads."""
    return set(result.successful_keys or ()) if tier_seam().partial_loads else set()


def lookup_answers() -> dict[bool | None, Any]:
    """Return the release's values for a hit (True), a miss (False) and a retry (None)."""
    results = find_class("LookupResult")
    if results is None:  # 0.25.0
        return {True: True, False: False, None: None}
    return {True: results.HIT, False: results.MISS, None: results.RETRY}


def storage_medium() -> Any:
    """Return the medium of a tier; None in releases whose tiers have no medium."""
    media = find_class("Medium")
    return None if media is None else media.STORAGE


def request_preference() -> Any:
    """Return the result of a tier's ``on_new_request`` that states no preference."""
    kind = find_class("RequestOffloadingContext")
    return None if kind is None else make_known(kind)


def _memory_order() -> str | None:
    """Return ``NHD`` or ``HND``, which up to 0.28 is a setting of the process."""
    try:
        return str(vllm("v1.attention.backends.utils").get_kv_cache_layout())
    except (ImportError, AttributeError):
        return None
    except AssertionError:
        # The process sets no layout, and the scheduler's process has no current configuration, so
        # the worker uses the layout that the connector of offloading specs requires.
        connector = vllm("distributed.kv_transfer.kv_connector.v1.offloading_connector")
        return str(connector.OffloadingConnector.get_required_kvcache_layout(None))


def namespace_facts(spec: Any, page_bytes: int) -> dict[str, Any]:
    """Return all fields of a spec's :class:`~kvview.tier.Namespace` except the weights.

    Args:
        spec: A ``TieringOffloadingSpec``.
        page_bytes: Bytes of a row of the host's memory, summed over all ranks.
    """
    if tier_seam().config_objects:
        config = spec.config
        model, dtype, parallel = config.model.name, config.model.dtype, config.parallel
        shape = parallel.tp_size, parallel.pp_size
        layers: Any = [(group.tokens_per_block, group.layer_names) for group in config.groups]
        order = [
            getattr(config, name, None)
            for name in ("kv_cache_layout", "canonical_layout", "replicated_layout")
        ]
    else:
        config = spec.vllm_config
        model, parallel = config.model_config.model, config.parallel_config
        dtype = f"{config.cache_config.cache_dtype} of {config.model_config.dtype}"
        shape = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        groups = spec.kv_cache_config.kv_cache_groups
        layers = [(group.kv_cache_spec.block_size, group.layer_names) for group in groups]
        order = [getattr(config.cache_config, "prefix_caching_hash_algo", "")]
    order.append(_memory_order())
    layout = [page_bytes, parallel.world_size, blocks_per_chunk(spec), layers, order]
    return {
        "model": str(model),
        "kv_dtype": str(dtype),
        "layout": repr(layout),
        "block_size": tokens_per_chunk(spec),
        "tensor_parallel": int(shape[0]),
        "pipeline_parallel": int(shape[1]),
    }


def publishes_events(spec: Any) -> bool:
    """Whether the engine of a spec publishes KV events."""
    config = getattr(spec, "kv_events_config", None)  # 0.24.0
    return config_publishes_events(spec.vllm_config if config is None else spec)


def tier_event(event: OffloadingEvent, ownership: str) -> Any:
    """Make an event of a tier, in the form of the events of the release's managers."""
    return make_known(
        find_class("OffloadingEvent"),
        keys=[*event.keys],
        medium=make_medium(event.medium),
        removed=event.removed,
        ownership=ownership,
    )


def with_events_of_tiers(manager: Any, kind: Any) -> Any:
    """Make a tiering manager that also returns the events of its tiers, in every release.

    Args:
        manager: The release's manager; the result takes over its tiers and replaces it.
        kind: Class of the tiers that report events.
    """
    if tier_seam().tier_events:
        return manager
    managers: Any = type(manager)

    class ManagerWithTierEvents(managers):  # type: ignore[misc]
        def take_events(self) -> list[Any]:
            events = [*super().take_events()]
            for tier in self.secondary_tiers:
                if isinstance(tier, kind):
                    events += tier.take_events()
            return events

    return make_known(
        ManagerWithTierEvents,
        primary_tier=manager.primary_tier,
        secondary_tiers=manager.secondary_tiers,
        enable_events=manager.events is not None,
    )


def metric_definitions(
    counters: Mapping[str, str], gauges: Mapping[str, str], labels: tuple[str, ...]
) -> dict[str, Any]:
    """Make the metric series of a tier in vLLM's form, from names and descriptions."""
    kinds = {"OffloadingCounterMetadata": counters, "OffloadingGaugeMetadata": gauges}
    return {
        name: make_known(find_class(kind), documentation=text, labelnames=labels)
        for kind, texts in kinds.items()
        for name, text in texts.items()
    }


def metric_stats(
    counters: Mapping[str, float], gauges: Mapping[str, float], labels: tuple[str, ...]
) -> Any:
    """Make stats from the changes of the series, in the form that vLLM's front end receives."""
    metrics = vllm("distributed.kv_transfer.kv_connector.v1.offloading.metrics")
    stats = make_known(metrics.OffloadingConnectorStats)
    for name, more in counters.items():
        stats.increase_counter(name, more, labels)
    for name, value in gauges.items():
        stats.set_gauge(name, value, labels)
    return stats


def constructor_options(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the options of a tier into options of vLLM's own constructor and the user's options."""
    own = {name: value for name, value in given.items() if name == "backpressure_detector"}
    return own, {name: value for name, value in given.items() if name not in own}
