"""Expected failures: known defects, each with its reason and the thread in which it is fixed."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvview.errors import ConfigError, line_of
from kvview.input_files import read_file
from kvview.testing.results.law_broken import COVERAGE

_LINK = re.compile(r"https://[^\s/]+/\S+")


@dataclass(frozen=True)
class ExpectedFailure:
    """A check that may fail, for a reason that others can read.

    Args:
        law: Number of a law, or name of a check if the law has several; ``coverage: NAME`` for an
            item that no run exercises, in which ``*`` is allowed.
        reason: Reason of the failure.
        link: Address of the thread or change that is about it. An item of the coverage is not a
            failure and needs no link.
        message: Text that each message of the failure contains, so that another failure of the same
            law is red; empty for any message.

    Raises:
        ConfigError: A value is missing or has another form.
    """

    law: str
    reason: str
    link: str = ""
    message: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not isinstance(getattr(self, field.name), str):
                raise ConfigError(f"expected failures: {field.name} of {self.law!r} is not a text")
        if not self.reason.strip():
            raise ConfigError(f"expected failures: {self.law} needs a reason")
        if not self.law.startswith(COVERAGE) and not _LINK.fullmatch(self.link):
            raise ConfigError(
                f"expected failures: {self.law} needs a link to its thread, as https://..., got "
                f"{self.link!r}"
            )


def read_expected(path: str | Path) -> Sequence[ExpectedFailure]:
    """Read a file in TOML, with a table ``[[expected]]`` for each failure.

    Raises:
        ConfigError: The file cannot be read, or an entry has another form.
    """
    try:
        found: dict[str, Any] = tomllib.loads(read_file(path).decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        why = getattr(error, "strerror", None) or line_of(error)
        raise ConfigError(f"expected failures {str(path)!r} cannot be read: {why}") from error
    entries = found.pop("expected", None)
    if found or not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise ConfigError(f"{path}: expected only tables [[expected]], with law, reason and link")
    try:
        expected = [ExpectedFailure(**entry) for entry in entries]
    except TypeError as error:
        raise ConfigError(
            f"{path}: [[expected]] has law, reason, link, message: {line_of(error)}"
        ) from error
    laws = [one.law for one in expected]
    if twice := [law for law in laws if laws.count(law) > 1]:
        raise ConfigError(f"{path}: {twice[0]} occurs more than once; keep one entry")
    return expected
