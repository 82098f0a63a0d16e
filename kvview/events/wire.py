"""Encoding and decoding of batches of KV events, in every format of the table.

1. A decoder accepts only a batch whose events all have one format, and which encodes to the given
   bytes. Otherwise it raises ``WireFormatError``.
2. A field that a format does not have is None in its events.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import msgspec

from kvview.errors import WireFormatError, line_of
from kvview.events.batches import (
    Batch,
    ClearedEvent,
    Hash,
    RemovedEvent,
    StoredEvent,
    WireEvent,
)
from kvview.events.formats import WIRE_FORMATS, Field, Kind, WireFormat, find_format

__all__ = [
    "Batch",
    "ClearedEvent",
    "Codec",
    "EventDecoder",
    "Hash",
    "RemovedEvent",
    "StoredEvent",
    "WireEvent",
    "codec",
    "decode",
    "encode",
]

_TYPES: dict[Kind, Any] = {
    Kind.HASH: Hash,
    Kind.HASHES: list[Hash],
    Kind.TOKENS: list[int],
    Kind.INTEGER: int,
    Kind.TEXT: str,
    Kind.EXTRA_KEYS: list[list[Any] | None],
    Kind.TOKEN_LISTS: list[list[int]],
}
_UNREADABLE = (ValueError, TypeError, RecursionError, OverflowError, MemoryError)
_ALL_FIELDS = {field.name for wire_format in WIRE_FORMATS for field in wire_format.stored}


class Codec:
    """Encodes and decodes one format; :func:`codec` makes one object per format.

    Args:
        wire_format: A format of :mod:`kvview.events.formats`.
    """

    def __init__(self, wire_format: WireFormat) -> None:
        self.wire_format = wire_format
        self.stored_type = self._define("BlockStored", StoredEvent, wire_format.stored)
        self.removed_type = self._define("BlockRemoved", RemovedEvent, wire_format.removed)
        self.cleared_type = self._define("AllBlocksCleared", ClearedEvent, ())
        events: Any = self.stored_type | self.removed_type | self.cleared_type
        self._batch: Any = msgspec.defstruct(
            "Batch",
            [("ts", float), ("events", list[events]), ("rank", int | None)],
            array_like=True,
            forbid_unknown_fields=True,
            gc=False,
        )
        self._read: Any = msgspec.msgpack.Decoder(self._batch).decode
        self._write = msgspec.msgpack.Encoder().encode

    def make(self, tag: str, **values: Any) -> WireEvent:
        """Make an event of this format; ``tag`` is ``BlockStored`` for example.

        Fields without a value are None, and values without a field are dropped.
        """
        for kind in (self.stored_type, self.removed_type, self.cleared_type):
            if kind.__struct_config__.tag == tag:
                names: Iterable[str] = kind.__struct_fields__
                made: WireEvent = kind(**{name: values.get(name) for name in names})
                return made
        raise WireFormatError(f"{tag!r} is not an event; expected BlockStored, BlockRemoved, ...")

    def decode(self, payload: bytes) -> Batch:
        """Decode a batch of this format (1.).

        Raises:
            WireFormatError: The bytes are not a batch of this format, or encode differently.
        """
        try:
            return self.decode_or_raise(payload)
        except _UNREADABLE as error:
            name, why = self.wire_format.name, line_of(error)
            raise WireFormatError(f"not a batch of {name}: {why}") from None

    def decode_or_raise(self, payload: bytes) -> Batch:
        """Decode like :meth:`decode`, but raise the exception of msgspec, which costs less."""
        read: Any = self._read(payload)
        batch = Batch(read.ts, read.events, read.rank, self.wire_format)
        if self.encode(batch) != payload:
            raise ValueError("encoding the decoded batch again gives other bytes")
        return batch

    def encode(self, batch: Batch) -> bytes:
        """Encode a batch whose events have this format."""
        return self._write(self._batch(batch.ts, batch.events, batch.data_parallel_rank))

    def _define(self, tag: str, base: type, fields: tuple[Field, ...]) -> Any:
        is_map = self.wire_format.is_map
        absent = dict.fromkeys(_ALL_FIELDS - {field.name for field in fields})
        described: list[Any] = []
        for field in fields:
            kind = _TYPES[field.kind] | None if field.is_nullable else _TYPES[field.kind]
            if field.is_omitted and is_map:
                described.append((field.name, kind, None))
            else:
                described.append((field.name, kind))
        return msgspec.defstruct(
            tag,
            described,
            bases=(base,),
            namespace=absent,
            tag=tag,
            array_like=not is_map,
            omit_defaults=is_map,
            forbid_unknown_fields=True,
            gc=False,
        )


@cache
def codec(wire_format: WireFormat) -> Codec:
    """Return the codec of a format."""
    return Codec(wire_format)


class EventDecoder:
    """Decodes the batches of one stream; tries the format of the last batch first.

    Args:
        wire_format: The format; None to detect it.
    """

    def __init__(self, wire_format: WireFormat | None = None) -> None:
        formats = reversed(WIRE_FORMATS) if wire_format is None else [wire_format]
        self._codecs = [codec(known) for known in formats]

    def decode(self, payload: bytes) -> Batch:
        """Decode one batch.

        Raises:
            WireFormatError: The bytes are not a batch of a known format (1.).
        """
        for number, reader in enumerate(self._codecs):
            try:
                batch = reader.decode_or_raise(payload)
            except _UNREADABLE:
                continue
            if number:
                self._codecs.insert(0, self._codecs.pop(number))
            return batch
        return self._codecs[0].decode(payload)  # raises the reason


def decode(payload: bytes, wire_format: WireFormat | str | None = None) -> Batch:
    """Decode one batch; :class:`EventDecoder` is faster for a stream.

    Args:
        payload: The third frame of a message.
        wire_format: A format, or its name; None to detect it.

    Raises:
        WireFormatError: The bytes are not a batch, or have another format (1.).
    """
    if isinstance(wire_format, str):
        wire_format = find_format(wire_format)
    return EventDecoder(wire_format).decode(payload)


def encode(batch: Batch) -> bytes:
    """Encode a batch in its format."""
    return codec(batch.wire_format).encode(batch)
