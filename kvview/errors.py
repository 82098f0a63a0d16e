"""Every error kvview raises: one small tree of nominal exceptions.

Each class also inherits the builtin that a caller would expect, so code that
knows nothing of kvview still catches the right thing. A message says what was
wrong, where, and what to do; whatever raised has changed nothing.
"""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING

from kvview.laws import titled
from kvview.urls import law_url

if TYPE_CHECKING:
    from collections.abc import Callable

_LAW = re.compile(r"[A-Z]+-\d+")
_LONGEST_LINE = 1000


class KVViewError(Exception):
    """Base of every error that kvview raises; its traceback names the broken law and its page."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        law, _ = split_law(str(args[0]) if args else "")
        if law:
            self.add_note(f"{titled(law)}: {law_url(law)}")


class UnknownBlockError(KVViewError, LookupError):
    """A block id names no block of this pool (POOL-4)."""


class NotAnOffloadKeyError(KVViewError, ValueError):
    """Bytes that cannot be an offload key were given for one (KEY-3)."""


class BlockNotHeldError(KVViewError, ValueError):
    """A free would drop a reference that the caller does not hold (POOL-4)."""


class ViewClosedError(KVViewError, RuntimeError):
    """The view was closed: the engine is gone or the pool was rebound (POOL-10)."""


class StaleBlockError(KVViewError, RuntimeError):
    """A block no longer holds the KV that the caller saw in it."""


class PinBudgetExceeded(KVViewError, RuntimeError):
    """A hold would take more of the pool than this owner may have."""


class WrongThreadError(KVViewError, RuntimeError):
    """A guard was called from another thread, or a forked process (GUARD-4, GUARD-6)."""


class NotCopyableError(KVViewError, TypeError):
    """A guard, a lease or an account was copied or pickled (GUARD-6)."""


class NoFreeBlocksError(KVViewError, ValueError):
    """More blocks were asked for than the pool has free."""


class GeometryError(KVViewError, ValueError):
    """Block sizes that do not fit each other, or a size that is not positive."""


class ConfigError(KVViewError, ValueError):
    """A configuration value, target or file that cannot be used."""


class MissingLibraryError(KVViewError, ImportError):
    """A library that a connector needs is not installed; names it."""


class TraceError(KVViewError, ValueError):
    """A trace row that cannot be read; names the file, the line and the field."""


class KeyNotLoadableError(KVViewError, LookupError):
    """A load was prepared for a key that is not stored, or not ready yet (OFF-2)."""


class TransferNotInFlightError(KVViewError, ValueError):
    """A completion names a key that no transfer of its direction is using (OFF-9)."""


class EventOrderError(KVViewError, ValueError):
    """An offloading event stream breaks EVENT-1: a removal without a store."""


class WireFormatError(KVViewError, ValueError):
    """Bytes that are no batch of KV events in the wire format asked for; says what and where."""


class ConnectorError(KVViewError, RuntimeError):
    """A connector broke its contract with the engine (CONN-1 to CONN-6)."""


class HookError(ConnectorError):
    """A hook of a connector raised, or returned what no engine can use; names the line."""


class UnsupportedEngineError(KVViewError, RuntimeError):
    """An engine's surface has a shape that no tested release has; nothing was bound."""


class UnsupportedContractError(KVViewError, RuntimeError):
    """A connector was written to a version of the contract that this kvview does not keep."""


class ConnectorDefinitionError(KVViewError, TypeError):
    """A class defines a method that is close to a hook and is none (CONN-9)."""


class ViewNotBoundError(KVViewError, RuntimeError):
    """A connector needs the pool view and the engine never bound one."""


class TransferSpecError(KVViewError, ValueError):
    """A transfer names pages that do not exist or do not pair up (XFER-1)."""


class TierJobError(KVViewError, ValueError):
    """A job of a tier whose number, keys or pages cannot be used (TIER-6)."""


class NamespaceMismatchError(KVViewError, ValueError):
    """What lies there was written for other weights, another layout or other hashes (TIER-10)."""


def split_law(message: str) -> tuple[str, str]:
    """The law that a message begins with, empty if none, and the rest of it."""
    law, colon, rest = message.partition(": ")
    return (law, rest) if colon and _LAW.fullmatch(law) else ("", message)


def one_line(error: BaseException) -> str:
    """An exception in one printable line, whatever its text is."""
    return f"{type(error).__name__}: {line_of(error)}".removesuffix(": ")


def line_of(value: object, convert: Callable[[object], str] = str) -> str:
    """A value in one printable line of limited length, even if it cannot be converted."""
    try:
        text = convert(value)
    except Exception as error:
        return f"<{type(value).__name__} whose text raises {type(error).__name__}>"
    text = printable(" ".join(text.split()))
    return text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]}..."


def printable(text: str) -> str:
    """A text whose characters a terminal shows and does not obey.

    A control character, a format character such as a change of direction, and a half of a
    surrogate pair become escapes, so that a name in a file cannot move the cursor.
    """
    return text if text.isprintable() else "".join(map(_printable, text))


def _printable(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode()
