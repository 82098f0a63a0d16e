"""The version of the package, and of the contract that it implements.

``docs/compatibility.md`` defines the changes that each kind of release may make.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import cache

from kvview.errors import UnsupportedContractError

__version__ = "1.0.0.dev0"

CONTRACT_VERSION = "1.0"
"""Major and minor version. A minor release adds optional features; a major one may break code."""

_NAMED = ("hypothesis", "lmcache", "nixl", "torch", "vllm")
_VERSION = re.compile(r"[0-9]{1,9}\.[0-9]{1,9}")


def require_contract(written_to: str, name: str) -> None:
    """Refuse a connector or store that was written for an unsupported contract version.

    Args:
        written_to: A version as in :data:`CONTRACT_VERSION`.
        name: Name of the class, for the error.

    Raises:
        UnsupportedContractError: The version has another major number or a later minor
            number, or is not a version.
    """
    if not isinstance(written_to, str) or not _VERSION.fullmatch(written_to):
        raise UnsupportedContractError(
            f"{name}: contract_version {written_to!r} is not a version such as {CONTRACT_VERSION!r}"
        )
    major, minor = map(int, written_to.split("."))
    kept_major, kept_minor = map(int, CONTRACT_VERSION.split("."))
    if major != kept_major or minor > kept_minor:
        raise UnsupportedContractError(
            f"{name} was written for contract {written_to}, but this kvview ({__version__}) "
            f"supports {CONTRACT_VERSION}: "
            + (
                "upgrade kvview"
                if (major, minor) > (kept_major, kept_minor)
                else "update the class as CHANGELOG.md describes, or install an older kvview"
            )
        )


def versions_of(target: object = None) -> dict[str, str]:
    """Return versions by name: kvview, Python, the machine, and imported libraries.

    Args:
        target: A class that was checked; its distribution is included.
    """
    import platform

    found = {
        "kvview": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }
    names = {name for name in _NAMED if name in sys.modules}
    top = str(getattr(target, "__module__", "")).partition(".")[0]
    names.update(distributions_of(top))
    for name in sorted(names - {"kvview"}):
        if version := version_of(name):
            found[name] = version
    return found


def version_of(name: str) -> str | None:
    """Return the version of a package; None if it is neither installed nor imported."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # the package is run from its sources
        version = getattr(sys.modules.get(name), "__version__", None)
        return None if version is None else str(version)


def installed_commit() -> str | None:
    """Return the commit from which pip installed kvview; None for a checkout or a file."""
    import json
    from importlib import metadata

    try:
        record = metadata.distribution("kvview").read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # kvview is run from its sources
        return None
    commit = json.loads(record or "{}").get("vcs_info", {}).get("commit_id")
    return None if commit is None else str(commit)


def distributions_of(module: str) -> list[str]:
    """Return the installed distributions that contain a top-level module."""
    return _distributions().get(module, [])


@cache
def _distributions() -> Mapping[str, list[str]]:
    """Return the distributions of each top-level module, which takes a fifth of a second."""
    from importlib import metadata

    return metadata.packages_distributions()
