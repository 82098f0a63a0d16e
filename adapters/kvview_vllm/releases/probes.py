"""Recognise what is bound: shapes are checked once, and a seam is read off them.

1. A shape that no tested release has **must** be refused, with nothing bound.
2. A release after the tested range **must** be refused too: its shapes may mean
   something else by now. ``KVVIEW_ALLOW_UNTESTED_VLLM=1`` turns that into a warning,
   which is all that a version string that names no known release gets.
3. Probing **must** change nothing.

Source: every release of the tested range; :mod:`.release` says what differs.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from typing import Any

from kvview_vllm.releases.calls import EVENT_FIELDS
from kvview_vllm.releases.release import (
    BindingSeam,
    ConnectorSeam,
    GeometrySeam,
    OffloadingSeam,
    PoolSeam,
    find_class,
    signature_of,
    takes,
)
from kvview_vllm.releases.shapes import check_shapes
from kvview_vllm.releases.versions import engine_version, importing, refusal, require_usable

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


@dataclass(frozen=True)
class Release:
    """The installed vLLM, each seam probed when it is first asked for.

    Of a pool or a manager at hand, :func:`probe_pool` and :func:`probe_offloading`
    say more than the classes do.

    Args:
        version: Its version string.
    """

    version: str

    @cached_property
    @importing()
    def binding(self) -> BindingSeam:
        """How connectors are bound."""
        check_shapes(BindingSeam.seam)
        return BindingSeam.found_on(import_module(_BASE).KVConnectorBase_V1)

    @cached_property
    @importing()
    def geometry(self) -> GeometrySeam:
        """How block sizes are said."""
        check_shapes(GeometrySeam.seam)
        return GeometrySeam.found_on(import_module("vllm.v1.kv_cache_interface"))

    @cached_property
    @importing()
    def connector(self) -> ConnectorSeam:
        """What connectors and workers tell each other."""
        return probe_connector()

    @cached_property
    @importing()
    def offloading(self) -> OffloadingSeam:
        """How managers are called."""
        return probe_offloading(require_class("OffloadingManager"))


def installed() -> Release:
    """The installed vLLM, one object for the process.

    Raises:
        VLLMNotInstalledError: No vLLM can be imported.
    """
    return _release(engine_version())


_release = cache(Release)


def _check_signatures(seam: str, owner: Any, known: Mapping[str, tuple[str, ...]]) -> None:
    kind = owner if isinstance(owner, type) else type(owner)
    for method, expected in known.items():
        if (found := signature_of(owner, method)) not in expected:
            wanted = " or ".join(method + signature for signature in expected)
            raise refusal(seam, f"{kind.__name__}.{method}{found}", wanted)


def _check_attributes(seam: str, name: str, owner: Any, wanted: tuple[str, ...]) -> None:
    missing = [attribute for attribute in wanted if not hasattr(owner, attribute)]
    if missing:
        raise refusal(
            seam, f"{name} without {', '.join(missing)}", f"{name} with {', '.join(wanted)}"
        )


# --- the pool seam: vllm.v1.core.block_pool.BlockPool ---

_POOL_ATTRIBUTES = {
    "BlockPool": (
        *("blocks", "num_gpu_blocks", "null_block", "free_block_queue"),
        "get_num_free_blocks",
    ),
    "FreeKVCacheBlockQueue": ("fake_free_list_head", "fake_free_list_tail", "num_free_blocks"),
    "KVCacheBlock": ("block_id", "block_hash", "prev_free_block", "next_free_block"),
}
_POOL_SIGNATURES: dict[str, tuple[str, ...]] = {
    "touch": ("(blocks)",),
    "free_blocks": ("(ordered_blocks)", "(ordered_blocks, prepend=False)"),
    "get_cached_block": ("(block_hash, kv_cache_group_ids)",),
}


def probe_pool(block_pool: Any) -> PoolSeam:
    """Recognise a block pool, once, when a view is made of it.

    1. Nothing of the pool changes: the only calls are touches of no block at all.
    2. A shape that no tested release has is refused.

    Args:
        block_pool: What should be a ``vllm.v1.core.block_pool.BlockPool``.

    Returns:
        What differs in it.

    Raises:
        UnsupportedEngineError: The shape is unknown.
        VLLMNotInstalledError: No vLLM can be imported.
    """
    check_shapes(PoolSeam.seam)
    _check_pool_attributes(block_pool)
    _check_signatures(PoolSeam.seam, block_pool, _POOL_SIGNATURES)
    if not takes(block_pool.touch, []):
        raise refusal(
            PoolSeam.seam, "BlockPool.touch([]) raises", "that touching no block is allowed"
        )
    return PoolSeam.found_on(block_pool)


def _check_pool_attributes(pool: Any) -> None:
    kind = type(pool)
    name = "BlockPool" if kind.__name__ == "BlockPool" else f"{kind.__module__}.{kind.__qualname__}"
    _check_attributes(PoolSeam.seam, name, pool, _POOL_ATTRIBUTES["BlockPool"])
    for name, instance in (
        ("FreeKVCacheBlockQueue", pool.free_block_queue),
        ("KVCacheBlock", pool.null_block),
    ):
        _check_attributes(PoolSeam.seam, name, instance, _POOL_ATTRIBUTES[name])
    blocks = pool.blocks
    if type(blocks) is not list or blocks[0] is not pool.null_block:
        raise refusal(
            PoolSeam.seam, "BlockPool.blocks of another order", "a list with the null block first"
        )
    if pool.null_block.block_id != 0 or blocks[-1].block_id != len(blocks) - 1:
        raise refusal(
            PoolSeam.seam, "block ids that are no list positions", "blocks[i].block_id == i"
        )


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


def probe_offloading(manager: Any) -> OffloadingSeam:
    """Recognise an offloading manager, once, when it is wrapped; nothing is called.

    Args:
        manager: What should be a manager of ``vllm.v1.kv_offload``, or its class.

    Returns:
        What differs in it.

    Raises:
        UnsupportedEngineError: The shape is unknown.
        VLLMNotInstalledError: No vLLM can be imported.
    """
    check_shapes(OffloadingSeam.seam)
    present = {
        name: _OFFLOADING_HOOKS[name] for name in _OFFLOADING_HOOKS if hasattr(manager, name)
    }
    _check_signatures(OffloadingSeam.seam, manager, _OFFLOADING_SIGNATURES | present)
    return OffloadingSeam.found_on(manager)


# --- the connector seam: KVConnectorBase_V1 and what the scheduler tells it ---


@dataclass(frozen=True)
class ConnectorSurface:
    """What :class:`~kvview_vllm.connector.KVViewConnector` meets of vLLM.

    Args:
        base: ``KVConnectorBase_V1``.
        base_module: Where it is.
        blocks: ``KVCacheManager``, which allocates for a load.
        request: ``Request``.
        events: ``BlockStored`` and ``BlockRemoved``.
        fields: Names of the fields of the classes that the scheduler and the worker
            pass on, by class.
    """

    base: Any
    base_module: Any
    blocks: Any
    request: Any
    events: tuple[Any, ...]
    fields: Mapping[str, frozenset[str]]

    @classmethod
    def installed(cls) -> ConnectorSurface:
        """That of the installed vLLM."""
        base_module: Any = import_module(_BASE)
        events: Any = import_module("vllm.distributed.kv_events")
        output: Any = import_module("vllm.v1.core.sched.output")
        outputs: Any = import_module("vllm.v1.outputs")
        kinds = [getattr(output, name) for name in _TOLD if hasattr(output, name)]
        return cls(
            base_module.KVConnectorBase_V1,
            base_module,
            import_module("vllm.v1.core.kv_cache_manager").KVCacheManager,
            import_module("vllm.v1.request").Request,
            (events.BlockStored, events.BlockRemoved),
            {
                kind.__name__: frozenset(kind.__dataclass_fields__)
                for kind in (*kinds, outputs.KVConnectorOutput)
            },
        )


_TOLD = ("SchedulerOutput", "NewRequestData", "CachedRequestData")
_ABSTRACT = {
    *("build_connector_meta", "get_num_new_matched_tokens", "save_kv_layer", "start_load_kv"),
    *("update_state_after_alloc", "wait_for_layer_load", "wait_for_save"),
}


def probe_connector(surface: ConnectorSurface | None = None) -> ConnectorSeam:
    """Recognise vLLM's connector interface, once, when a connector is built.

    Args:
        surface: The interface; that of the installed vLLM if None.

    Returns:
        What differs in it.

    Raises:
        UnsupportedEngineError: The shape is unknown.
        VLLMNotInstalledError: No vLLM can be imported.
    """
    require_usable(ConnectorSeam.seam)
    surface = surface or ConnectorSurface.installed()
    new = sorted(surface.base.__abstractmethods__ - _ABSTRACT)
    if new:
        raise refusal(
            ConnectorSeam.seam,
            f"KVConnectorBase_V1 that requires {', '.join(new)}",
            f"that it requires {', '.join(sorted(_ABSTRACT))}",
        )
    for event in surface.events:
        names = event.__struct_fields__
        required = names[: len(names) - len(event.__struct_defaults__)]
        if new := [name for name in required if name not in EVENT_FIELDS]:
            raise refusal(
                ConnectorSeam.seam,
                f"{event.__name__} that requires {', '.join(new)}",
                f"that it requires {', '.join(EVENT_FIELDS)} at most",
            )
    check_shapes(ConnectorSeam.seam)
    return ConnectorSeam.found_on(surface)


def check_scheduler() -> None:
    """See that vLLM's ``Scheduler`` names what is read of it when a pool is bound.

    Raises:
        UnsupportedEngineError: It does not.
    """
    scheduler: Any = import_module("vllm.v1.core.sched.scheduler").Scheduler
    code = inspect.unwrap(scheduler.__init__).__code__
    missing = [n for n in ("connector", "kv_cache_manager") if n not in code.co_names]
    if missing:
        raise refusal(
            BindingSeam.seam,
            f"a Scheduler without {', '.join(missing)}",
            "one with connector and kv_cache_manager",
        )


def require_class(name: str) -> Any:
    """A class of vLLM's offloading interface that every tested release has.

    Raises:
        UnsupportedEngineError: This one does not.
        VLLMNotInstalledError: No vLLM can be imported.
    """
    engine_version()
    found = find_class(name)
    if found is None:
        raise refusal(OffloadingSeam.seam, f"no {name}", f"a {name} in vllm.v1.kv_offload")
    return found
