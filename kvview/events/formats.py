"""The table of wire formats in which vLLM publishes KV events, ``formats.toml``.

A message on the PUB socket has three frames: topic, sequence number (8 bytes, big-endian),
and a batch in msgpack. A batch is the array ``[time, events, rank]`` in every release. Events
are written in one of two ways:

1. As an array: the event's name, then all fields by position, with nil for a field without a
   value. The length of the array shows the release.
2. As a map: ``"type"``, then fields by name. Fields marked ``omitted`` are written only if they
   have a value. Fields are only ever appended, so a newer reader reads older maps.

A reader of arrays cannot read maps, and a reader of maps cannot read arrays.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

from kvview.errors import ConfigError


class Kind(Enum):
    """The type of a field, in msgpack."""

    HASH = "integer of 64 bits, or bytes"
    HASHES = "array of integers or bytes"
    TOKENS = "array of integers"
    INTEGER = "integer"
    TEXT = "string"
    EXTRA_KEYS = "array of one array or nil a block"
    TOKEN_LISTS = "array of one array of integers a block"


@dataclass(frozen=True, slots=True)
class Field:
    """One field of an event.

    Args:
        name: Name of the field in maps; arrays have no names.
        kind: Type of the field.
        since: First release that writes the field.
        is_nullable: Whether the field may be nil, which means that it has no value.
        is_omitted: Whether maps omit the field if it has no value. Every other field is required.
    """

    name: str
    kind: Kind
    since: str = ""
    is_nullable: bool = False
    is_omitted: bool = False


@dataclass(frozen=True, slots=True)
class WireFormat:
    """The wire format of a range of vLLM's releases.

    Args:
        name: The first release, as in ``"vllm-0.24"``.
        since: First release.
        is_map: Whether events are maps.
        stored: Fields of ``BlockStored``, in order.
        removed: Fields of ``BlockRemoved``, in order. ``AllBlocksCleared`` has no fields.
    """

    name: str
    since: str
    is_map: bool
    stored: tuple[Field, ...]
    removed: tuple[Field, ...]


def version(release: str) -> tuple[int, ...]:
    """Parse the numbers of a release; a suffix is ignored.

    Raises:
        ConfigError: The release does not start with a number.
    """
    numbers = []
    for part in release.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    if not numbers:
        raise ConfigError(f"release {release!r} is not a version such as 0.33.0")
    return tuple(numbers)


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _formats() -> Iterator[WireFormat]:
    maps = version(_TABLE["maps_since"])
    fields = [
        Field(
            row["name"],
            Kind[row["kind"]],
            row.get("since", ""),
            is_nullable="is_nullable" in row or "is_omitted" in row,
            is_omitted="is_omitted" in row,
        )
        for row in _TABLE["stored"]
    ]
    by_name = {field.name: field for field in fields}
    removed = [by_name[name] for name in _TABLE["removed"]]
    changes = {field.since for field in fields if field.since}
    for since in sorted(changes | {"0.11.0", _TABLE["maps_since"]}, key=version):
        release = version(since)
        yield WireFormat(
            name=f"vllm-{since.removesuffix('.0')}",
            since=since,
            is_map=release >= maps,
            stored=tuple(f for f in fields if not f.since or version(f.since) <= release),
            removed=tuple(f for f in removed if not f.since or version(f.since) <= release),
        )


WIRE_FORMATS: tuple[WireFormat, ...] = tuple(_formats())
"""All formats, from the oldest to the newest."""


@cache
def find_format(name: str) -> WireFormat:
    """Find the format of a release of vLLM: ``"vllm-0.24"``, ``"vllm-0.27.1"``.

    Raises:
        ConfigError: The format is unknown.
    """
    for wire_format in WIRE_FORMATS:
        if wire_format.name == name:
            return wire_format
    producer, _, release = name.partition("-")
    if producer == "vllm" and release[:1].isdigit():
        for wire_format in reversed(WIRE_FORMATS):
            if version(wire_format.since) <= version(release):
                return wire_format
    known = ", ".join(wire_format.name for wire_format in WIRE_FORMATS)
    raise ConfigError(f"wire format {name!r} is unknown; expected {known} or vllm-RELEASE")
