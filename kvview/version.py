"""The version of the package, and of the contract that it keeps.

What may change when is written in ``docs/compatibility.md``.
"""

from __future__ import annotations

import re
import sys

from kvview.errors import UnsupportedContractError

__version__ = "1.0.0"

CONTRACT_VERSION = "1.0"
"""Major and minor: a minor release adds what is optional, a major one may break."""

_NAMED = ("hypothesis", "torch", "vllm")
_VERSION = re.compile(r"[0-9]{1,9}\.[0-9]{1,9}")


def require_contract(written_to: str, who: str) -> None:
    """Refuse what was written to a contract that this kvview does not keep.

    Args:
        written_to: A version as in :data:`CONTRACT_VERSION`.
        who: Named in the error.

    Raises:
        UnsupportedContractError: Another major version, a later minor one, or no version.
    """
    if not isinstance(written_to, str) or not _VERSION.fullmatch(written_to):
        raise UnsupportedContractError(
            f"{who}: contract_version {written_to!r} is no version such as {CONTRACT_VERSION!r}"
        )
    major, minor = map(int, written_to.split("."))
    kept_major, kept_minor = map(int, CONTRACT_VERSION.split("."))
    if major != kept_major or minor > kept_minor:
        raise UnsupportedContractError(
            f"{who} was written to contract {written_to}, and this kvview ({__version__}) keeps "
            f"{CONTRACT_VERSION}: "
            + (
                "upgrade kvview"
                if (major, minor) > (kept_major, kept_minor)
                else "see CHANGELOG.md for what changed since, or install an older kvview"
            )
        )


def versions_of(target: object = None) -> dict[str, str]:
    """Versions by name: of kvview, Python, the machine, what was imported, and the target.

    Args:
        target: What was checked; the distribution that its module is from is named too.
    """
    import platform
    from importlib import metadata

    found = {
        "kvview": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }
    names = {name for name in _NAMED if name in sys.modules}
    top = str(getattr(target, "__module__", "")).partition(".")[0]
    names.update(metadata.packages_distributions().get(top, ()))
    for name in sorted(names - {"kvview"}):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # run from its sources
            if version := getattr(sys.modules.get(name), "__version__", None):
                found[name] = str(version)
    return found
