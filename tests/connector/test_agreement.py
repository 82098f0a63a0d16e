"""The kit's side of ``docs/agreement.md``: wrong connectors in real inference are red here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvview import Connector
from kvview.testing.connector import check_connector
from tests.vllm import wrong_jobs
from tests.vllm.wrong_connectors import RIGHT, WRONG

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SEEDS = 200
assert wrong_jobs, "it adds to WRONG"


def table() -> dict[str, str]:
    """What vLLM did, by connector."""
    lines = (ROOT / "docs" / "agreement.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith("|")]
    return {row[1]: row[3] for row in cells[2:]}


def is_red(connector: type[Connector]) -> bool:
    return any(
        check_connector(connector, seeds=1, first_seed=seed, max_shrink_runs=0).failures
        for seed in range(SEEDS)
    )


def test_all_are_in_the_table() -> None:
    assert set(table()) == {connector.__name__ for connector in (*WRONG, *RIGHT)}


@pytest.mark.parametrize("connector", RIGHT, ids=lambda connector: connector.__name__)
def test_the_control_is_right(connector: Any) -> None:
    assert table()[connector.__name__] == "right responses"
    report = check_connector(connector, seeds=16)
    assert report.is_clean, report.summary()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of theirs
@pytest.mark.parametrize(
    "connector",
    [connector for connector in WRONG if table().get(connector.__name__) != "right responses"],
    ids=lambda connector: connector.__name__,
)
def test_wrong_in_vllm_is_red_here(connector: Any) -> None:
    assert is_red(connector)
