"""What a connector is told of requests: who they are, what they hold, what a step does.

Source: ``Request`` and ``SchedulerOutput`` in ``vllm/v1/request.py`` and
``vllm/v1/core/sched/output.py`` (0.33.0).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvview.geometry import CacheGeometry
from kvview.keys import BlockHash, OffloadKey

BlockIds = tuple[Sequence[int], ...]
"""Block ids per KV-cache group, in block order; the null block where KV is skipped."""

ExtraKeys = tuple[Any, ...] | None
"""What a block's hash covers beside its tokens (LoRA, salt, images), as the engine hashes it."""


@dataclass(frozen=True, slots=True)
class RequestContent:
    """What a request's KV is computed from; one object for its whole life.

    Args:
        token_ids: Prompt and generated tokens, a living sequence: it grows, it is not
            copied, and it may be computed at a look. At least ``num_tokens`` long; empty
            where the engine has no tokens (a trace of hashes).
        lora_name: Name of the LoRA, None without.
        lora_id: Its number in the engine, None without.
        cache_salt: Keeps the prefix cache of tenants apart, None without.
        extra_keys: Per entry of ``block_hashes``, what the hash covers beside tokens; a
            living sequence too. Empty: nothing, for all of them.
    """

    token_ids: Sequence[int] = ()
    lora_name: str | None = None
    lora_id: int | None = None
    cache_salt: str | None = None
    extra_keys: Sequence[ExtraKeys] = ()


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """A request, as far as a connector needs to know it, at the moment of a call.

    Args:
        request_id: Unique among unfinished requests only (CONN-5).
        num_tokens: Tokens known now: the prompt and what was generated and taken in. A
            request whose step is in flight has more to come (CONN-7).
        block_hashes: One hash for each full ``hash_block_size`` tokens, each
            covering the whole prefix; grows as tokens come. Without group index.
        num_computed_tokens: Leading tokens whose KV is in the request's blocks: hit in
            the prefix cache, loaded, or computed, launched steps included (CONN-7). The
            token sampled last is never one of them: it is computed in the next step. 0
            while the request has no blocks, but for the hit that ``match_prefix`` is told.
        content: What the KV is computed from; the same object at every call.
    """

    request_id: str
    num_tokens: int
    block_hashes: Sequence[BlockHash]
    num_computed_tokens: int = 0
    content: RequestContent = field(default_factory=RequestContent)


@dataclass(frozen=True, slots=True)
class RequestStep:
    """What one step does for one request.

    Args:
        request: The request as of this step.
        block_ids: Its whole block table, per group; to be read during the call only. It
            may have more blocks than ``num_tokens`` fill (CONN-7).
        num_computed_tokens: Tokens whose KV exists before the step, in stream order; the
            same as ``request.num_computed_tokens``.
        num_scheduled_tokens: Tokens computed in the step. They may reach past
            ``request.num_tokens`` and past ``request.block_hashes`` (CONN-7).
    """

    request: RequestInfo
    block_ids: BlockIds
    num_computed_tokens: int
    num_scheduled_tokens: int


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One scheduler step, after allocation and before compute.

    Args:
        scheduled: The requests computed in this step.
        preempted: Ids of the requests preempted since the last step.
    """

    scheduled: Sequence[RequestStep] = ()
    preempted: Sequence[str] = ()

    def filling(self) -> Sequence[RequestStep]:
        """What of ``scheduled`` a connector has to look at that looks in every step.

        1. At least the requests of which a block becomes full in this step, or was found to
           be full since the last one (its hash came, CONN-7), and those whose computed
           tokens were taken back because a load failed.
        2. An engine that keeps no books says all of them. Of hundreds that decode it is
           about one in a block's tokens.
        3. A connector that did not look in one step looks at ``scheduled`` in the next.

        Returns:
            In the order of ``scheduled`` or any other; each request once.
        """
        return self.scheduled


class FullBlock(NamedTuple):
    """A block that is full of computed KV, hashed, and in the request's table."""

    group_idx: int
    number: int
    """Number of the block in the request, in blocks of its group."""
    block_id: int
    key: OffloadKey


def full_blocks(
    geometry: CacheGeometry,
    request: RequestInfo,
    block_ids: BlockIds,
    *,
    null_block_id: int = 0,
    first_token: int = 0,
    last_token: int | None = None,
) -> Iterator[FullBlock]:
    """What of a request may be stored: blocks that are full, hashed and its own.

    The safe way from tokens to blocks: a block whose KV is not whole, whose hash does not
    exist yet, or that a window has given back is left out, whatever the counts of a step
    in flight say (CONN-7).

    Args:
        geometry: Of the engine.
        request: Whose blocks.
        block_ids: Its block table, per group.
        null_block_id: Stands where there is no block.
        first_token: Leave out blocks that end at or before this many tokens.
        last_token: Leave out blocks that end after this many tokens, the end of the step for
            example; None takes the request's ``num_computed_tokens``.

    Yields:
        Group after group, each in block order.
    """
    end = request.num_computed_tokens if last_token is None else last_token
    for group_idx, (group, table) in enumerate(zip(geometry.groups, block_ids, strict=True)):
        first, last = first_token // group.block_size, min(end // group.block_size, len(table))
        if first >= last:
            continue
        keys = geometry.block_keys(request.block_hashes, group_idx, range(first, last))
        for number, (block_id, key) in enumerate(zip(table[first:last], keys, strict=False), first):
            if block_id != null_block_id:
                yield FullBlock(group_idx, number, block_id, key)
