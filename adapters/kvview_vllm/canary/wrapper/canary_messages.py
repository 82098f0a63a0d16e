"""The message of the canary's scheduler half to its workers, around the wrapped connector's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvview_vllm.releases import reading

with reading("connector", "the messages between the halves of a connector"):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


class SampledBlock(NamedTuple):
    """A sampled block and its place on the GPU."""

    block_hash: bytes
    group: int
    block_id: int


@dataclass(frozen=True)
class Work:
    """The sampled blocks of one step.

    Args:
        computed: Blocks that are full when the step has been computed.
        loads: Blocks that a load fills, by request.
        within_step: The requests whose loads end within the step.
        ended: Requests that ended, or were preempted, before their load was reported.
        reset: Whether the caches were reset since the last step.
    """

    computed: Sequence[SampledBlock] = ()
    loads: Mapping[str, Sequence[SampledBlock]] = field(default_factory=dict)
    within_step: frozenset[str] = frozenset()
    ended: Sequence[str] = ()
    reset: bool = False


@dataclass
class CanaryMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The wrapped connector's metadata, and the canary's own.

    Args:
        wrapped: Metadata of the wrapped connector.
        work: Blocks to digest; None without any.
    """

    wrapped: Any
    work: Work | None
