"""Failures that never reach Hypothesis."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import settings

from kvview.testing.results.law_broken import LawBroken
from kvview.testing.suites import conformance
from kvview_reference.harness import ReferencePool


def test_a_failure_that_other_code_caught_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    # Half a minute after the failure, all further runs would be skipped, and the check green.
    def run(factory: Any, settings: settings) -> None:
        with suppress(LawBroken):
            factory().fail("a difference", "1", "2")

    monkeypatch.setattr(conformance, "run_state_machine_as_test", run)
    with pytest.raises(LawBroken, match="a difference"):
        conformance.run_machine(ReferencePool, settings())
