"""The results of ``kvview doctor``: the version of the installed vLLM, and a report for each seam.

Every result is found on the installed vLLM itself, and is never derived from its version. The
command runs the same trials that run when a connector is bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

from kvview import UnsupportedEngineError
from kvview_vllm.releases import (
    TESTED,
    Release,
    VLLMNotInstalledError,
    differences,
    engine_version,
    installed,
    is_tested,
)
from kvview_vllm.releases.compat.calls import make_block_pool
from kvview_vllm.releases.compat.seams import Seam
from kvview_vllm.releases.compat.versions import VLLMNotImportableError, importing


@dataclass(frozen=True)
class SeamReport:
    """Whether one surface of the installed vLLM fits.

    Args:
        seam: Name of the surface.
        fits: Whether kvview can use it.
        detail: The findings, and a remedy if the surface does not fit.
    """

    seam: str
    fits: bool
    detail: str


@dataclass(frozen=True)
class Diagnosis:
    """All findings of the command.

    Args:
        version: Version of the installed vLLM; None if vLLM is not installed.
        tested: The range of releases on which kvview was tested.
        is_tested: Whether the version is in that range.
        is_healthy: Whether every seam fits.
        capabilities: Whether this vLLM has each flag of the table of differences.
        seams: One report per seam.
        schema_version: Version of the JSON format, which grows when a field is removed or changes
            its meaning.
    """

    version: str | None
    tested: str
    is_tested: bool
    is_healthy: bool
    capabilities: dict[str, bool]
    seams: tuple[SeamReport, ...]
    schema_version: Literal[1] = 1


def diagnose() -> Diagnosis:
    """Examine the installed vLLM without changing it and without a GPU."""
    try:
        version = engine_version()
    except VLLMNotInstalledError as error:
        return Diagnosis(None, TESTED, False, False, {}, (SeamReport("vllm", False, str(error)),))
    found: list[Seam] = []
    try:
        seams = tuple(_report(seam, check, found) for seam, check in _CHECKS.items())
    except VLLMNotImportableError as error:
        reports = (SeamReport("vllm", False, str(error)),)
        return Diagnosis(version, TESTED, is_tested(version), False, {}, reports)
    flags = {name for seam in found for name, has in vars(seam).items() if has is True}
    capabilities = {each.name: each.name in flags for each in differences()}
    fits = all(seam.fits for seam in seams)
    return Diagnosis(version, TESTED, is_tested(version), fits, capabilities, seams)


_Check = Callable[[Release], tuple[Seam, str]]


def _report(seam: str, check: _Check, found: list[Seam]) -> SeamReport:
    try:
        with importing():
            probed, detail = check(installed())
    except VLLMNotImportableError:
        raise
    except Exception as error:
        return SeamReport(seam, False, f"{type(error).__name__}: {error}")
    found.append(probed)
    return SeamReport(seam, True, detail)


def _check_pool(_: Release) -> tuple[Seam, str]:
    from kvview_vllm.pool import view

    bound = view(make_block_pool(8), owner="kvview doctor")
    return bound.release, "touch, free and walk work on a real BlockPool"


def _check_binding(release: Release) -> tuple[Seam, str]:
    binding = release.binding
    flag = "add --scheduler-cls kvview_vllm.scheduler.ViewScheduler"
    if binding.pool_hook:
        hook = "bind_kv_cache_manager" if binding.manager_hook else "bind_gpu_block_pool"
        return binding, f"the engine binds through {hook}, including children of MultiConnector"
    if binding.optional_pool_hook:
        return binding, (
            f"the engine binds through bind_gpu_block_pool; for children of MultiConnector {flag}"
        )
    return binding, f"this release has no hook: {flag}"


def _check_schedulers(release: Release) -> tuple[Seam, str]:
    module = import_module("kvview_vllm.scheduler")
    names = f"{module.ViewScheduler.__name__} and {module.AsyncViewScheduler.__name__}"
    return release.geometry, f"{names} load"


def _check_connector(release: Release) -> tuple[Seam, str]:
    found = release.connector
    from kvview_vllm.connector.connector import KVViewConnector
    from kvview_vllm.connector.dry_run.trial_run import try_connector

    if problem := try_connector(KVViewConnector):
        raise UnsupportedEngineError(f"no request could be served in a trial run: {problem}")
    return found, "KVViewConnector has every method, and served four requests in a trial run"


def _check_tier(release: Release) -> tuple[Seam, str]:
    from kvview_vllm.releases.compat.tiers import has_tiers, tier_seam

    if not has_tiers():
        return release.geometry, "this release has no tiers below the host (0.22.0)"
    from kvview_vllm.doctor.tier_trial import try_tier

    if problem := try_tier():
        raise UnsupportedEngineError(f"the tier seam: {problem}")
    need = "" if tier_seam().fixed_hash_root else "; a tier needs PYTHONHASHSEED to be set"
    return tier_seam(), f"vLLM's tiering manager took a tier, and a page went through it{need}"


_CHECKS: dict[str, _Check] = {
    "pool": _check_pool,
    "binding": _check_binding,
    "scheduler": _check_schedulers,
    "connector": _check_connector,
    "tier": _check_tier,
}
