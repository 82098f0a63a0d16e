"""What a run must have exercised before it may be called green.

A connector that did nothing broke no law either: what never happened was not checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_NEVER = {
    "stores": "nothing was ever stored",
    "hits": "match_prefix never promised anything",
    "loads": "nothing was ever loaded",
}


def not_exercised(coverage: Mapping[str, int]) -> Sequence[str]:
    """What must happen in a run and did not, a line each.

    Args:
        coverage: What happened how often, over all seeds.
    """
    return [line for name, line in _NEVER.items() if not coverage.get(name)]
