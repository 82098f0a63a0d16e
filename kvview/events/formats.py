"""The table of wire formats in which engines publish KV events; it needs no package.

A message on the PUB socket has three frames: topic, sequence number (8 bytes, big-endian),
and a batch in msgpack. A batch is the array ``[time, events, rank]`` in every release. Events
are written in one of two ways:

1. As an array: the event's name, then all fields by position, with nil for a field without a
   value. The length of the array shows the release.
2. As a map: ``"type"``, then fields by name. Fields marked ``omitted`` are written only if they
   have a value. Fields are only ever appended, so a newer reader reads older maps.

A reader of arrays cannot read maps, nor the reverse. Frames of a replay have two layouts
(:attr:`WireFormat.replay_topic`).

Source: ``vllm/distributed/kv_events.py`` of 0.11.0 to 0.33.0, against which
``tests/vllm/make_event_corpus.py`` checks each row; SGLang's
``sglang/srt/disaggregation/kv_events.py`` and its pull requests #30827 (metadata) and #37482
(maps), read on 2026-11-22.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import pairwise

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
        name: Its name in maps; arrays have no names.
        kind: Its type.
        meaning: Its meaning, in a sentence.
        since: First release that writes it.
        is_nullable: Whether nil stands for no value.
        is_omitted: Whether maps omit it if it has no value. Every other field is required.
    """

    name: str
    kind: Kind
    meaning: str
    since: str = ""
    is_nullable: bool = False
    is_omitted: bool = False


def _optional(name: str, kind: Kind, meaning: str, since: str) -> Field:
    return Field(name, kind, meaning, since, is_nullable=True, is_omitted=True)


_HASHES = Field("block_hashes", Kind.HASHES, "Hashes of the blocks, in prefix order.")
_PARENT = Field(
    "parent_block_hash",
    Kind.HASH,
    "Hash of the block before the first; nil at the start.",
    is_nullable=True,
)
_TOKENS = "Tokens of all blocks, concatenated; empty if the event names only the medium."
_SIZE = Field("block_size", Kind.INTEGER, "Tokens in each block; 0 from vLLM 0.20's offloading.")
_LORA = Field("lora_id", Kind.INTEGER, "Number of the LoRA, which has a name.", is_nullable=True)
_MEDIUM = "The medium of the blocks: GPU, CPU and others."

_VLLM_STORED = (
    _HASHES,
    _PARENT,
    Field("token_ids", Kind.TOKENS, _TOKENS),
    _SIZE,
    _LORA,
    Field("medium", Kind.TEXT, _MEDIUM, is_nullable=True),
    Field("lora_name", Kind.TEXT, "Name of the LoRA.", "0.14.0", is_nullable=True),
    _optional(
        "extra_keys",
        Kind.EXTRA_KEYS,
        "Further values in each hash: LoRA, images, salt, embeddings.",
        "0.17.0",
    ),
    _optional("group_idx", Kind.INTEGER, "KV-cache group of the blocks.", "0.20.0"),
    _optional("kv_cache_spec_kind", Kind.TEXT, "Kind of attention of the group.", "0.22.0"),
    _optional("kv_cache_spec_sliding_window", Kind.INTEGER, "Tokens of its window.", "0.22.0"),
    _optional("locality", Kind.TEXT, "LOCAL or REMOTE to the publisher.", "0.26.0"),
    _optional("ownership", Kind.TEXT, "The second tier that wrote it.", "0.29.0"),
    _optional("session_id", Kind.TEXT, "Session of the request that stored it.", "0.30.0"),
    _optional(
        "lookahead_token_ids",
        Kind.TOKEN_LISTS,
        "Tokens beyond each block that are in its hash.",
        "0.33.0",
    ),
)
_VLLM_REMOVED = (
    _HASHES,
    Field("medium", Kind.TEXT, _MEDIUM, is_nullable=True),
    *(field for field in _VLLM_STORED if field.name in ("group_idx", "locality", "ownership")),
)
_VLLM_MAPS_SINCE = "0.24.0"
_VLLM_REPLAY_TOPIC_SINCE = "0.26.0"


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
        replay_topic: Whether a replayed batch has a frame for the topic.
        is_cut: Whether arrays omit optional fields without a value at their end.
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
    """Parse a release into numbers, without a suffix after them.

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


def _written_by(fields: tuple[Field, ...], release: str) -> tuple[Field, ...]:
    return tuple(
        field for field in fields if not field.since or version(field.since) <= version(release)
    )


def _vllm_formats() -> tuple[WireFormat, ...]:
    changes = {field.since for field in (*_VLLM_STORED, *_VLLM_REMOVED) if field.since}
    changes |= {"0.11.0", _VLLM_MAPS_SINCE, _VLLM_REPLAY_TOPIC_SINCE}
    return tuple(
        WireFormat(
            name=f"vllm-{since.removesuffix('.0')}",
            producer="vllm",
            since=since,
            until=until,
            is_map=version(since) >= version(_VLLM_MAPS_SINCE),
            stored=_written_by(_VLLM_STORED, since),
            removed=_written_by(_VLLM_REMOVED, since),
            replay_topic=version(since) >= version(_VLLM_REPLAY_TOPIC_SINCE),
        )
        for since, until in pairwise([*sorted(changes, key=version), ""])
    )


_SGLANG_TOKENS = Field("token_ids", Kind.TOKENS_OR_PAIRS, _TOKENS)
_SGLANG_STORED = (_HASHES, _PARENT, _SGLANG_TOKENS, _SIZE, _LORA)
_SGLANG_MEDIUM = Field("medium", Kind.TEXT, _MEDIUM, is_nullable=True)
_SGLANG_METADATA = _optional("metadata", Kind.METADATA, "The salt, as ``cache_salt``.", "0.5.18")
_SGLANG_MAP_MEDIUM = _optional("medium", Kind.TEXT, _MEDIUM, "")
_SGLANG = (
    WireFormat(
        "sglang-arrays", "sglang", "", "", False, _SGLANG_STORED, (_HASHES,), has_rank=False
    ),
    WireFormat("sglang-rank", "sglang", "", "", False, _SGLANG_STORED, (_HASHES,)),
    WireFormat(
        "sglang-metadata",
        "sglang",
        "",  # the metadata from 0.5.18, the medium before
        "#37482",
        False,
        (*_SGLANG_STORED, _SGLANG_MEDIUM, _SGLANG_METADATA),
        (_HASHES, _SGLANG_MEDIUM),
        is_cut=True,
    ),
    WireFormat(
        "sglang-maps",
        "sglang",
        "#37482",
        "",
        True,
        (
            *_SGLANG_STORED,
            _SGLANG_MAP_MEDIUM,
            _optional("cache_salt", Kind.TEXT, "Separates the caches of tenants.", ""),
            _optional("session_id", Kind.TEXT, "Session of the request that stored it.", ""),
        ),
        (_HASHES, _SGLANG_MAP_MEDIUM),
    ),
)

WIRE_FORMATS: tuple[WireFormat, ...] = (*_vllm_formats(), *_SGLANG)
"""All formats; those of each producer from the oldest to the newest."""


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
