"""The tables of wrong connectors fit the right ones, and the check reports the wrong ones."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from kvview.testing.connector import check_connector
from tests.mutants.connector import BASES, MUTANTS, load_variants, load_with_options, load_wrong
from tests.mutants.edits import Variant

pytestmark = [
    pytest.mark.slow,
    # The thread of a wrong connector may end with an exception.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]

AGREEMENT = Path(__file__).parents[2] / "docs" / "trust.md"
SERVED = [*load_variants("late"), *load_variants("field")]


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


def tables() -> list[list[str]]:
    """Return the connectors that are wrong in vLLM, and those whose mistake vLLM does not show."""
    part = AGREEMENT.read_text().partition("<!-- agreement:")[2].partition("<!-- end of agreement")
    return [
        re.findall(r"^\| ([A-Z]\w+) \|", text, re.M) for text in part[0].split("\n| connector")[1:]
    ]


def test_the_page_of_agreement_has_all_that_are_served() -> None:
    shown, others = tables()
    assert {*shown, *others} == {variant.name for variant in SERVED}


@pytest.mark.parametrize(
    "variant",
    [variant for variant in SERVED if variant.name not in tables()[1]],
    ids=lambda variant: variant.name,
)
def test_wrong_in_vllm_is_red_here(variant: Variant) -> None:
    assert check_connector(variant.load(), seeds=200, max_shrink_runs=0, processes=0).failures


@pytest.mark.parametrize("variant", load_with_options(), ids=lambda variant: variant.name)
def test_wrong_with_its_options_is_not_green(variant: Variant) -> None:
    texts = [text.partition("=") for text in variant.notes["options"].split()]
    options = {name: value for name, _, value in texts}
    gap = variant.notes.get("gap")  # of a store whose mistakes make every load fail
    report = check_connector(
        variant.load(), seeds=4 if gap else 30, options=options, max_shrink_runs=0
    )
    assert report.failures or report.gaps
    assert not gap or gap in [found.name for found in report.gaps]
