"""What a load that failed within a step leaves behind (releases up to 0.17)."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvview.targets import load_connector
from kvview.testing.connector import check_connector

vllm = pytest.importorskip(  # a submodule, because this folder is named vllm too
    "vllm.version",
    reason="needs vLLM's Python sources: tests/vllm/sources.py",
    exc_type=ImportError,
)

from kvview_vllm.simulation import VLLMEngines, scheduler  # noqa: E402 - needs vLLM

EXAMPLE = Path(__file__).parents[2] / "examples" / "host_cache.py"


@pytest.mark.parametrize("target", [f"{EXAMPLE}:HostCacheConnector", "tests.mutants.several:Two"])
def test_nobody_hits_what_it_left_unfilled(target: str) -> None:
    """SCHED-6: whoever was to compute it is aborted or preempted before."""
    engines = VLLMEngines()
    if scheduler.can_load_between_steps() or not scheduler.can_fail_loads():
        pytest.skip("no load fails within a step in this release")
    report = check_connector(
        load_connector(target), seeds=1, first_seed=8, engines=engines, max_shrink_runs=0
    )
    assert report.is_clean, report.summary()
    assert report.coverage["failed loads"]
