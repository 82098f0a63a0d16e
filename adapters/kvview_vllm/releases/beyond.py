"""Features of late vLLM releases that the contract does not have, and how kvview treats them.

``beyond.toml`` lists these features, with their sources; ``kvview doctor`` lists the features of
the installed vLLM.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvview_vllm.releases.shapes import has_member


@dataclass(frozen=True)
class Beyond:
    """One feature.

    Args:
        name: Name of the feature in vLLM.
        since: First release that has the feature.
        what: Its purpose.
        met: Whether kvview supports the feature.
        how: The way in which kvview supports the feature, or an alternative to the feature.
    """

    name: str
    since: str
    what: str
    met: bool
    how: str


def _read() -> tuple[tuple[Beyond, str], ...]:
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = tomllib.loads(text)["feature"]
    members = [row.pop("member") for row in rows]
    return tuple((Beyond(**row), member) for row, member in zip(rows, members, strict=True))


KNOWN = _read()
"""Each feature, and the member of vLLM by which it is recognised."""


def beyond() -> tuple[Beyond, ...]:
    """Return the features that the installed vLLM has."""
    return tuple(each for each, member in KNOWN if _has(member))


def _has(member: str) -> bool:
    try:
        return has_member(member)
    except Exception:  # a module that cannot be imported here is not used either
        return False
