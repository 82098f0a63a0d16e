"""Events and batches as they are read: the classes that every format's are made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from kvview.events.formats import WireFormat

Hash = int | bytes
"""Of a block: 64 bits as a number, or all of it."""


class StoredEvent(msgspec.Struct):
    """``BlockStored``: blocks appeared in a medium. The fields are those of the format."""

    if TYPE_CHECKING:
        block_hashes: list[Hash]
        parent_block_hash: Hash | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None
        medium: str | None
        lora_name: str | None
        extra_keys: list[list[Any] | None] | None
        group_idx: int | None
        kv_cache_spec_kind: str | None
        kv_cache_spec_sliding_window: int | None
        locality: str | None
        ownership: str | None
        session_id: str | None
        lookahead_token_ids: list[list[int]] | None
        cache_salt: str | None
        metadata: dict[str, Any] | None


class RemovedEvent(msgspec.Struct):
    """``BlockRemoved``: blocks vanished from a medium."""

    if TYPE_CHECKING:
        block_hashes: list[Hash]
        medium: str | None
        group_idx: int | None
        locality: str | None
        ownership: str | None


class ClearedEvent(msgspec.Struct):
    """``AllBlocksCleared``: the prefix cache was reset."""


@dataclass(frozen=True, slots=True)
class UnreadableEvent:
    """An event of a lenient batch that no reader can make sense of."""

    source: bytes
    why: str


WireEvent = StoredEvent | RemovedEvent | ClearedEvent
AnyEvent = WireEvent | UnreadableEvent


@dataclass(frozen=True, slots=True)
class Batch:
    """What one message says.

    Args:
        ts: Seconds since 1970, of the publisher's clock.
        events: In order.
        data_parallel_rank: Of the publisher; None where it does not say.
        wire_format: In which it was read, or is to be written.
        problems: What a lenient reader passed over, an event each.
        source: The bytes of a batch with problems.
    """

    ts: float
    events: Sequence[AnyEvent]
    data_parallel_rank: int | None
    wire_format: WireFormat
    problems: tuple[str, ...] = ()
    source: bytes | None = None
