"""The kit's side of ``docs/agreement.md``: wrong connectors in real inference are red here."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvview.testing.connector import check_connector
from tests.mutants.connector import load_variants
from tests.mutants.edits import Variant

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SEEDS = 200
WRONG = [*load_variants("late"), *load_variants("field")]
RIGHT = ("Late", "Flaky", "Offload")


def table() -> dict[str, str]:
    """Return the behaviour in vLLM, by connector."""
    lines = (ROOT / "docs" / "agreement.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith("|")]
    return {row[1]: row[3] for row in cells[2:]}


def test_the_table_has_all_of_them() -> None:
    assert set(table()) == {*RIGHT, *(variant.name for variant in WRONG)}
    assert {table()[name] for name in RIGHT} == {"right responses"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of theirs
@pytest.mark.parametrize(
    "variant",
    [variant for variant in WRONG if table().get(variant.name) != "right responses"],
    ids=lambda variant: variant.name,
)
def test_wrong_in_vllm_is_red_here(variant: Variant) -> None:
    assert check_connector(variant.load(), seeds=SEEDS, max_shrink_runs=0, processes=0).failures
