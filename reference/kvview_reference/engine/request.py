"""A request of the reference engine: its lengths, hashes, progress and simulated tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import blake2b
from itertools import count, islice
from typing import Any, TypeVar, overload

from kvview import BlockHash, ExtraKeys, RequestContent, RequestInfo

_serials = count()
_NUM_TOKEN_IDS = (1 << 31) - 1  # they fit in an int32
_Item = TypeVar("_Item")


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


class _Living(Sequence[_Item]):
    """A sequence that grows with its request, and that computes an item when the item is read."""

    @overload
    def __getitem__(self, index: int) -> _Item: ...

    @overload
    def __getitem__(self, index: slice) -> list[_Item]: ...

    def __getitem__(self, index: int | slice) -> _Item | list[_Item]:
        where = range(len(self))[index]
        return self._item(where) if isinstance(where, int) else [self._item(i) for i in where]

    @abstractmethod
    def _item(self, index: int) -> _Item: ...


class _TokenIds(_Living[int]):
    """Token ids that are derived from the hashes of the blocks.

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

    def _item(self, index: int) -> int:
        block, offset = divmod(index, self.block_size)
        named = self.hashes[block] if block < len(self.hashes) else self.open_hash
        return (int.from_bytes(named, "big") + offset) % _NUM_TOKEN_IDS


class _ExtraKeysOfBlocks(_Living[ExtraKeys]):
    """Extra keys as in vLLM: the LoRA is in each block, the salt only in the first block."""

    def __init__(self, request: Request, hashes: Sequence[BlockHash]) -> None:
        self._lora = request.lora_id if request.lora_name is None else request.lora_name
        self._salt = request.cache_salt
        self._given = request.extra_keys
        self._hashes = hashes

    def __len__(self) -> int:
        return len(self._hashes)

    def _item(self, index: int) -> ExtraKeys:
        return self.of(index)

    def of(self, index: int) -> ExtraKeys:
        """Compute the extra keys of any block, even a future one."""
        keys: tuple[object, ...] = () if self._lora is None else (self._lora,)
        if index < len(self._given):
            keys += self._given[index] or ()
        if self._salt is not None and index == 0:
            keys += (self._salt,)
        return keys or None


@dataclass(eq=False)
class Request:
    """One request.

    Two requests have equal tokens as far as the given ``block_hashes`` are equal, and no further.
    LoRA, salt and extra keys are hashed in addition, so they change the hashes but not the tokens.

    Args:
        request_id: Id of the request, unique among unfinished requests.
        num_prompt_tokens: Number of tokens of the prompt, at least 1.
        num_output_tokens: Tokens to generate.
        hash_block_size: Tokens of one entry of ``block_hashes``.
        block_hashes: Hashes of the full blocks; at first those of the prompt, and later also of
            generated blocks.
        lora_name: Name of the LoRA.
        lora_id: Its number.
        cache_salt: Salt that separates the prefix caches of tenants.
        extra_keys: Further content of each prompt block's hash, for example images; may be shorter
            than the prompt.
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
    lora_name: str | None = None
    lora_id: int | None = None
    cache_salt: str | None = None
    extra_keys: Sequence[ExtraKeys] = ()
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
        given = self.block_hashes
        beside_tokens = (self.lora_name, self.lora_id, self.cache_salt) != (None, None, None)
        if beside_tokens or any(self.extra_keys):
            self.block_hashes = []  # otherwise both are one list
        self._tokens = _TokenIds(
            self.num_prompt_tokens,
            self.hash_block_size,
            given,
            self.ends_in or self._hash_of_output(len(given), given[-1] if given else b""),
        )
        self._keys = _ExtraKeysOfBlocks(self, given)
        keys = () if self.block_hashes is given else self._keys
        self.content = RequestContent(
            self._tokens,
            self.lora_name,
            self.lora_id,
            self.cache_salt,
            keys,
            self.transfer_params,
        )
        self._name(self.block_hashes, self._tokens.hashes)

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
        self._name(self.block_hashes, self._tokens.hashes)

    def hashes_of(self, num_tokens: int) -> Sequence[BlockHash]:
        """List the hashes of the full blocks of this many tokens, even of future tokens."""
        num_blocks = num_tokens // self.hash_block_size
        if num_blocks <= len(self.block_hashes):
            return self.block_hashes
        known = self._tokens
        ahead = _TokenIds(num_tokens, self.hash_block_size, list(known.hashes), known.open_hash)
        self._grow(ahead)
        if self.block_hashes is known.hashes:
            return ahead.hashes
        named = list(self.block_hashes)
        self._name(named, ahead.hashes)
        return named

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
            self.lora_name,
            self.lora_id,
            self.cache_salt,
            self.extra_keys,
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

    def _name(self, named: list[BlockHash], tokens: Sequence[BlockHash]) -> None:
        """Append the hashes of new blocks, made from all tokens and extra keys so far."""
        for block in range(len(named), len(tokens)):
            keys = self._keys.of(block)
            parent = named[-1] if block else b""
            if keys is None and parent == (tokens[block - 1] if block else b""):
                named.append(tokens[block])
            else:
                beside = (
                    self.lora_name,
                    self.lora_id,
                    keys,
                )  # a LoRA and a salt may have the same name
                named += chain_hashes([(tokens[block].hex(), *beside)], parent)
