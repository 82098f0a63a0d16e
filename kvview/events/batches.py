"""The base classes of decoded events and batches, for every format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from kvview.events.formats import WireFormat

Hash = int | bytes
"""The hash of a block: the last 64 bits of the hash as a number, or all its bytes."""


class StoredEvent(msgspec.Struct):
    """``BlockStored``: blocks were stored in a medium. The wire format defines the fields."""

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


class RemovedEvent(msgspec.Struct):
    """``BlockRemoved``: blocks were removed from a medium."""

    if TYPE_CHECKING:
        block_hashes: list[Hash]
        medium: str | None
        group_idx: int | None
        locality: str | None
        ownership: str | None


class ClearedEvent(msgspec.Struct):
    """``AllBlocksCleared``: the prefix cache was reset."""


WireEvent = StoredEvent | RemovedEvent | ClearedEvent


@dataclass(frozen=True, slots=True)
class Batch:
    """The events of one message.

    Args:
        ts: Seconds since 1970 on the publisher's clock.
        events: The events, in order.
        data_parallel_rank: Rank of the publisher, or None.
        wire_format: The format in which the batch was read or will be written.
    """

    ts: float
    events: Sequence[WireEvent]
    data_parallel_rank: int | None
    wire_format: WireFormat
