"""The novices' mistakes fit the connectors that they are made in; those are right."""

from __future__ import annotations

from collections import Counter

import pytest

from kvview.targets import load_connector
from kvview.testing.connector import check_connector
from tests.mutants.novice import BASES, FOLDER, load_mistakes

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("base", BASES)
def test_the_right_ones_are_right(base: str) -> None:
    report = check_connector(load_connector(f"{FOLDER / base}.py:Novice"), seeds=16)
    assert report.is_clean, report.summary()


def test_every_mistake_is_one() -> None:
    mistakes = load_mistakes()
    assert len(mistakes) >= 100
    for mistake in mistakes:
        assert mistake.edits, mistake.what
        compile(mistake.source(), mistake.what, "exec")
    names = Counter((mistake.base, mistake.what) for mistake in mistakes)
    assert [name for name, times in names.items() if times > 1] == []
