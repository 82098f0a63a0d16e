"""The parameters of a handoff, which identify KV that one engine keeps for another.

A router copies the parameters from the response of the producer into the request for the consumer.
Parameters may pass several routers, and arrive twice, late, or at the wrong engine. So the
parameters contain all facts that a consumer must compare before it uses the KV.

Laws: HAND-1 and HAND-6 in ``kvview/laws.toml``.

Source: ``kv_transfer_params`` in ``vllm/distributed/kv_transfer/kv_connector/v1/nixl`` (0.33.0).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from kvview.connector import RequestInfo
from kvview.errors import HandoffError
from kvview.geometry import CacheGeometry


@dataclass(frozen=True)
class Peer:
    """One life of an engine.

    Args:
        engine_id: Name of the engine; the same after a restart.
        life: Id of the life, such as a UUID, which is different after each restart.
        address: Address at which the engine receives messages.
        split: Split of the KV of a block over the worker halves, for example "tensor 2"; empty for
            one worker half.
    """

    engine_id: str
    life: str
    address: str
    split: str = ""


@dataclass(frozen=True)
class Handoff:
    """KV that a producer keeps for one consumer.

    Args:
        engine_id: Engine of the producer.
        life: Life of the producer's engine.
        address: Address of the producer.
        handoff_id: Number of the handoff, unique in this life.
        num_tokens: Leading tokens of the prompt whose KV is kept.
        prefix: Hash of the last block of these tokens, in hex; a hash covers its whole prefix.
        layout: Fingerprint of the blocks, the pages and their split (:func:`layout_of`).
    """

    engine_id: str
    life: str
    address: str
    handoff_id: int
    num_tokens: int
    prefix: str
    layout: str

    def to_params(self) -> dict[str, Any]:
        """Return the handoff as plain JSON, for the router (HAND-1)."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Handoff:
        """Read parameters that a router delivered; entries that the router added are ignored.

        Raises:
            HandoffError: An entry is missing or has another type (HAND-1).
        """
        values: dict[str, Any] = {field.name: params.get(field.name) for field in fields(cls)}
        for field in fields(cls):
            value = values[field.name]
            if type(value).__name__ != field.type:
                raise HandoffError(
                    f"HAND-1: entry {field.name!r} of a handoff must be of type {field.type}, got "
                    f"{value!r}; pass the parameters of the producer on unchanged"
                )
        return cls(**values)

    def require_for(self, request: RequestInfo, geometry: CacheGeometry, layout: str) -> None:
        """Check that the handoff is for a request, and has the layout of this engine.

        Raises:
            HandoffError: The tokens or the layout of the pages differ (HAND-6).
        """
        if self.layout != layout:
            raise HandoffError(
                f"HAND-6: the producer {self.engine_id!r} has pages of layout {self.layout}, but "
                f"this engine has {layout}; use the same blocks, groups, pages and ranks in both"
            )
        if self.num_tokens <= 0 or self.num_tokens % geometry.scheduler_block_size:
            raise HandoffError(
                f"HAND-6: a handoff of {self.num_tokens} tokens does not end at a block boundary; "
                f"blocks have {geometry.scheduler_block_size} tokens"
            )
        last = self.num_tokens // geometry.hash_block_size
        hashes = request.block_hashes[last - 1 : last]
        if self.num_tokens >= request.num_tokens or not hashes or hashes[0].hex() != self.prefix:
            raise HandoffError(
                f"HAND-6: handoff {self.handoff_id} of {self.engine_id!r} is not a prefix of "
                f"request {request.request_id!r}; the router mixed up two requests"
            )


def layout_of(geometry: CacheGeometry, page_bytes: Sequence[int], split: str = "") -> str:
    """Return a fingerprint of block sizes, groups, page sizes and the split over worker halves.

    Args:
        geometry: Geometry of the engine.
        page_bytes: For each group, bytes of one block (``EngineFacts.page_bytes``).
        split: Split of the engine's KV over its worker halves (:class:`Peer`).
    """
    text = f"{geometry!r} {list(page_bytes)} {split}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
