"""A request of the reference engine: its lengths, hashes, progress and simulated tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import blake2b
from itertools import count, islice
from typing import Any, overload

from kvview import BlockHash, RequestContent, RequestInfo

_serials = count()
_NUM_TOKEN_IDS = (1 << 31) - 1  # they fit in an int32


def chain_hashes(ids: Iterable[object], parent: bytes = b"") -> list[BlockHash]:
    """Hash the ids of consecutive blocks so that each hash depends on all blocks before it.

    Args:
        ids: Identifiers of the blocks' contents.
        parent: Hash of the block before the first block, or a namespace.

    Returns:
        A hash of 32 bytes for each block, in order.
    """
    hashes = []
    for block_id in ids:
        parent = blake2b(b"%b/%b" % (parent, str(block_id).encode()), digest_size=32).digest()
        hashes.append(BlockHash(parent))
    return hashes


class Status(Enum):
    """The state of a request."""

    WAITING = auto()
    LOADING = auto()
    RUNNING = auto()
    FINISHED = auto()
    ABORTED = auto()


class _TokenIds(Sequence[int]):
    """Token ids that are derived from the hashes of the blocks, and that grow with the request.

    Args:
        num_tokens: Number of tokens.
        block_size: Tokens of a hash.
        hashes: Hashes of the full blocks.
        open_hash: Hash that the next block will have when it is full.
    """

    def __init__(
        self, num_tokens: int, block_size: int, hashes: list[BlockHash], open_hash: BlockHash
    ) -> None:
        self.num_tokens = num_tokens
        self.block_size = block_size
        self.hashes = hashes
        self.open_hash = open_hash

    def __len__(self) -> int:
        return self.num_tokens

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        where = range(len(self))[index]
        return self._item(where) if isinstance(where, int) else [self._item(i) for i in where]

    def _item(self, index: int) -> int:
        block, offset = divmod(index, self.block_size)
        named = self.hashes[block] if block < len(self.hashes) else self.open_hash
        return (int.from_bytes(named, "big") + offset) % _NUM_TOKEN_IDS


@dataclass(eq=False)
class Request:
    """One request.

    Two requests have equal tokens as far as the given ``block_hashes`` are equal, and no further.

    Args:
        request_id: Id of the request, unique among unfinished requests.
        num_prompt_tokens: Number of tokens of the prompt, at least 1.
        num_output_tokens: Tokens to generate.
        hash_block_size: Tokens of one entry of ``block_hashes``.
        block_hashes: Hashes of the full blocks; at first those of the prompt, and later also of
            generated blocks.
        ends_in: Hash that the last, partial block of the prompt will have when it is full; unique
            by default.
        stops_after: Number of generated tokens after which the request ends unexpectedly; None for
            ``num_output_tokens``.
        transfer_params: Parameters that the client sends to the connector.

    Raises:
        ValueError: A count is invalid, or does not match the number of hashes (KEY-1).
    """

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    hash_block_size: int
    block_hashes: list[BlockHash]
    ends_in: BlockHash | None = None
    stops_after: int | None = None
    transfer_params: Mapping[str, Any] | None = None
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0  # sampled by steps in flight
    num_rejected_tokens: int = 0  # drafts that steps in flight compute and reject
    num_decode_steps: int = 0
    life: int = 0  # times that the request got blocks
    use_connector: bool = True  # False after a failed load
    was_started: bool = False
    content: RequestContent = field(init=False)
    _serial: int = field(default_factory=lambda: next(_serials))

    def __post_init__(self) -> None:
        full = self.num_prompt_tokens // self.hash_block_size
        if self.num_prompt_tokens < 1 or self.num_output_tokens < 0:
            raise ValueError(
                f"KEY-1: request {self.request_id!r} has {self.num_prompt_tokens} prompt tokens "
                f"and {self.num_output_tokens} output tokens; expected at least 1 prompt token, "
                "and no negative number"
            )
        if len(self.block_hashes) != full:
            raise ValueError(
                f"KEY-1: request {self.request_id!r} has {len(self.block_hashes)} block hashes, "
                f"but its tokens fill {full} blocks of {self.hash_block_size} tokens; pass one "
                "hash per full block"
            )
        last = self.block_hashes[-1] if self.block_hashes else b""
        self._tokens = _TokenIds(
            self.num_prompt_tokens,
            self.hash_block_size,
            self.block_hashes,
            self.ends_in or self._hash_of_output(full, last),
        )
        self.content = RequestContent(self._tokens, transfer_params=self.transfer_params)

    @property
    def num_tokens(self) -> int:
        """Number of tokens known so far: prompt and generated tokens."""
        return self._tokens.num_tokens

    @property
    def num_kept_tokens(self) -> int:
        """Number of computed tokens, without drafts that steps in flight will reject."""
        return self.num_computed_tokens - self.num_rejected_tokens

    @property
    def num_generated_tokens(self) -> int:
        """Number of tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """Whether all tokens were generated."""
        return self.num_generated_tokens >= self.num_tokens_to_come

    @property
    def num_tokens_to_come(self) -> int:
        """Total number of tokens that the request generates."""
        stops_after = self.num_output_tokens if self.stops_after is None else self.stops_after
        return min(self.num_output_tokens, stops_after)

    def generate(self, num_tokens: int) -> None:
        """Append generated tokens, which are unique to this request."""
        self._tokens.num_tokens += num_tokens
        self._grow(self._tokens)

    def hashes_of(self, num_tokens: int) -> Sequence[BlockHash]:
        """List the hashes of the full blocks of this many tokens, even of future tokens."""
        num_blocks = num_tokens // self.hash_block_size
        if num_blocks <= len(self.block_hashes):
            return self.block_hashes
        known = self._tokens
        ahead = _TokenIds(num_tokens, self.hash_block_size, list(known.hashes), known.open_hash)
        self._grow(ahead)
        return ahead.hashes

    def next_turn(
        self,
        request_id: str,
        num_new_tokens: int,
        num_output_tokens: int,
        ids: Iterable[object],
        serial: int | None = None,
        transfer_params: Mapping[str, Any] | None = None,
    ) -> Request:
        """Make a request whose prompt is all tokens of this request, followed by new tokens.

        Args:
            request_id: Id of the new request.
            num_new_tokens: Number of tokens after the tokens of this request.
            num_output_tokens: Tokens to generate.
            ids: Identifiers of the new blocks' contents, at least one for each block.
            serial: Identifier of the generated content; None for a unique one.
            transfer_params: Parameters that the client sends with the new request.
        """
        num_prompt_tokens = self.num_tokens + num_new_tokens
        full = num_prompt_tokens // self.hash_block_size
        hashes = list(self._tokens.hashes)
        ends_in = self._tokens.open_hash if self.num_tokens % self.hash_block_size else None
        if ends_in is not None and full > len(hashes):
            hashes.append(ends_in)
            ends_in = None
        missing = islice(ids, full - len(hashes))
        hashes += chain_hashes(missing, hashes[-1] if hashes else b"")
        return Request(
            request_id,
            num_prompt_tokens,
            num_output_tokens,
            self.hash_block_size,
            hashes,
            ends_in,
            transfer_params=transfer_params,
            _serial=next(_serials) if serial is None else serial,
        )

    def info(self, num_computed_tokens: int | None = None) -> RequestInfo:
        """Make the part of the request that a connector receives.

        Args:
            num_computed_tokens: Number of tokens whose KV the request will have, for a request that
                has no blocks yet.
        """
        if num_computed_tokens is None:
            num_computed_tokens = self.num_computed_tokens
        return RequestInfo(
            self.request_id, self.num_tokens, self.block_hashes, num_computed_tokens, self.content
        )

    def _hash_of_output(self, block: int, parent: bytes) -> BlockHash:
        return chain_hashes([f"out-{self._serial}-{block}"], parent)[0]

    def _grow(self, tokens: _TokenIds) -> None:
        while len(tokens.hashes) < tokens.num_tokens // self.hash_block_size:
            tokens.hashes.append(tokens.open_hash)
            tokens.open_hash = self._hash_of_output(len(tokens.hashes), tokens.open_hash)
