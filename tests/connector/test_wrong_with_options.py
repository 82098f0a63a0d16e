"""Wrong connectors whose mistake shows with their options, over stores and with ranks."""

from __future__ import annotations

import pytest

from kvview.testing.connector import check_connector
from tests.mutants.connector import load_with_options
from tests.mutants.edits import Variant

pytestmark = pytest.mark.slow

SEEDS = 30
WRONG = load_with_options()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of theirs
@pytest.mark.parametrize("variant", WRONG, ids=[variant.name for variant in WRONG])
def test_a_wrong_connector_is_not_green(variant: Variant) -> None:
    texts = [text.partition("=") for text in variant.notes["options"].split()]
    options = {name: value for name, _, value in texts}
    gap = variant.notes.get("gap")  # of a store whose mistakes make every load fail
    seeds = 4 if gap else SEEDS
    report = check_connector(variant.load(), seeds=seeds, options=options, max_shrink_runs=0)
    assert report.failures or report.gaps
    assert not gap or gap in [found.name for found in report.gaps]
