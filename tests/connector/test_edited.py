"""The table of wrong connectors fits the right ones, and these are right."""

from __future__ import annotations

from collections import Counter

import pytest

from kvview.testing.connector import check_connector
from tests.mutants.connector import BASES, MUTANTS, load_variants, load_wrong
from tests.mutants.edits import Variant

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("base", BASES)
def test_the_right_ones_are_right(base: str) -> None:
    """Two seeds, because test_simulation.py plays the same connectors in more."""
    report = check_connector(Variant(BASES[base], "", "", "right").load(), seeds=2)
    assert not report.failures, report.failures[0].script


def test_each_is_an_edit_of_its_own() -> None:
    wrong = load_wrong()
    assert len(wrong) >= 190
    for variant in (*wrong, *load_variants("unusual")):
        assert variant.edits, variant.what
        compile(variant.source(), variant.what, "exec")
    names = Counter((variant.base, variant.what) for variant in wrong)
    assert [name for name, times in names.items() if times > 1] == []
    assert len({fault.name for fault in MUTANTS}) == len(MUTANTS)
