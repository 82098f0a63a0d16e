"""Requests and steps, in the form in which a connector receives them.

Source: ``Request`` and ``SchedulerOutput`` in ``vllm/v1/request.py`` and
``vllm/v1/core/sched/output.py`` (0.33.0).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvview.geometry import CacheGeometry
from kvview.keys import BlockHash, OffloadKey

BlockIds = tuple[Sequence[int], ...]
"""Block ids per KV-cache group, in block order; the null block replaces blocks without KV."""

ExtraKeys = tuple[Any, ...] | None
"""The values that a block's hash covers besides its tokens (LoRA, salt, images)."""


@dataclass(frozen=True, slots=True)
class RequestContent:
    """The input of a request: one object for its whole life.

    Args:
        token_ids: Prompt and generated tokens. The sequence belongs to the engine, grows with the
            request, and may compute its items on access. The sequence has at least ``num_tokens``
            items, or no items if the engine replays a trace of hashes without tokens.
        lora_name: Name of the LoRA, or None.
        lora_id: The LoRA's number in the engine, or None.
        cache_salt: Text that separates the prefix caches of tenants, or None.
        extra_keys: For each entry of ``block_hashes``, the values besides tokens that the hash
            covers; the sequence grows with the request, and is empty if no hash covers such values.
        transfer_params: The request's ``kv_transfer_params``, unchecked, as the client sent them;
            None if the client sent none. KV does not depend on these parameters.
    """

    token_ids: Sequence[int] = ()
    lora_name: str | None = None
    lora_id: int | None = None
    cache_salt: str | None = None
    extra_keys: Sequence[ExtraKeys] = ()
    transfer_params: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """A request at the moment of a call.

    Args:
        request_id: Id of the request, unique among unfinished requests only (CONN-5).
        num_tokens: Tokens known now: the prompt and the generated tokens received so far. A
            step in flight may add tokens (CONN-7).
        block_hashes: One hash, without group index, for each full ``hash_block_size`` tokens. A
            hash covers the whole prefix up to its last token. The sequence grows with the request.
        num_computed_tokens: Leading tokens whose KV is in the request's blocks: hit in
            the prefix cache, loaded, or computed, launched steps included (CONN-7). Draft
            tokens of a launched step are included until they are rejected; the last sampled
            token is not, because the next step computes it. While the request has no blocks, the
            number is 0; in ``match_prefix`` it is the number of tokens that the GPU hits.
        content: The input of the request; the same object at every call.
    """

    request_id: str
    num_tokens: int
    block_hashes: Sequence[BlockHash]
    num_computed_tokens: int = 0
    content: RequestContent = field(default_factory=RequestContent)


@dataclass(frozen=True, slots=True)
class RequestStep:
    """The part of one step that computes one request.

    Args:
        request: The request as of this step.
        block_ids: Whole block table of the request, per group; valid during the call only. The
            table may have more blocks than ``num_tokens`` fill (CONN-7).
        num_computed_tokens: Tokens whose KV exists before the step, in stream order; the
            same as ``request.num_computed_tokens``.
        num_scheduled_tokens: Tokens computed in the step. The computed tokens may exceed
            ``request.num_tokens`` and ``request.block_hashes`` (CONN-7).
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
    """

    scheduled: Sequence[RequestStep] = ()

    def filling(self) -> Sequence[RequestStep]:
        """Return the requests whose blocks may have become full since the last step.

        1. The result includes every request with a block that becomes full in this step or whose
           hash became known since the last step (CONN-7), and every request whose number of
           computed tokens fell because a load failed.
        2. An engine may return all scheduled requests. If an engine returns only the necessary
           requests, it returns a decoding request once in ``block_size`` steps.
        3. A connector that does not call ``filling`` in a step must read ``scheduled`` in the next
           step.
        4. The KV of these blocks may be read in the next step (XFER-6), with the block table of
           that step, because a window or a state may have freed blocks meanwhile.

        Returns:
            Each request once, in any order.
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
    """Yield the blocks of a request that may be stored: full, hashed and in its table.

    Blocks are skipped if their KV is incomplete, if their hash does not exist yet, or if a
    window has freed them, even if the counts include a step in flight (CONN-7). The blocks come
    group after group, in the order that :class:`~kvview.GPULoadStoreSpec` requires.

    Args:
        geometry: Geometry of the engine.
        request: The request.
        block_ids: Block table of the request, per group.
        null_block_id: The id of the null block.
        first_token: Skip blocks that end at or before this many tokens.
        last_token: Skip blocks that end after this many tokens, for example at the end of the step;
            None means the request's ``num_computed_tokens``.

    Yields:
        The blocks, group by group, each in block order.
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
