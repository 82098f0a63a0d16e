"""Recordings of a stream of KV events: JSON lines, one per message.

A row is ``{"at": seconds, "topic": text, "sequence": number, "payload": base64}``, with ``at`` on
the receiver's clock. The file may be compressed by gzip (``.gz``).
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from typing import IO, Annotated, Any

import msgspec

from kvview.errors import ConfigError, WireFormatError, line_of
from kvview.input_files import DAMAGED_GZIP, open_rows, read_rows

MAX_PAYLOAD_BYTES = 16 << 20
"""Bytes of the largest batch; a prompt of a million tokens takes five million bytes."""

_LONGEST = 24 << 20  # maximum of bytes of a line: base64, the topic and the numbers


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One received message.

    Args:
        sequence: Its sequence number.
        payload: The batch.
        topic: The topic of the message.
        at: Seconds since 1970 at which it was received.
    """

    sequence: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
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
            opened: Any = gzip.open if path.endswith(".gz") else open
            self._file: IO[Any] = opened(path, "wb")
        except OSError as error:
            raise ConfigError(f"{path!r}: {error.strerror}") from error
        self._path, self._encode = path, msgspec.json.Encoder().encode

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, message: Message) -> None:
        """Append a message; it is in the file when this call returns.

        Raises:
            ConfigError: The file cannot be written.
        """
        try:
            self._file.write(self._encode(message) + b"\n")
            self._file.flush()
        except OSError as error:  # a full disk
            raise ConfigError(f"{self._path!r}: {error.strerror}") from error


def read_recording(path: str) -> Iterator[Message]:
    """Read the messages of a recording, in order.

    Raises:
        ConfigError: The file cannot be opened.
        WireFormatError: A line is not a message; the error names the line.
    """
    decode = msgspec.json.Decoder(Message).decode
    try:
        with open_rows(path) as (_, rows):
            for number, row in enumerate(read_rows(rows, _LONGEST), 1):
                try:
                    if row is None:
                        raise ValueError(f"longer than {_LONGEST} bytes")
                    message = decode(row)
                    require_size(message.payload)
                except (msgspec.DecodeError, ValueError, RecursionError) as error:
                    why = f"{path}:{number}: not a recorded message: {line_of(error)}"
                    raise WireFormatError(why) from None
                yield message
    except DAMAGED_GZIP as error:
        raise WireFormatError(
            f"{path}: the file is cut off or not in gzip format: {line_of(error)}"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path!r}: {error.strerror}") from error


def require_size(payload: bytes) -> None:
    """Refuse a batch that takes too much memory.

    Raises:
        ValueError: The batch is longer than :data:`MAX_PAYLOAD_BYTES`.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(
            f"a batch has {len(payload):,} bytes, but at most {MAX_PAYLOAD_BYTES:,} are allowed"
        )
