"""Recognise what is bound: shapes are checked once, and flags are read off them.

1. A shape that no tested release has **must** be refused, with nothing bound.
2. A release after the tested range **must** be refused too: its shapes may mean
   something else by now. ``KVVIEW_ALLOW_UNTESTED_VLLM=1`` turns that into a warning,
   which is all that a version string that names no known release gets.
3. Probing **must** change nothing.

Source: every release of the tested range;
:mod:`kvview_vllm.releases.capabilities` says what differs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kvview_vllm.releases.capabilities import (
    CAPABILITIES,
    CONNECTOR_SEAM,
    NEWEST_TESTED,
    OFFLOADING_SEAM,
    OLDEST_TESTED,
    POOL_SEAM,
    engine_version,
    is_newer,
    is_tested,
    refusal,
    signature_of,
    takes,
)

ALLOW_UNTESTED = "KVVIEW_ALLOW_UNTESTED_VLLM"

_logger = logging.getLogger(__name__)


def _check_signatures(seam: str, owner: Any, known: Mapping[str, tuple[str, ...]]) -> None:
    for method, expected in known.items():
        if (found := signature_of(owner, method)) not in expected:
            wanted = " or ".join(method + signature for signature in expected)
            raise refusal(seam, f"{type(owner).__name__}.{method}{found}", wanted)


def _flags(seam: str, owner: Any) -> frozenset[str]:
    """The flags that an object of a known shape has, if its release may be used."""
    version = engine_version()
    if is_newer(version) and os.environ.get(ALLOW_UNTESTED) != "1":
        raise refusal(
            seam,
            "a release after the tested ones, whose known shapes may mean something else",
            f"a tested release, or {ALLOW_UNTESTED}=1 in the environment, at your own risk",
        )
    if not is_tested(version):
        _logger.warning(
            "vLLM %s is outside the tested range %s - %s; its %s seam has a known shape, so "
            "it is used",
            *(version, OLDEST_TESTED, NEWEST_TESTED, seam),
        )
    return frozenset(
        capability.name
        for capability in CAPABILITIES
        if capability.seam == seam and capability.probe(owner)
    )


# --- the pool seam: vllm.v1.core.block_pool.BlockPool ---

_POOL_ATTRIBUTES = {
    "BlockPool": ("blocks", "null_block", "free_block_queue", "get_num_free_blocks"),
    "FreeKVCacheBlockQueue": ("fake_free_list_head", "fake_free_list_tail"),
    "KVCacheBlock": ("block_id", "block_hash", "prev_free_block", "next_free_block"),
}
_POOL_SIGNATURES: dict[str, tuple[str, ...]] = {
    "touch": ("(blocks)",),
    "free_blocks": ("(ordered_blocks)", "(ordered_blocks, prepend=False)"),
    "get_cached_block": ("(block_hash, kv_cache_group_ids)",),
}


def probe_pool(block_pool: Any) -> frozenset[str]:
    """Recognise a block pool, once, when a view is made of it.

    1. Nothing of the pool changes: the only calls are touches of no block at all.
    2. A shape that no tested release has is refused.

    Args:
        block_pool: What should be a ``vllm.v1.core.block_pool.BlockPool``.

    Returns:
        The names of its capabilities.

    Raises:
        UnsupportedEngineError: The shape is unknown.
        VLLMNotInstalledError: No vLLM can be imported.
    """
    engine_version()
    _check_pool_attributes(block_pool)
    _check_signatures(POOL_SEAM, block_pool, _POOL_SIGNATURES)
    if not takes(block_pool.touch, []):
        raise refusal(POOL_SEAM, "BlockPool.touch([]) raises", "that touching no block is allowed")
    return _flags(POOL_SEAM, block_pool)


def _check_pool_attributes(pool: Any) -> None:
    missing = [name for name in _POOL_ATTRIBUTES["BlockPool"] if not hasattr(pool, name)]
    if missing:
        raise refusal(
            POOL_SEAM,
            f"{type(pool).__module__}.{type(pool).__qualname__} without {', '.join(missing)}",
            f"a BlockPool with {', '.join(_POOL_ATTRIBUTES['BlockPool'])}",
        )
    for name, instance in (
        ("FreeKVCacheBlockQueue", pool.free_block_queue),
        ("KVCacheBlock", pool.null_block),
    ):
        missing = [
            attribute for attribute in _POOL_ATTRIBUTES[name] if not hasattr(instance, attribute)
        ]
        if missing:
            raise refusal(
                POOL_SEAM,
                f"{name} without {', '.join(missing)}",
                f"{name} with {', '.join(_POOL_ATTRIBUTES[name])}",
            )
    blocks = pool.blocks
    if type(blocks) is not list or blocks[0] is not pool.null_block:
        raise refusal(
            POOL_SEAM, "BlockPool.blocks of another order", "a list with the null block first"
        )
    if pool.null_block.block_id != 0 or blocks[-1].block_id != len(blocks) - 1:
        raise refusal(POOL_SEAM, "block ids that are no list positions", "blocks[i].block_id == i")


# --- the offloading seam: vllm.v1.kv_offload's managers ---

_ONE_ARGUMENT = ("(block_hashes)", "(keys)", "(keys, req_context)")
_OFFLOADING_SIGNATURES: dict[str, tuple[str, ...]] = {
    "lookup": ("(block_hashes)", "(key, req_context)"),
    "prepare_load": ("(block_hashes)", "(keys, req_context)"),
    "prepare_store": ("(block_hashes)", "(keys, req_context)"),
    "touch": _ONE_ARGUMENT,
    "complete_load": _ONE_ARGUMENT,
    "complete_store": (
        *("(block_hashes, success=True)", "(keys, success=True)"),
        "(keys, req_context, success=True)",
    ),
    "take_events": ("()",),
}
_OFFLOADING_HOOKS: dict[str, tuple[str, ...]] = {
    "on_new_request": ("(req_context)",),
    "on_request_finished": ("(req_context)",),
    "on_schedule_end": ("()", "(context)"),
    "has_pending_work": ("()",),
    "reset_cache": ("()",),
    "shutdown": ("()",),
}


def probe_offloading(manager: Any) -> frozenset[str]:
    """Recognise an offloading manager, once, when it is wrapped; nothing is called.

    Args:
        manager: What should be a manager of ``vllm.v1.kv_offload``.

    Returns:
        The names of its capabilities.

    Raises:
        UnsupportedEngineError: The shape is unknown.
        VLLMNotInstalledError: No vLLM can be imported.
    """
    engine_version()
    present = {
        name: _OFFLOADING_HOOKS[name] for name in _OFFLOADING_HOOKS if hasattr(manager, name)
    }
    _check_signatures(OFFLOADING_SEAM, manager, _OFFLOADING_SIGNATURES | present)
    return _flags(OFFLOADING_SEAM, manager)


# --- the connector seam: KVConnectorBase_V1 and what the scheduler tells it ---


@dataclass(frozen=True)
class ConnectorSurface:
    """What :class:`~kvview_vllm.connector.KVViewConnector` meets of vLLM.

    Args:
        base: ``KVConnectorBase_V1``.
        base_module: Where it is.
        blocks: ``KVCacheManager``, which allocates for a load.
        events: ``BlockStored``.
        fields: Names of the fields of the classes that the scheduler and the worker
            pass on, by class.
    """

    base: Any
    base_module: Any
    blocks: Any
    events: Any
    fields: Mapping[str, frozenset[str]]

    @classmethod
    def installed(cls) -> ConnectorSurface:
        """That of the installed vLLM."""
        base_module: Any = import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
        output: Any = import_module("vllm.v1.core.sched.output")
        outputs: Any = import_module("vllm.v1.outputs")
        kinds = [getattr(output, name) for name in _CONNECTOR_FIELDS if hasattr(output, name)]
        return cls(
            base_module.KVConnectorBase_V1,
            base_module,
            import_module("vllm.v1.core.kv_cache_manager").KVCacheManager,
            import_module("vllm.distributed.kv_events").BlockStored,
            {
                kind.__name__: frozenset(kind.__dataclass_fields__)
                for kind in (*kinds, outputs.KVConnectorOutput)
            },
        )


_CONNECTOR_FIELDS = {
    "SchedulerOutput": ("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"),
    "NewRequestData": ("req_id", "block_ids", "num_computed_tokens"),
    "CachedRequestData": ("req_ids", "new_block_ids", "num_computed_tokens"),
    "KVConnectorOutput": ("finished_sending", "finished_recving", "kv_connector_stats"),
}
_CONNECTOR_SIGNATURES: dict[str, tuple[str, ...]] = {
    "__init__": (
        "(self, vllm_config, role)",
        "(self, vllm_config, role, kv_cache_config=None)",
        "(self, vllm_config, role, kv_cache_config)",
    ),
    "get_num_new_matched_tokens": ("(self, request, num_computed_tokens)",),
    "update_state_after_alloc": ("(self, request, blocks, num_external_tokens)",),
    "build_connector_meta": ("(self, scheduler_output)",),
    "update_connector_output": ("(self, connector_output)",),
    "request_finished": ("(self, request, block_ids)",),
    "take_events": ("(self)",),
    "register_kv_caches": ("(self, kv_caches)",),
    "start_load_kv": ("(self, forward_context, **kwargs)",),
    "get_finished": ("(self, finished_req_ids)",),
}
_CONNECTOR_HOOKS: dict[str, tuple[str, ...]] = {
    "bind_gpu_block_pool": ("(self, gpu_block_pool)",),
    "bind_kv_cache_manager": ("(self, kv_cache_manager)",),
    "build_connector_worker_meta": ("(self)",),
    "get_block_ids_with_load_errors": ("(self)",),
    "get_transfer_results": ("(self, finished_req_ids)",),
    "has_pending_push_work": ("(self)",),
    "reset_cache": ("(self)",),
}
_ABSTRACT = {
    *("build_connector_meta", "get_num_new_matched_tokens", "save_kv_layer", "start_load_kv"),
    *("update_state_after_alloc", "wait_for_layer_load", "wait_for_save"),
}


def probe_connector(surface: ConnectorSurface | None = None) -> frozenset[str]:
    """Recognise vLLM's connector interface, once, when a connector is built.

    Args:
        surface: The interface; that of the installed vLLM if None.

    Returns:
        The names of its capabilities.

    Raises:
        UnsupportedEngineError: The shape is unknown.
        VLLMNotInstalledError: No vLLM can be imported.
    """
    engine_version()
    surface = surface or ConnectorSurface.installed()
    for name, wanted in _CONNECTOR_FIELDS.items():
        missing = [field for field in wanted if field not in surface.fields.get(name, ())]
        if missing:
            raise refusal(
                CONNECTOR_SEAM,
                f"{name} without {', '.join(missing)}",
                f"{name} with {', '.join(wanted)}",
            )
    new = sorted(surface.base.__abstractmethods__ - _ABSTRACT)
    if new:
        raise refusal(
            CONNECTOR_SEAM,
            f"KVConnectorBase_V1 that requires {', '.join(new)}",
            f"that it requires {', '.join(sorted(_ABSTRACT))}",
        )
    present = {
        name: known for name, known in _CONNECTOR_HOOKS.items() if hasattr(surface.base, name)
    }
    _check_signatures(CONNECTOR_SEAM, surface.base, _CONNECTOR_SIGNATURES | present)
    return _flags(CONNECTOR_SEAM, surface)
