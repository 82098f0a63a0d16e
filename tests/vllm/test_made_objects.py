"""Every object of vLLM that the adapter makes at bind: a further required argument is refused."""

from __future__ import annotations

import inspect
import re
from importlib import import_module

import pytest

import engine  # type: ignore[import-not-found]  # noqa: F401 - before the imports that need it
from kvview_vllm import offloading_spec
from kvview_vllm.connector import connector_canary, scheduler_canary
from kvview_vllm.doctor import diagnose
from kvview_vllm.offloading import offloading_canary
from kvview_vllm.releases import calls, engine_version
from kvview_vllm.releases.shapes import owner_of
from kvview_vllm.simulation import scheduler as cpu_scheduler

CACHES = (
    calls._parameters,
    calls._required,
    connector_canary.check_connector,
    scheduler_canary.check_scheduler_steps,
    offloading_canary.check_vllm_managers,
    offloading_canary.check_our_managers,
    offloading_spec.check_spec,
)
MADE = [
    "vllm.v1.core.block_pool:BlockPool",
    "vllm.v1.core.sched.scheduler:Scheduler",
    "vllm.v1.kv_cache_interface:FullAttentionSpec",
    "vllm.v1.kv_cache_interface:KVCacheConfig",
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec",
    "vllm.v1.kv_cache_interface:SlidingWindowSpec",
    "vllm.v1.kv_offload.config:OffloadingCacheConfig",
    "vllm.v1.kv_offload.config:OffloadingConfig",
    "vllm.v1.kv_offload.config:OffloadingGroupConfig",
    "vllm.v1.kv_offload.config:OffloadingModelConfig",
    "vllm.v1.kv_offload.config:OffloadingParallelConfig",
    "vllm.v1.kv_offload.cpu.manager:CPUOffloadingManager",
    "vllm.v1.kv_offload.tiering.base:JobResult",
    "vllm.v1.kv_offload.tiering.base:TransferJob",
    "vllm.v1.outputs:ModelRunnerOutput",
    "vllm.v1.request:Request",
    "GPULoadStoreSpec",
    "OffloadingEvent",
    "PrepareStoreOutput",
    "ReqContext",
    "RequestOffloadingContext",
    "ScheduleEndContext",
    "TransferResult",
]


@pytest.mark.parametrize("name", MADE)
def test_a_class_that_requires_another_argument_is_refused_in_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = owner_of(name)
    if not isinstance(kind, type):
        pytest.skip("this release does not have the class")
    if kind.__name__ == "SlidingWindowSpec" and cpu_scheduler.refuses_several_groups():
        pytest.skip("this release serves one group with a connector")
    import_module("kvview_vllm.scheduler")
    parameters = dict(inspect.signature(kind).parameters)
    parameters["drifted"] = inspect.Parameter("drifted", inspect.Parameter.KEYWORD_ONLY)
    ordered = sorted(parameters.values(), key=lambda one: one.kind)
    monkeypatch.setattr(kind, "__signature__", inspect.Signature(ordered), raising=False)
    for each in CACHES:
        each.cache_clear()
    try:
        details = [seam.detail for seam in diagnose().seams if not seam.fits]
    finally:
        monkeypatch.undo()
        for each in CACHES:
            each.cache_clear()
    found = (
        f"vLLM {engine_version()} is unknown, so nothing was bound: found (View)?{kind.__name__}"
    )
    assert any(re.search(f"{found} that requires drifted", detail) for detail in details), details
    assert all("\n" not in detail for detail in details)
