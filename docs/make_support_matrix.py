"""Write ``docs/support-matrix.md``: the features of the adapter in each release of vLLM.

    python docs/make_support_matrix.py

Releases come from ``kvview_vllm/releases``, features from ``support_matrix.toml``.
A feature names the difference that it needs, so its first release is defined in one place.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from docs.parts import with_parts, write
from kvview_vllm.releases import differences
from kvview_vllm.releases.compat.versions import RELEASES, is_between

PAGE = Path(__file__).parent / "support-matrix.md"

_SPANS = {each.name: (each.first_release, each.last_release) for each in differences()}
_SPANS["TieringOffloadingSpec"] = ("0.22.0", None)


@dataclass(frozen=True)
class Feature:
    """A row of a table.

    Args:
        name: The feature, in Markdown.
        needs: The difference or the feature of vLLM that it needs; empty if all releases have it.
        reason: The reason for a dash, and the consequence.
    """

    name: str
    needs: str = ""
    reason: str = ""

    def is_in(self, release: str) -> bool:
        """Whether a release has the feature."""
        return not self.needs or is_between(release, *_SPANS[self.needs])


_TABLES = tomllib.loads(Path(__file__).with_name("support_matrix.toml").read_text("utf-8"))
FEATURES = {title: [Feature(**row) for row in rows] for title, rows in _TABLES.items()}


def _spans(features: Sequence[Feature]) -> Iterator[tuple[str, list[bool]]]:
    """Yield ranges of releases with the same features, and whether they have each."""
    for has, releases in groupby(RELEASES, lambda r: [feature.is_in(r) for feature in features]):
        first, *others = releases
        yield f"{first}\u00a0– {others[-1]}" if others else first, has


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], marks: int = 0) -> list[str]:
    ruler = f"|---|{':-:|' * marks}{'---|' * (len(head) - marks - 1)}"
    return ["", f"| {' | '.join(head)} |", ruler, *(f"| {' | '.join(row)} |" for row in rows)]


def page() -> str:
    """Return the text of ``docs/support-matrix.md``."""
    lines = []
    for title, features in FEATURES.items():
        spans, columns = zip(*_spans(features), strict=True)
        rows = [
            [feature.name, *("✓" if has else "–" for has in row), feature.reason]
            for feature, row in zip(features, zip(*columns, strict=True), strict=True)
        ]
        lines += ["", f"## {title}"]
        lines += _table(["feature", *spans, "reason for –"], rows, len(spans))
    first, *_, last = RELEASES
    return with_parts(
        PAGE,
        releases=f"kvview supports all {len(RELEASES)} releases of vLLM from {first} to {last}.",
        features="\n".join(lines),
    )


if __name__ == "__main__":
    sys.exit(write({PAGE: page()}))
