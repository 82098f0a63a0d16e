"""A request of the reference engine: lengths, hashes, progress; no token ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import blake2b
from itertools import count

from kvview import BlockHash, RequestInfo

_serials = count()


def chain_hashes(ids: Iterable[object], parent: bytes = b"") -> list[BlockHash]:
    """Hash ids of consecutive blocks so that each hash covers its whole prefix.

    Args:
        ids: What tells one block's content from another's.
        parent: Hash of the block before the first; or a namespace.

    Returns:
        32 bytes a block, in order.
    """
    hashes = []
    for block_id in ids:
        parent = blake2b(b"%b/%b" % (parent, str(block_id).encode()), digest_size=32).digest()
        hashes.append(BlockHash(parent))
    return hashes


class Status(Enum):
    """Where a request stands."""

    WAITING = auto()
    LOADING = auto()
    RUNNING = auto()
    FINISHED = auto()
    ABORTED = auto()


@dataclass(eq=False)
class Request:
    """One request.

    Args:
        request_id: Unique among unfinished requests.
        num_prompt_tokens: Tokens of the prompt, at least 1.
        num_output_tokens: Tokens to generate.
        hash_block_size: Tokens of one entry of ``block_hashes``.
        block_hashes: Of the prompt's full hash blocks; grows while generating.
    """

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    hash_block_size: int
    block_hashes: list[BlockHash]
    status: Status = Status.WAITING
    num_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    use_connector: bool = True  # False after a failed load
    was_started: bool = False
    _serial: int = field(default_factory=lambda: next(_serials))

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prompt_tokens
        full = self.num_prompt_tokens // self.hash_block_size
        if self.num_prompt_tokens < 1 or self.num_output_tokens < 0:
            raise ValueError(
                f"request {self.request_id!r}: {self.num_prompt_tokens} prompt tokens, "
                f"{self.num_output_tokens} output tokens"
            )
        if len(self.block_hashes) != full:
            raise ValueError(
                f"request {self.request_id!r}: {len(self.block_hashes)} block hashes for "
                f"{full} full blocks of {self.hash_block_size} tokens"
            )

    @property
    def num_generated_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """Whether everything asked for was generated."""
        return self.num_generated_tokens >= self.num_output_tokens

    def generate(self, num_tokens: int) -> None:
        """Append generated tokens; what they are is nobody else's prefix."""
        self.num_tokens += num_tokens
        missing = self.num_tokens // self.hash_block_size - len(self.block_hashes)
        if missing > 0:
            parent = self.block_hashes[-1] if self.block_hashes else b""
            self.block_hashes += chain_hashes(
                (f"out-{self._serial}-{len(self.block_hashes) + i}" for i in range(missing)), parent
            )

    def info(self) -> RequestInfo:
        """What a connector may know of it."""
        return RequestInfo(
            self.request_id, self.num_tokens, self.block_hashes, self.num_computed_tokens
        )
