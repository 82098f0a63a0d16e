"""Recordings of a stream of KV events: JSON lines, one a message.

A row is ``{"at": seconds, "topic": text, "sequence": number, "payload": base64}``; ``at`` is
the receiver's clock. The file may be compressed by gzip (``.gz``).
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from itertools import count
from typing import IO, Any

import msgspec

from kvview.errors import ConfigError, WireFormatError, line_of

_LONGEST = 64 << 20
"""Bytes of a line: a prompt of a million tokens takes seven million."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message as it came.

    Args:
        sequence: Its number.
        payload: The batch.
        topic: Of the subscription.
        at: Seconds since 1970, when it was received.
    """

    sequence: int
    payload: bytes
    topic: str = ""
    at: float = 0.0


class Recording:
    """Writes messages; a context manager.

    Raises:
        ConfigError: The file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        try:
            self._file: IO[Any] = _open(path, "wb")
        except OSError as error:
            raise ConfigError(f"{path!r}: {error.strerror}") from error
        self._path, self._encode = path, msgspec.json.Encoder().encode

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, message: Message) -> None:
        """Add a message; it is in the file when this returns.

        Raises:
            ConfigError: It cannot be written.
        """
        try:
            self._file.write(self._encode(message) + b"\n")
            self._file.flush()
        except OSError as error:  # a disk that is full
            raise ConfigError(f"{self._path!r}: {error.strerror}") from error


def read_recording(path: str) -> Iterator[Message]:
    """The messages of a recording, in order.

    Raises:
        ConfigError: There is no such file.
        WireFormatError: A line is no message; names it.
    """
    decode = msgspec.json.Decoder(Message).decode
    try:
        with _open(path, "rb") as file:
            for number in count(1):
                line = file.readline(_LONGEST + 1)
                if not line:
                    return
                try:
                    if len(line) > _LONGEST:
                        raise ValueError(f"longer than {_LONGEST} bytes")
                    message = decode(line)
                except (msgspec.DecodeError, ValueError, RecursionError) as error:
                    why = f"{path}:{number}: not a recorded message: {line_of(error)}"
                    raise WireFormatError(why) from None
                yield message
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise WireFormatError(f"{path}: cut off or no gzip: {line_of(error)}") from None
    except OSError as error:
        raise ConfigError(f"{path!r}: {error.strerror}") from error


def _open(path: str, mode: str) -> IO[Any]:
    opened: Any = gzip.open if path.endswith(".gz") else open
    file: IO[Any] = opened(path, mode)
    return file
