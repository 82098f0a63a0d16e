"""The exceptions of kvview.

Each class also inherits the builtin exception that a caller would expect, so code that does
not import kvview can catch it. A message states the error, the expected value and the remedy;
a call that raises has changed nothing.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import unicodedata
from typing import TYPE_CHECKING

from kvview.laws import titled
from kvview.urls import law_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_LAW = re.compile(r"[A-Z]+-\d+")
_LONGEST_LINE = 1000


class KVViewError(Exception):
    """Base of all errors of kvview; the traceback of an error names the broken law and its page."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        law, _ = split_law(str(args[0]) if args else "")
        if url := law_url(law):
            self.add_note(f"{titled(law)}: {url}")


class UnknownBlockError(KVViewError, LookupError):
    """A block id does not name a block of this pool (POOL-4)."""


class NotAnOffloadKeyError(KVViewError, ValueError):
    """A call received bytes that cannot be an offload key (KEY-3)."""


class BlockNotHeldError(KVViewError, ValueError):
    """A free would drop a reference that the caller does not hold (POOL-4)."""


class ViewClosedError(KVViewError, RuntimeError):
    """The view was closed: the engine is gone or the pool was rebound (POOL-10)."""


class PinBudgetExceeded(KVViewError, RuntimeError):
    """A hold would exceed the owner's budget of blocks."""


class WrongThreadError(KVViewError, RuntimeError):
    """A guard was called from another thread or from a forked process (GUARD-2, GUARD-4)."""


class NotCopyableError(KVViewError, TypeError):
    """A guard or a view was copied or pickled (GUARD-4)."""


class NoFreeBlocksError(KVViewError, ValueError):
    """An allocation needs more blocks than the pool has free."""


class GeometryError(KVViewError, ValueError):
    """Block sizes do not divide each other, or a size is not positive (GEO-2)."""


class ConfigError(KVViewError, ValueError):
    """A configuration value, target or file cannot be used."""


class MissingLibraryError(KVViewError, ImportError):
    """A library that a connector needs is not installed; the message names the library."""


class TraceError(KVViewError, ValueError):
    """A row of a request trace is not valid; the message names the file, line and field."""


class KeyNotLoadableError(KVViewError, LookupError):
    """A load was prepared for a key that is not stored, or whose store has not ended (OFF-2)."""


class TransferNotInFlightError(KVViewError, ValueError):
    """A load or a store of a key was completed, but no such transfer was in flight (OFF-9)."""


class EventOrderError(KVViewError, ValueError):
    """A stream of offloading events removes a key that was not stored (EVENT-1)."""


class WireFormatError(KVViewError, ValueError):
    """Bytes are not a batch of KV events in the expected wire format."""


class ConnectorError(KVViewError, RuntimeError):
    """A connector broke its contract with the engine (CONN-1 to CONN-6)."""


class HookError(ConnectorError):
    """A hook of a connector raised or returned a wrong value; the message names the line."""


class HandoffError(KVViewError, ValueError):
    """This request or this engine cannot use a handoff of KV (HAND-1, HAND-5, HAND-6)."""


class UnsupportedEngineError(KVViewError, RuntimeError):
    """The engine's interface differs from every tested release, so nothing was bound."""


class UnsupportedContractError(KVViewError, RuntimeError):
    """A connector was written for a contract version that this kvview does not support."""


class ConnectorDefinitionError(KVViewError, TypeError):
    """A class defines a method whose name is close to a hook's (CONN-9)."""


class ViewNotBoundError(KVViewError, RuntimeError):
    """A connector needs the pool view, but the engine has not bound one."""


class TransferSpecError(KVViewError, ValueError):
    """A transfer names pages that do not exist or that do not pair up (XFER-1)."""


class TierJobError(KVViewError, ValueError):
    """The number, keys or pages of a tier's job cannot be used (TIER-6)."""


class NamespaceMismatchError(KVViewError, ValueError):
    """The entries of a tier belong to other weights, another layout or other hashes (TIER-10)."""


def split_law(message: str) -> tuple[str, str]:
    """Split a message into the law at its start (empty without one) and the other text."""
    law, colon, rest = message.partition(": ")
    return (law, rest) if colon and _LAW.fullmatch(law) else ("", message)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message with the known names that are close to a wrong one, or ""."""
    close = difflib.get_close_matches(name, list(known), n=3)
    return f"; did you mean {', '.join(close)}?" if close else ""


def one_line(error: BaseException) -> str:
    """Format an exception as one printable line."""
    return f"{type(error).__name__}: {line_of(error)}".removesuffix(": ")


def line_of(value: object, convert: Callable[[object], str] = str) -> str:
    """Format a value as one printable line of limited length, even if its ``str`` raises."""
    try:
        text = convert(value)
    except Exception as error:
        return f"<{type(value).__name__} whose text raises {type(error).__name__}>"
    text = printable(" ".join(text.split()))
    if isinstance(value, dataclasses.FrozenInstanceError):
        text += "; the object is frozen, so make another one with dataclasses.replace"
    return text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]}..."


def printable(text: str) -> str:
    """Escape the characters that a terminal would execute instead of display.

    Escaped are control characters, format characters such as a change of the writing direction, and
    halves of surrogate pairs. So a name that was read from a file cannot move the cursor.
    """
    return text if text.isprintable() else "".join(map(_printable, text))


def _printable(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode()
