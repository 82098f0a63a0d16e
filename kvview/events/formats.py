"""The table of wire formats in which engines publish KV events, ``formats.toml``.

A message on the PUB socket has three frames: topic, sequence number (8 bytes, big-endian),
and a batch in msgpack. A batch is the array ``[time, events, rank]`` in every release. Events
are written in one of two ways:

1. As an array: the event's name, then all fields by position, with nil for a field without a
   value. The length of the array shows the release.
2. As a map: ``"type"``, then fields by name. Fields marked ``omitted`` are written only if they
   have a value. Fields are only ever appended, so a newer reader reads older maps.

A reader of arrays cannot read maps, and a reader of maps cannot read arrays. Replays have two
layouts of frames (:attr:`WireFormat.replay_topic`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvview.errors import ConfigError


class Kind(Enum):
    """The type of a field, in msgpack."""

    HASH = "integer of 64 bits, or bytes"
    HASHES = "array of integers or bytes"
    TOKENS = "array of integers"
    TOKENS_OR_PAIRS = "array of integers, or of pairs of them"
    INTEGER = "integer"
    TEXT = "string"
    EXTRA_KEYS = "array of one array or nil a block"
    TOKEN_LISTS = "array of one array of integers a block"
    METADATA = "map"


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
    """The wire format of one producer, in a range of its releases.

    Args:
        name: The producer and the first release, ``"vllm-0.24"`` for example.
        producer: ``"vllm"`` or ``"sglang"``.
        since: First release, or the pull request; empty if unknown.
        until: First release with another format; empty for the newest, or if unknown.
        is_map: Whether events are maps.
        stored: Fields of ``BlockStored``, in order.
        removed: Fields of ``BlockRemoved``, in order. ``AllBlocksCleared`` has no fields.
        has_rank: Whether a batch ends with the data-parallel rank, which may be nil.
        replay_topic: Whether a replayed batch has a topic frame.
        is_cut: Whether arrays end before trailing optional fields that have no value.
    """

    name: str
    producer: str
    since: str
    until: str
    is_map: bool
    stored: tuple[Field, ...]
    removed: tuple[Field, ...]
    has_rank: bool = True
    replay_topic: bool = False
    is_cut: bool = False


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


def _fields(rows: Iterable[Mapping[str, Any]]) -> tuple[Field, ...]:
    return tuple(
        Field(
            row["name"],
            Kind[row["kind"]],
            row.get("since", ""),
            is_nullable="is_nullable" in row or "is_omitted" in row,
            is_omitted="is_omitted" in row,
        )
        for row in rows
    )


def _vllm_formats() -> Iterator[WireFormat]:
    table = _TABLE["vllm"]
    maps, topics = version(table["maps_since"]), version(table["replay_topic_since"])
    fields = _fields(table["stored"])
    by_name = {field.name: field for field in fields}
    removed = [by_name[name] for name in table["removed"]]
    changes = {field.since for field in fields if field.since}
    changes |= {"0.11.0", table["maps_since"], table["replay_topic_since"]}
    for since, until in pairwise([*sorted(changes, key=version), ""]):
        release = version(since)
        yield WireFormat(
            name=f"vllm-{since.removesuffix('.0')}",
            producer="vllm",
            since=since,
            until=until,
            is_map=release >= maps,
            stored=tuple(f for f in fields if not f.since or version(f.since) <= release),
            removed=tuple(f for f in removed if not f.since or version(f.since) <= release),
            replay_topic=release >= topics,
        )


def _sglang_formats() -> Iterator[WireFormat]:
    fields = _fields(_TABLE["sglang"]["stored"])
    for row in _TABLE["sglang"]["formats"]:
        more = _fields(row.get("more", ()))
        yield WireFormat(
            name=row["name"],
            producer="sglang",
            since=row.get("since", ""),
            until=row.get("until", ""),
            is_map=row.get("is_map", False),
            stored=(*fields, *more),
            removed=(fields[0], *(field for field in more if field.name == "medium")),
            has_rank=row.get("has_rank", True),
            is_cut=row.get("is_cut", False),
        )


WIRE_FORMATS: tuple[WireFormat, ...] = (*_vllm_formats(), *_sglang_formats())
"""All formats; the formats of each producer are sorted from the oldest to the newest."""


@cache
def find_format(name: str) -> WireFormat:
    """Find a format by its name, or by producer and release: ``"vllm-0.24"``, ``"vllm-0.27.1"``.

    Raises:
        ConfigError: The format is unknown.
    """
    for wire_format in WIRE_FORMATS:
        if wire_format.name == name:
            return wire_format
    producer, _, release = name.partition("-")
    if producer == "vllm" and release[:1].isdigit():
        for wire_format in reversed(WIRE_FORMATS):
            if wire_format.producer == "vllm" and version(wire_format.since) <= version(release):
                return wire_format
    known = ", ".join(wire_format.name for wire_format in WIRE_FORMATS)
    raise ConfigError(f"wire format {name!r} is unknown; expected {known} or vllm-RELEASE")
