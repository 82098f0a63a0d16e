"""Write ``docs/support-matrix.md``: the features of the adapter in each release of vLLM.

    python docs/make_support_matrix.py

Releases and differences come from ``kvview_vllm/releases``, features from ``support_matrix.toml``.
A feature names the difference that it needs, so its first release is defined in one place.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from kvview_vllm.releases import differences
from kvview_vllm.releases.beyond import KNOWN
from kvview_vllm.releases.versions import RELEASES, is_between

PAGE = Path(__file__).parent / "support-matrix.md"

DIFFERENCES = differences()
_SPANS = {each.name: (each.first_release, each.last_release) for each in DIFFERENCES}
_SPANS |= {each.name: (each.since, None) for each, _ in KNOWN}

_HEAD = f"""\
# Support matrix

<!-- Written by docs/make_support_matrix.py from support_matrix.toml and kvview_vllm/releases. -->

kvview supports all {len(RELEASES)} releases of vLLM from {RELEASES[0]} to {RELEASES[-1]}. The
tables list the features that some releases lack, with the reason. ✓ means supported, – means not
supported. CI runs the tests of the adapter on the last patch release of each minor
(`.ci/vllm-lane`); `python tests/vllm/matrix.py --all` runs them on every release.
Real inference needs a CPU build of vLLM. It ran on 0.27.1 to 0.32.0 (`.ci/inference-lane`).

Any other release is refused at the start, unless `KVVIEW_ALLOW_UNTESTED_VLLM=1` is set.
`kvview doctor` reports the features of the installed vLLM.
"""

_DIFFERENCES_HEAD = """\

## Differences between releases

The adapter finds each of these differences on the classes of the installed vLLM, not by its
version. The table is made from `kvview_vllm/releases/differences.toml`.
"""


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
    lines = [_HEAD.rstrip()]
    for title, features in FEATURES.items():
        spans, columns = zip(*_spans(features), strict=True)
        rows = [
            [feature.name, *("✓" if has else "–" for has in row), feature.reason]
            for feature, row in zip(features, zip(*columns, strict=True), strict=True)
        ]
        lines += ["", f"## {title}"]
        lines += _table(["feature", *spans, "reason for –"], rows, len(spans))
    lines += [_DIFFERENCES_HEAD.rstrip()]
    differences_found = [
        [d.seam, f"`{d.name}`", d.description, d.first_release, d.last_release or "", d.source]
        for d in DIFFERENCES
    ]
    lines += _table(("seam", "flag", "description", "from", "to", "source"), differences_found)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
