"""The simulated compute of a raw connector's engine, token by token and layer by layer.

A connector may save slots instead of whole blocks, and rely on the way in which vLLM fills a block.
So a step writes exactly the slots of its tokens and overwrites nothing else.

1. The bytes of a token depend on this token and all tokens before it.
2. The tokens of a step are written before the reads of the step are compared, because a request may
   hit a block that another request computes in the same step. In Mamba groups, reads come first.
3. Only the tokens that the next token reads are compared, which in a window are the last tokens.
4. A state of several tokens (Mamba, compressed MLA) has the bytes of the last token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvview import CacheGroup, Mamba
from kvview_vllm.simulation.scheduler.requests import PlannedRequest

NEVER_WRITTEN = "memory that was never written"

_MASK = (1 << 30) - 1
_LAYER_STEP = 7919


@dataclass(frozen=True)
class RequestInStep:
    """Tokens of a request that a step computes or a load writes.

    Args:
        request_id: Id of the request.
        tables: Blocks of the request, by group.
        start: Position of the first token.
        end: Position after the last token.
        words: The words of all tokens up to the end (:class:`TokenWords`).
    """

    request_id: str
    tables: Sequence[Sequence[int]]
    start: int
    end: int
    words: Sequence[int]


@dataclass(frozen=True)
class Wrong:
    """A token with wrong bytes.

    Args:
        request_id: The request that reads the token.
        position: Position of the token.
        block_id: Block of the token.
        layer: Number of the first layer in which the bytes differ.
        head: Number of the head, or of the slot of a head, in which the first bytes differ.
        word: The word that was found (:meth:`TokenWords.name`); None if no word was written.
    """

    request_id: str
    position: int
    block_id: int
    layer: int
    head: int
    word: int | None


class TokenWords:
    """Maps each token of each request to a word, and each word to its token."""

    def __init__(self) -> None:
        self._states: WeakKeyDictionary[PlannedRequest, list[int]] = WeakKeyDictionary()
        self._names: dict[int, str] = {}
        self._num_weights = 0

    def change_weights(self) -> None:
        """Give all tokens other words from now on, because the weights may change after a reset.

        The engine must have no KV at this time, so that each older word is an error of the
        connector.
        """
        self._num_weights += 1
        self._states.clear()
        self._names = dict.fromkeys(self._names, "KV computed before a reset of the caches")

    def words(self, planned: PlannedRequest, end: int) -> list[int]:
        """Return the words of the tokens of a request, up to a position."""
        states = self._states.setdefault(planned, [])
        while len(states) < end:
            position = len(states)
            before = states[-1] if states else planned.kv_seed + self._num_weights
            state = before * 6364136223846793005 + planned.token(position) * 1442695040888963407
            states.append(((state + 0x9E3779B97F4A7C15) ^ (before >> 29)) & ((1 << 62) - 1))
            name = f"the bytes of token {position} of request {planned.request.request_id!r}"
            self._names.setdefault(_word(states[-1]), name)
        return [_word(state) for state in states[:end]]

    def name(self, word: int | None) -> str:
        """Describe the content of a word, for reports."""
        if word is None:
            return NEVER_WRITTEN
        return self._names.get(word, "the bytes of no token")


class TokenCompute:
    """Writes the tokens that steps compute, and compares the tokens that they read.

    Args:
        slots: For each layer, the words of all states, ``(blocks, states of a block, ...)``.
        groups: The KV-cache groups.
        group_of_layer: The number of the group for each layer.
        rank: Number of the rank; the bytes of the ranks differ.
    """

    def __init__(
        self,
        slots: Sequence[torch.Tensor],
        groups: Sequence[CacheGroup],
        group_of_layer: Sequence[int],
        rank: int,
    ) -> None:
        self._slots = slots
        self._first_layer = rank * len(slots)
        self.groups = groups
        self.group_of_layer = group_of_layer
        self._words = [
            (torch.arange(math.prod(each.shape[2:])) * 104_729).reshape(each.shape[2:])
            for each in slots
        ]

    def slots_of(self, request: RequestInStep, group: int) -> torch.Tensor:
        """Return the slots of tokens of a request in a group."""
        positions = torch.arange(request.start, request.end)
        size = self.groups[group].block_size
        return self._blocks(request, group, positions) * size + positions % size

    def write(self, layer: int, batch: Sequence[RequestInStep]) -> None:
        """Compute tokens of requests in a layer."""
        places = [self._places(one, layer, one.start, one.end) for one in batch]
        blocks, states, words = (torch.cat(each) for each in zip(*places, strict=True))
        self._slots[layer][blocks, states] = self._expected(words, layer)

    def run(self, layer: int, batch: Sequence[RequestInStep]) -> list[Wrong]:
        """Compute tokens in a layer, and return the first wrong token that each request reads.

        A state of Mamba is read before it is overwritten, and no request hits a state that another
        request computes in the same step.
        """
        if isinstance(self.groups[self.group_of_layer[layer]], Mamba):
            wrong = self._wrong_reads(layer, batch)
            self.write(layer, batch)
            return wrong
        self.write(layer, batch)
        return self._wrong_reads(layer, batch)

    def _wrong_reads(self, layer: int, batch: Sequence[RequestInStep]) -> list[Wrong]:
        group = self.groups[self.group_of_layer[layer]]
        found = (
            self._first_wrong(one, group.num_skipped_tokens(one.start), one.start, layer)
            for one in batch
        )
        return [one for one in found if one is not None]

    def holds(self, request: RequestInStep) -> bool:
        """Whether all layers already have the bytes that a load must write."""
        return all(
            self._first_wrong(
                request,
                max(request.start, self.groups[group].num_skipped_tokens(request.end)),
                request.end,
                layer,
            )
            is None
            for layer, group in enumerate(self.group_of_layer)
        )

    def _blocks(self, request: RequestInStep, group: int, positions: torch.Tensor) -> torch.Tensor:
        table = torch.tensor(request.tables[group], dtype=torch.int64)
        return table[positions // self.groups[group].block_size]

    def _places(
        self, request: RequestInStep, layer: int, start: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the block, the state in the block and the word of each state's last token."""
        group = self.group_of_layer[layer]
        size = self.groups[group].block_size
        per_state = size // self._slots[layer].shape[1]
        positions = torch.arange(start, end)
        is_last = (positions % per_state == per_state - 1) | (positions == end - 1)
        words = torch.tensor(request.words[start:end], dtype=torch.int64)[is_last]
        positions = positions[is_last]
        return self._blocks(request, group, positions), positions % size // per_state, words

    def _first_wrong(
        self, request: RequestInStep, start: int, end: int, layer: int
    ) -> Wrong | None:
        if start >= end:
            return None
        blocks, states, words = self._places(request, layer, start, end)
        found = self._slots[layer][blocks, states]
        expected = self._expected(words, layer)
        wrong = (found != expected).nonzero()
        if not len(wrong):
            return None
        at, *element = wrong[0].tolist()
        word: int | None = (int(found[at].flatten()[0]) - self._shift(layer)) & _MASK
        if not bool(found[at].any()):
            word = None
        position = request.words.index(int(words[at]))
        head = element[-2] if len(element) > 1 else 0
        return Wrong(request.request_id, position, int(blocks[at]), layer, head, word)

    def _expected(self, words: torch.Tensor, layer: int) -> torch.Tensor:
        column = words.reshape(-1, *[1] * self._words[layer].dim())
        numbers = (column + self._shift(layer) + self._words[layer]) & _MASK
        return numbers.to(self._slots[layer].dtype)

    def _shift(self, layer: int) -> int:
        return (self._first_layer + layer) * _LAYER_STEP


def _word(state: int) -> int:
    return (state ^ (state >> 31)) & _MASK


def attention_metadata(
    compute: TokenCompute, batch: Sequence[RequestInStep], group: int, kind: Any
) -> object:
    """Make the metadata of a step that layer-wise connectors read: slots, tables and lengths.

    Args:
        compute: The compute, which has the slots.
        batch: The requests of the step.
        group: Group of the layer.
        kind: Class of the metadata.
    """
    tables = [one.tables[group] for one in batch]
    width = max(map(len, tables))
    rows = [[*table, *[0] * (width - len(table))] for table in tables]
    block_table = torch.tensor(rows, dtype=torch.int32)
    ends = [one.end for one in batch]
    lengths = [one.end - one.start for one in batch]
    values: dict[str, object] = {
        "slot_mapping": torch.cat([compute.slots_of(one, group) for one in batch]),
        "block_table": block_table,
        "block_table_tensor": block_table,
        "seq_lens": torch.tensor(ends, dtype=torch.int32),
        "query_start_loc": torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32),
        "num_actual_tokens": sum(lengths),
        "max_seq_len": max(ends),
        "max_query_len": max(lengths),
        "num_reqs": len(batch),
        "causal": True,
    }
    metadata: object = kind.__new__(kind)  # its constructor needs more than a connector reads
    for name, value in values.items():
        with suppress(AttributeError):  # a property of this class
            object.__setattr__(metadata, name, value)
    return metadata
