"""What ``StepInfo.filling`` leaves out on vLLM is nothing that a connector has to look at.

``test_faults.py`` runs the connector on every release; here it is shown to see what it should.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip(  # a submodule, because this folder is named vllm too
    "vllm.version",
    reason="needs vLLM's Python sources: tests/vllm/sources.py",
    exc_type=ImportError,
)

from kvview.testing.connector import generate_scenario, simulate
from kvview_vllm.connector.scheduler import SchedulerSide
from kvview_vllm.releases import engine_version
from kvview_vllm.releases.versions import NEWEST_TESTED
from kvview_vllm.simulation import VLLMEngines
from tests.vllm.filling_connector import LooksTwice, seen

newest = pytest.mark.skipif(engine_version() != NEWEST_TESTED, reason="once is enough")
STEPS_THAT_FILL = SchedulerSide._steps_that_fill


def _forget_late(side: SchedulerSide, output: Any) -> Any:
    steps = STEPS_THAT_FILL(side, output)
    side._unshown = set()
    return steps


@newest
def test_what_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash that comes later, and blocks that were hit while they were written."""
    seen.clear()
    monkeypatch.setattr(SchedulerSide, "_steps_that_fill", _forget_late)
    results = [simulate(LooksTwice, generate_scenario(s), engines=VLLMEngines()) for s in range(16)]
    assert any("became full" in result.failure.message for result in results if result.failure)
    assert 0 < seen["shown"] < seen["scheduled"]
