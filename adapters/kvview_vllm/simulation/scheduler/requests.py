"""A simulated request, all of whose tokens are known before vLLM samples them.

With several steps in flight, vLLM schedules tokens whose values it does not know yet. The
simulation already needs the values, because the bytes of a block depend on its key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvview.testing.connector.judge.invariants import InvariantBroken
from kvview_vllm.releases.build.samples import make_request
from kvview_vllm.simulation.scheduler import cpu_scheduler

if TYPE_CHECKING:
    from kvview.testing.connector.scenario.scenario import Add

_TOKENS_OF_A_FAMILY = 1000
_FIRST_SAMPLED_TOKEN = 1_000_000


@dataclass(frozen=True)
class Chunk:
    """The tokens of one request that a step computes.

    Args:
        planned: The request.
        life: Number of the request's preemptions so far.
        start: Position of the first token.
        kept: Position after the last token that is not a rejected draft.
        end: Position after the last token.
        sampled: The tokens that the step samples, accepted drafts first.
    """

    planned: PlannedRequest
    life: int
    start: int
    kept: int
    end: int
    sampled: list[int]

    @property
    def num_rejected(self) -> int:
        """Number of rejected drafts."""
        return self.end - self.kept


class PlannedRequest:
    """A ``Request`` of vLLM, and the output that a sequential engine would return for it.

    Args:
        request_id: Id of the request.
        prompt: Tokens of the prompt.
        serial: Number that distinguishes the generated tokens from those of other requests.
        num_output_tokens: Number of requested tokens.
        stops_after: Number of tokens after which the request ends early, a number that vLLM does
            not know.
        hash_block_size: Tokens of a hash.
        drafts: As in :class:`~kvview.testing.connector.scenario.scenario.Scenario`.
        transfer_params: The ``kv_transfer_params`` of the request.
        cache_salt: Salt of the request, which its hashes do not contain.
    """

    kv_seed = 12345
    """Requests with equal tokens and equal seeds have equal KV."""

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        serial: int,
        num_output_tokens: int,
        stops_after: int | None,
        hash_block_size: int,
        drafts: Sequence[tuple[int, int]] = (),
        transfer_params: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
    ) -> None:
        self._drafts = drafts
        self._num_decode_steps = 0
        self._prompt = prompt
        self._sampled = _FIRST_SAMPLED_TOKEN + serial  # a token that no other request has
        self._stops = stops_after is not None and 0 < stops_after < num_output_tokens
        self._num_output_tokens = stops_after if stops_after and self._stops else num_output_tokens
        self._hash_block_size = hash_block_size
        self._num_checked = 0
        self.request = make_request(
            request_id,
            prompt,
            num_output_tokens,
            block_hasher=_block_hasher(hash_block_size),
            end_token=cpu_scheduler.END_TOKEN,
            transfer_params=transfer_params,
            cache_salt=cache_salt,
        )

    def next_drafts(self) -> list[int]:
        """Return draft tokens for the next step, of any value, because schedulers ignore it."""
        number, _ = self._drafts[self._num_decode_steps % len(self._drafts)]
        return [self._sampled] * number

    def chunk(self, life: int, start: int, end: int, num_drafts: int) -> Chunk:
        """Return the tokens of a step at its launch; the last ``num_drafts`` of them are drafts."""
        first = kept = end - num_drafts
        if num_drafts:
            _, num_accepted = self._drafts[self._num_decode_steps % len(self._drafts)]
            kept += min(num_accepted, num_drafts)
        if first < self.request.num_tokens:
            return Chunk(self, life, start, kept, end, [])
        self._num_decode_steps += 1
        sampled = [self.token(position) for position in range(first, kept + 1)]
        return Chunk(self, life, start, kept, end, sampled)

    def token(self, position: int) -> int:
        """Return the token at a position, which may be a token that a step in flight samples."""
        if position < len(self._prompt):
            return self._prompt[position]
        is_end = position == len(self._prompt) + self._num_output_tokens - 1
        return cpu_scheduler.END_TOKEN if is_end and self._stops else self._sampled

    def block_hash(self, index: int) -> bytes:
        """Return a block hash of the request, even if vLLM cannot compute the hash yet."""
        known: Sequence[bytes] = self.request.block_hashes
        if index < len(known):
            return known[index]
        size = self._hash_block_size
        tokens = [self.token(i) for i in range(len(known) * size, (index + 1) * size)]
        return _hash_blocks(known[-1] if known else b"", tokens, size)[-1]

    def check(self, has_ended: bool) -> None:
        """Check that vLLM delivered the output of a sequential engine.

        Args:
            has_ended: Whether the request ended without an abort.

        Raises:
            InvariantBroken: The output differs from the output of a sequential engine (``ENGINE``).
        """
        tokens = self.request.output_token_ids
        for index in range(self._num_checked, len(tokens)):
            expected = self.token(len(self._prompt) + index)
            if tokens[index] != expected or index >= self._num_output_tokens:
                raise InvariantBroken(
                    "ENGINE",
                    f"request {self.request.request_id!r} got token {tokens[index]} as output "
                    f"{index} of {self._num_output_tokens}, expected {expected}",
                )
        self._num_checked = len(tokens)
        if has_ended and len(tokens) < self._num_output_tokens:
            raise InvariantBroken(
                "ENGINE",
                f"request {self.request.request_id!r} ended after only {len(tokens)} of "
                f"{self._num_output_tokens} tokens",
            )


def make_prompt(add: Add, before: Sequence[int], hash_block_size: int) -> list[int]:
    """Return the tokens of a prompt, which start with shared tokens, or with the previous turn.

    Only one block of a prompt has the tokens of its family, so a connector whose keys do not depend
    on all earlier tokens confuses the later blocks of two families.
    """
    first = add.num_shared_blocks * hash_block_size
    own = range(first, first + hash_block_size)
    return [*before] + [
        add.family * _TOKENS_OF_A_FAMILY * (position in own) + position
        for position in range(len(before), len(before) + add.num_prompt_tokens)
    ]


def salt_of(prompt: Sequence[int]) -> str | None:
    """Return the salt of a prompt; prompts that share a prefix have one salt, or none."""
    family = prompt[0] // _TOKENS_OF_A_FAMILY
    return f"family {family}" if family % 2 else None


def _block_hasher(hash_block_size: int) -> Callable[[Any], list[bytes]]:
    """Return a hasher with equal hashes in all processes; up to 0.28 vLLM's hashes vary."""

    def hash_new_blocks(request: Any) -> list[bytes]:
        known = request.block_hashes
        tokens = list(request.all_token_ids)[len(known) * hash_block_size :]
        return _hash_blocks(known[-1] if known else b"", tokens, hash_block_size)

    return hash_new_blocks


def _hash_blocks(parent: bytes, tokens: Sequence[int], size: int) -> list[bytes]:
    hashes = []
    for start in range(0, len(tokens) - size + 1, size):
        block = repr(tokens[start : start + size]).encode()
        parent = hashlib.sha256(parent + block).digest()
        hashes.append(parent)
    return hashes
