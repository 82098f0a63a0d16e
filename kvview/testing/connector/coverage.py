"""What a run must have exercised before it may be called green.

A connector that did nothing broke no law either: what never happened was not checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_NEVER = {
    "stores": "nothing was ever stored",
    "hits": "match_prefix never promised anything",
    "loads": "nothing was ever loaded",
}


@dataclass(frozen=True)
class Gap:
    """Something that must happen in a run and did not.

    Args:
        name: Stable, for whoever has to say that it is expected: ``"loads"``, for example.
        what: For people.
    """

    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


def not_exercised(coverage: Mapping[str, int]) -> Sequence[Gap]:
    """What must happen in a run and did not.

    Args:
        coverage: What happened how often, over all seeds.
    """
    return [Gap(name, what) for name, what in _NEVER.items() if not coverage.get(name)]
