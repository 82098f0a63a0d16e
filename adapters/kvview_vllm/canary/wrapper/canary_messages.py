"""Messages of the canary from the scheduler to the workers."""

from __future__ import annotations

from collections.abc import Sequence
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


@dataclass
class Work:
    """The sampled blocks of one step.

    Args:
        computed: Blocks that are full when the step has been computed.
        loads: Blocks that a load fills, by request.
        within_step: The requests whose loads end within the step.
        ended: Requests that ended before their load was reported.
        reset: Whether the caches were reset since the last step.
    """

    computed: list[SampledBlock] = field(default_factory=list)
    loads: dict[str, Sequence[SampledBlock]] = field(default_factory=dict)
    within_step: set[str] = field(default_factory=set)
    ended: list[str] = field(default_factory=list)
    reset: bool = False

    def is_empty(self) -> bool:
        """Whether the workers have nothing to do."""
        return not (self.computed or self.loads or self.ended or self.reset)


@dataclass
class CanaryMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The wrapped connector's metadata, and the canary's own.

    Args:
        wrapped: Metadata of the wrapped connector.
        work: Blocks to digest; None without any.
    """

    wrapped: Any
    work: Work | None
