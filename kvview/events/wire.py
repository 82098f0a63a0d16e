"""Encoding and decoding of batches of KV events, in every format of the table.

1. A strict decoder accepts only a batch whose events all have one format.
2. A lenient decoder also accepts events of unknown format: it decodes their known fields, and
   describes the events in :attr:`Batch.problems`.
3. A decoder returns a batch that encodes to the given bytes, or raises ``WireFormatError``.
4. A field that a format does not have is None in its events.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any

import msgspec

from kvview.errors import WireFormatError, line_of
from kvview.events.batches import (
    AnyEvent,
    Batch,
    ClearedEvent,
    Hash,
    RemovedEvent,
    StoredEvent,
    UnreadableEvent,
    WireEvent,
)
from kvview.events.formats import WIRE_FORMATS, Field, Kind, WireFormat, find_format

__all__ = [
    "AnyEvent",
    "Batch",
    "ClearedEvent",
    "Codec",
    "EventDecoder",
    "Hash",
    "RemovedEvent",
    "StoredEvent",
    "UnreadableEvent",
    "WireEvent",
    "codec",
    "decode",
    "encode",
]

_TYPES: dict[Kind, Any] = {
    Kind.HASH: Hash,
    Kind.HASHES: list[Hash],
    Kind.TOKENS: list[int],
    Kind.TOKENS_OR_PAIRS: list[int | tuple[int, int]],
    Kind.INTEGER: int,
    Kind.TEXT: str,
    Kind.EXTRA_KEYS: list[list[Any] | None],
    Kind.TOKEN_LISTS: list[list[int]],
    Kind.METADATA: dict[str, Any],
}
_UNREADABLE = (ValueError, TypeError, RecursionError, OverflowError, MemoryError)
_ALL_FIELDS = {field.name for wire_format in WIRE_FORMATS for field in wire_format.stored}


class _Shell(msgspec.Struct, array_like=True):
    """A batch with undecoded events; their number is limited, because decoding takes memory."""

    ts: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=2**17)]
    rank: int | None = None


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
        fields: list[Any] = [("ts", float), ("events", list[events])]
        if wire_format.has_rank:
            fields.append(("rank", int | None))
        self._batch: Any = msgspec.defstruct(
            "Batch", fields, array_like=True, forbid_unknown_fields=True, gc=False
        )
        self._read: Any = msgspec.msgpack.Decoder(self._batch).decode
        self._read_event: Any = msgspec.msgpack.Decoder(events).decode
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
        batch = Batch(read.ts, read.events, getattr(read, "rank", None), self.wire_format)
        if self.encode(batch) != payload:
            raise ValueError("encoding the decoded batch again gives other bytes")
        return batch

    def decode_event(self, source: bytes) -> WireEvent | None:
        """Decode one event; returns None if it does not have this format."""
        try:
            event: WireEvent = self._read_event(source)
            return event if self._write(self._as_written(event)) == source else None
        except _UNREADABLE:
            return None

    def encode(self, batch: Batch) -> bytes:
        """Encode a batch whose events have this format."""
        events: Any = batch.events
        if self.wire_format.is_cut:
            events = [self._as_written(event) for event in events]
        rank = (batch.data_parallel_rank,) if self.wire_format.has_rank else ()
        return self._write(self._batch(batch.ts, events, *rank))

    def _as_written(self, event: Any) -> Any:
        if not self.wire_format.is_cut:
            return event
        values = [event.__struct_config__.tag, *msgspec.structs.astuple(event)]
        fields = self.wire_format.stored if isinstance(event, StoredEvent) else ()
        for field in reversed(fields):
            if not field.is_omitted or values[-1] is not None:
                break
            values.pop()
        return values

    def _define(self, tag: str, base: type, fields: tuple[Field, ...]) -> Any:
        layout = self.wire_format
        return _define(tag, base, fields, is_map=layout.is_map, is_cut=layout.is_cut)


def _define(
    tag: str,
    base: type,
    fields: Iterable[Field],
    *,
    is_map: bool,
    is_cut: bool = False,
    loose: bool = False,
) -> Any:
    fields = tuple(fields)
    has_defaults = is_map or is_cut
    absent = dict.fromkeys(_ALL_FIELDS - {field.name for field in fields})
    described: list[Any] = []
    for field in fields:
        is_optional = loose and field.kind is not Kind.HASHES  # an event without hashes is useless
        kind = _TYPES[field.kind] | None if field.is_nullable or is_optional else _TYPES[field.kind]
        if is_optional or (field.is_omitted and has_defaults):
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
        forbid_unknown_fields=not loose,
        gc=False,
    )


@cache
def codec(wire_format: WireFormat) -> Codec:
    """Return the codec of a format."""
    return Codec(wire_format)


@cache
def _loose_readers() -> dict[bool, Any]:
    """Return decoders that accept all known fields: one for arrays, one for maps."""
    readers = {}
    for is_map in (True, False):
        known: dict[str, dict[str, Field]] = {"stored": {}, "removed": {}}
        for wire_format in WIRE_FORMATS:
            if wire_format.is_map == is_map and (is_map or wire_format.producer == "vllm"):
                for event, fields in known.items():
                    fields.update((field.name, field) for field in getattr(wire_format, event))
        stored, removed, cleared = (
            _define(tag, base, fields, is_map=is_map, loose=True)
            for tag, base, fields in (
                ("BlockStored", StoredEvent, known["stored"].values()),
                ("BlockRemoved", RemovedEvent, known["removed"].values()),
                ("AllBlocksCleared", ClearedEvent, ()),
            )
        )
        readers[is_map] = msgspec.msgpack.Decoder(stored | removed | cleared).decode
    return readers


class EventDecoder:
    """Decodes the batches of one stream; tries the format of the last batch first.

    Args:
        wire_format: The format; None to detect it.
        strict: Whether to decode strictly (1.) or leniently (2.).
    """

    def __init__(self, wire_format: WireFormat | None = None, *, strict: bool = True) -> None:
        newest_first = [codec(known) for known in reversed(WIRE_FORMATS)]
        newest_first.sort(key=lambda known: known.wire_format.producer, reverse=True)
        self._codecs = newest_first if wire_format is None else [codec(wire_format)]
        self._strict = strict

    def decode(self, payload: bytes) -> Batch:
        """Decode one batch.

        Raises:
            WireFormatError: The bytes are not a batch (3.), or have another format (1.).
        """
        for number, reader in enumerate(self._codecs):
            try:
                batch = reader.decode_or_raise(payload)
            except _UNREADABLE:
                continue
            if number:
                self._codecs.insert(0, self._codecs.pop(number))
            return batch
        if self._strict:
            return self._codecs[0].decode(payload)  # raises the reason
        return self._decode_leniently(payload)

    def _decode_leniently(self, payload: bytes) -> Batch:
        try:
            shell = msgspec.msgpack.decode(payload, type=_Shell)
            sources = [bytes(raw) for raw in shell.events]
        except _UNREADABLE as error:
            raise WireFormatError(f"not a batch of KV events: {line_of(error)}") from None
        events: list[AnyEvent] = []
        problems = []
        for number, source in enumerate(sources):
            event, why = self._decode_event(source)
            events.append(event)
            if why:
                problems.append(f"event {number}: {why}")
        problems = problems or ["the events have several formats, or the batch has extra elements"]
        wire_format = self._codecs[0].wire_format
        return Batch(shell.ts, events, shell.rank, wire_format, tuple(problems), payload)

    def _decode_event(self, source: bytes) -> tuple[AnyEvent, str]:
        for reader in self._codecs:
            event = reader.decode_event(source)
            if event is not None:
                return event, ""
        is_map = source[:1] >= b"\x80" and (source[0] < 0x90 or source[0] in (0xDE, 0xDF))
        try:
            loose: WireEvent = _loose_readers()[is_map](source)
        except _UNREADABLE as error:
            return UnreadableEvent(source, line_of(error)), f"not readable: {line_of(error)}"
        return loose, "no known format: fields are missing, new, or of another type"


def decode(
    payload: bytes, wire_format: WireFormat | str | None = None, *, strict: bool = True
) -> Batch:
    """Decode one batch; :class:`EventDecoder` is faster for a stream.

    Args:
        payload: The third frame of a message.
        wire_format: A format, or its name; None to detect it.
        strict: Whether to decode strictly (1.) or leniently (2.).

    Raises:
        WireFormatError: The bytes are not a batch (3.), or have another format (1.).
    """
    if isinstance(wire_format, str):
        wire_format = find_format(wire_format)
    return EventDecoder(wire_format, strict=strict).decode(payload)


def encode(batch: Batch) -> bytes:
    """Encode a batch in its format; a batch with problems keeps its original bytes."""
    return codec(batch.wire_format).encode(batch) if batch.source is None else batch.source
