"""What ``kvview doctor`` says: which vLLM is installed, and which seams fit it.

Every answer comes from the installed vLLM itself: a pool is built and used, the
connector and the schedulers are imported, nothing is concluded from a version.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kvview import make_offload_key
from kvview_vllm.releases.capabilities import (
    CAPABILITIES,
    NEWEST_TESTED,
    OLDEST_TESTED,
    VLLMNotInstalledError,
    engine_version,
    is_tested,
)
from kvview_vllm.releases.probes import probe_connector, probe_pool

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_SCHEDULER = "vllm.v1.core.sched.scheduler"


@dataclass(frozen=True)
class SeamReport:
    """Whether one surface of the installed vLLM fits.

    Args:
        seam: Which surface.
        fits: Whether kvview can use it.
        detail: What was found; what to do when it does not fit.
    """

    seam: str
    fits: bool
    detail: str


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was found.

    Args:
        version: Of the installed vLLM, None when there is none.
        tested: The range of releases that kvview was tested on.
        is_tested: Whether the version is in it.
        capabilities: Every flag of the table, and whether this vLLM has it.
        seams: One report a seam.
    """

    version: str | None
    tested: str
    is_tested: bool
    capabilities: dict[str, bool]
    seams: tuple[SeamReport, ...]

    @property
    def is_healthy(self) -> bool:
        """Whether every seam fits."""
        return all(seam.fits for seam in self.seams)


def diagnose() -> Diagnosis:
    """Look at the installed vLLM; changes nothing and needs no GPU."""
    tested = f"{OLDEST_TESTED} - {NEWEST_TESTED}"
    try:
        version = engine_version()
    except VLLMNotInstalledError as error:
        return Diagnosis(None, tested, False, {}, (SeamReport("vllm", False, str(error)),))
    flags: frozenset[str] = frozenset()

    def check_pool() -> str:
        nonlocal flags
        pool = _small_pool()
        flags = probe_pool(pool)
        _use_pool(pool)
        return "touch, free and walk work on a real BlockPool"

    def check_connector() -> str:
        nonlocal flags
        flags |= probe_connector()
        import_module("kvview_vllm.connector")
        return "KVViewConnector has every method that this vLLM requires"

    def check_offloading() -> str:
        nonlocal flags
        flags |= _offloading_flags()
        return "vLLM's own manager of host pages stores, loads and evicts"

    seams = tuple(
        _report(seam, check)
        for seam, check in (
            ("pool", check_pool),
            ("binding", _check_binding),
            ("scheduler", _check_schedulers),
            ("connector", check_connector),
            ("offloading", check_offloading),
        )
    )
    capabilities = {capability.name: capability.name in flags for capability in CAPABILITIES}
    return Diagnosis(version, tested, is_tested(version), capabilities, seams)


def _report(seam: str, check: Callable[[], str]) -> SeamReport:
    try:
        return SeamReport(seam, True, check())
    except Exception as error:
        return SeamReport(seam, False, f"{type(error).__name__}: {error}")


def _small_pool() -> Any:
    pool_class = import_module("vllm.v1.core.block_pool").BlockPool
    known = {"num_gpu_blocks": 8, "enable_caching": True, "hash_block_size": 16}
    parameters = inspect.signature(pool_class).parameters
    return pool_class(**{name: known[name] for name in known if name in parameters})


def _use_pool(pool: Any) -> None:
    from kvview_vllm.pool import view

    bound = view(pool, owner="kvview doctor")
    free_before = bound.num_free_blocks()
    bound.touch_blocks([1, 2, 1])
    bound.free_blocks([1, 2, 1])
    list(bound.iter_free_block_ids_with_hash())
    if bound.num_free_blocks() != free_before:
        raise RuntimeError("blocks that were touched and freed are not free again")
    bound.close()


def _offloading_flags() -> frozenset[str]:
    from kvview_vllm.offloading import VLLMOffloadingManager
    from kvview_vllm.offloading.translated import make_cpu_manager

    manager = VLLMOffloadingManager(lambda: make_cpu_manager(1))
    for name in (b"a", b"b"):
        keys = [make_offload_key(name, 0)]
        manager.prepare_store(keys)
        manager.complete_store(keys)
        manager.prepare_load(keys)
        manager.complete_load(keys)
    return manager.capabilities


def _check_binding() -> str:
    base = import_module(_BASE).KVConnectorBase_V1
    for hook in ("bind_kv_cache_manager", "bind_gpu_block_pool"):
        if hasattr(base, hook):
            return f"the engine binds through {hook}, children of MultiConnector too"
    init = import_module(_SCHEDULER).Scheduler.__init__
    while hasattr(init, "__wrapped__"):
        init = init.__wrapped__
    if "bind_gpu_block_pool" in init.__code__.co_consts:
        return (
            "the engine binds through bind_gpu_block_pool; for children of MultiConnector "
            "add --scheduler-cls kvview_vllm.scheduler.ViewScheduler"
        )
    return "this release has no hook: add --scheduler-cls kvview_vllm.scheduler.ViewScheduler"


def _check_schedulers() -> str:
    module = import_module("kvview_vllm.scheduler")
    return f"{module.ViewScheduler.__name__} and {module.AsyncViewScheduler.__name__} load"
