"""The installed version of vLLM, and whether it was tested.

A version only decides whether an object of known shape may be used, and which differences it
must have. The features of an object are found on the object itself (:mod:`.seams`).
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from traceback import walk_tb
from typing import Any

from kvview import KVViewError, UnsupportedEngineError
from kvview.errors import one_line

RELEASES = (
    *("0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.13.0", "0.14.0", "0.14.1"),
    *("0.15.0", "0.15.1", "0.16.0", "0.17.0", "0.17.1", "0.18.0", "0.18.1"),
    *("0.19.0", "0.19.1", "0.20.0", "0.20.1", "0.20.2", "0.21.0", "0.22.0"),
    *("0.22.1", "0.23.0", "0.24.0", "0.25.0", "0.25.1", "0.26.0", "0.27.0"),
    *("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
)
"""Every release that is tested, oldest first."""

LATEST_OF_MINORS = tuple({release.rpartition(".")[0]: release for release in RELEASES}.values())
"""The last patch release of each minor, oldest first."""

OLDEST_TESTED, NEWEST_TESTED = RELEASES[0], RELEASES[-1]
TESTED = f"{OLDEST_TESTED} - {NEWEST_TESTED}"

ALLOW_UNTESTED = "KVVIEW_ALLOW_UNTESTED_VLLM"

Number = tuple[int, int, int]

_logger = logging.getLogger(__name__)


class VLLMNotInstalledError(KVViewError, ImportError):
    """A part of kvview that needs vLLM was used, and no vLLM can be imported."""


class VLLMNotImportableError(UnsupportedEngineError):
    """The installed vLLM cannot be imported with the other installed packages, such as torch."""


def broken_import(error: BaseException) -> VLLMNotImportableError | None:
    """Return the error to raise if this exception has broken an import of vLLM.

    Returns:
        None for any other exception, and for a missing name of vLLM itself, because that is an
        unknown shape.
    """
    if isinstance(error, ImportError) and str(error.name).partition(".")[0] == "vllm":
        return None
    steps = [
        (str(frame.f_globals.get("__name__")), frame.f_code, line)
        for frame, line in walk_tb(error.__traceback__)
    ]
    names = [name for name, code, _ in steps if code.co_name == "<module>"]
    if not any(name.partition(".")[0] == "vllm" for name in names):
        return None
    name, _, line = steps[-1]
    torch = getattr(sys.modules.get("torch"), "__version__", None)
    return VLLMNotImportableError(
        f"vLLM {engine_version()} is installed and cannot be imported with "
        f"{f'torch {torch}' if torch else 'the other packages'}: {one_line(error)} ({name}, "
        f"line {line}). Nothing was bound. Install the packages for which this vLLM was built, "
        f"torch first, or another vLLM"
    )


@contextmanager
def importing() -> Iterator[None]:
    """Report in one line that the installed vLLM cannot be imported; pass other exceptions on.

    Raises:
        VLLMNotImportableError: vLLM cannot be imported.
    """
    try:
        yield
    except KVViewError:
        raise
    except Exception as error:
        if broken := broken_import(error):
            raise broken from error
        raise


def vllm(module: str) -> Any:
    """Import a module of the installed vLLM, by its name below ``vllm``."""
    return import_module(f"vllm.{module}")


def engine_version() -> str:
    """Return the version string of the installed vLLM.

    Raises:
        VLLMNotInstalledError: vLLM is not installed.
    """
    try:
        vllm = import_module("vllm")
    except Exception as error:
        raise VLLMNotInstalledError(
            f"kvview_vllm needs an installed vLLM ({TESTED}), but importing it failed: {error}. "
            f"Install vLLM, or use kvview_reference, which satisfies the same contract without it"
        ) from error
    return str(getattr(vllm, "__version__", "of unknown version"))


def number(version: str) -> Number | None:
    """Return the three numbers at the start of a version string; None without numbers."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def is_between(version: str, since: str, until: str | None) -> bool:
    """Whether a version is in a range of releases; False for a version that names no release."""
    found, last = number(version), number(until or "")
    return (
        found is not None and found >= (number(since) or found) and (last is None or found <= last)
    )


def is_newer(version: str) -> bool:
    """Whether a version string names a version after the tested releases.

    A patch release of the newest tested release is not newer, but a nightly build such as
    ``0.33.1rc1.dev211+g...`` is newer, because it has the shapes of the next release.
    """
    found, newest = number(version), number(NEWEST_TESTED)
    assert newest is not None
    if found is None or found <= newest:
        return False
    return found[:2] > newest[:2] or re.search(r"dev|rc", version) is not None


def is_tested(version: str) -> bool:
    """Whether a version string names a release of the tested range."""
    found, oldest = number(version), number(OLDEST_TESTED)
    return found is not None and found >= (oldest or found) and not is_newer(version)


def refusal(seam: str, found: str, expected: str) -> UnsupportedEngineError:
    """Make the error for a shape that no tested release has.

    Args:
        seam: The surface of vLLM.
        found: The shape that was found.
        expected: The shapes that tested releases have.
    """
    return UnsupportedEngineError(
        f"the {seam} seam of vLLM {engine_version()} is unknown, so nothing was bound: found "
        f"{found}; expected {expected}. Tested: vLLM {TESTED}. Run a tested release or upgrade "
        "kvview; if the newest kvview also refuses, report this message, and the patches if your "
        "vLLM is a fork"
    )


def refuse_shape(seam: str, found: str, expected: str) -> None:
    """Refuse a shape that no tested release has, unless the user has allowed such shapes.

    Raises:
        UnsupportedEngineError: The user has not allowed untested releases.
    """
    error = refusal(seam, found, expected)
    if os.environ.get(ALLOW_UNTESTED) != "1":
        raise error
    _logger.warning("kvview: %s=1, so this vLLM is used nevertheless: %s", ALLOW_UNTESTED, error)


def require_usable(seam: str) -> str:
    """Return the installed version, if its known shapes may be trusted.

    For a version string that names no known release, such as that of a fork, a warning is logged.

    Raises:
        UnsupportedEngineError: The version is after the tested range, and the user has not allowed
            such versions.
        VLLMNotInstalledError: No vLLM can be imported.
    """
    version = engine_version()
    if is_newer(version) and os.environ.get(ALLOW_UNTESTED) != "1":
        raise refusal(
            seam,
            "a release after the tested ones, whose known shapes may have another meaning",
            f"a tested release, or {ALLOW_UNTESTED}=1 in the environment, at your own risk",
        )
    if not is_tested(version):
        _logger.warning(
            "vLLM %s is outside the tested range %s, but its %s seam has a known shape, so it is "
            "used",
            *(version, TESTED, seam),
        )
    return version
