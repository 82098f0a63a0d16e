"""Parts of a connector that an engine replaced get no credit."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from kvview.testing import connector_checks
from kvview.testing.connector.exercised.coverage import notes_on
from kvview.testing.connector.result import ConnectorRuns
from kvview.testing.connector_checks import check_law
from kvview.testing.results.law_broken import NotExercised


def test_the_laws_of_transfers_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    coverage = {"loads": 9, "replaced: its copies": 1}
    runs = ConnectorRuns("vllm", 0, 1, (), 0.0, coverage, num_asked=1)
    monkeypatch.setattr(connector_checks, "shared_runs", lambda factory: runs)
    factory: Any = object
    with pytest.raises(NotExercised, match=r"XFER-1 depends on a part .*: its copies"):
        check_law(factory, lambda law: False, "no wrong byte", "XFER-1")
    check_law(factory, lambda law: False, "no lost job", "CONN-3")
    assert runs.replaced == ["its copies"]
    assert [note for note in notes_on(coverage) if note.endswith("not checked: its copies")]
