"""The addresses of the project, of its documentation and of each law."""

from __future__ import annotations

import re

PROJECT_URL = "https://github.com/kvview/kvview"
REVISION = "main"
"""The revision that install commands name: a branch or, in a release, its tag (``v1.0.0``)."""
DOCS_URL = "https://kvview.github.io/kvview/"

LAW_FAMILIES = {
    "KEY": "hashes and keys",
    "POOL": "the block pool",
    "GEO": "block sizes and groups",
    "EVENT": "events of a tier",
    "OFF": "offloading managers",
    "XFER": "transfer workers",
    "CONN": "connectors",
    "HAND": "handoffs",
    "GUARD": "guarded views",
    "TIER": "stores below the host",
}
"""The subject of each family of laws; rules of the reference and the adapters have other names."""

_LAW = re.compile(r"([A-Z]+)-([0-9]+|\*)")
_RELEASE = re.compile(r"v\d+\.\d+.*")
_NO_LAWS = {"ENGINE": "engine", "coverage": "not-checked", "exceptions": "exceptions"}


def requirement(extras: str, revision: str = REVISION) -> str:
    """Return the requirement with which pip installs kvview.

    Args:
        extras: The extras, such as ``"cli,reference"``.
        revision: A branch, a commit, or the tag of a release, which is on the package index.
    """
    if _RELEASE.fullmatch(revision):
        return f"kvview[{extras}]=={revision[1:]}"
    return f"kvview[{extras}] @ git+{PROJECT_URL}@{revision}"


def law_url(law: str) -> str:
    """Return the address of a law's documentation.

    Args:
        law: A law, such as ``"POOL-4"``, or a family of laws, such as ``"POOL-*"``. Reports also
            use ``"ENGINE"`` and ``"coverage"``, which the page on troubleshooting explains.

    Returns:
        An absolute URL; empty for any other text, and for a rule of the reference or an adapter.
    """
    if found := _LAW.fullmatch(law):
        family, number = found.groups()
        if family not in LAW_FAMILIES:
            return ""
        return f"{DOCS_URL}laws/{family.lower()}/" + ("" if number == "*" else f"#{law.lower()}")
    return f"{DOCS_URL}troubleshooting/#{_NO_LAWS[law]}" if law in _NO_LAWS else ""
