"""The made-up compute of a raw connector's engine: bytes token by token, layer by layer.

A connector may save slots, not blocks, and rely on what vLLM does with a block: so a step
writes the slots that it was given and no others, and nothing is overwritten beside them.

1. A token's bytes follow from all tokens up to it.
2. A step's batch is written before its reads are compared: a request may hit what another
   computes in the same step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from kvview_vllm.simulation.requests import PlannedRequest

_MASK = (1 << 30) - 1
_LAYER_STEP = 7919


@dataclass(frozen=True)
class Wrong:
    """A token whose bytes are others than it stands for.

    Args:
        request_id: Who reads it.
        position: Of the token.
        block_id: Where it is.
        layer: Number of the first layer where it differs.
        found: What is there, for people.
    """

    request_id: str
    position: int
    block_id: int
    layer: int
    found: str


class TokenCompute:
    """Writes what steps compute, and compares what they read.

    Args:
        slots: Per layer the words of each token, ``(blocks, tokens of a block, ...)``, int32.
    """

    def __init__(self, slots: Sequence[torch.Tensor]) -> None:
        self._slots = slots
        self._block_size = slots[0].shape[1]
        rest = slots[0].shape[2:]
        self._words = (torch.arange(math.prod(rest), dtype=torch.int64) * 104_729).reshape(rest)
        self._states: WeakKeyDictionary[PlannedRequest, list[int]] = WeakKeyDictionary()
        self._names: dict[int, str] = {}

    def slots_of(self, table: Sequence[int], start: int, end: int) -> torch.Tensor:
        """Slots of a request's tokens.

        Args:
            table: Its blocks.
            start: First token.
            end: After the last.
        """
        positions = torch.arange(start, end)
        blocks = torch.tensor(table, dtype=torch.int64)[positions // self._block_size]
        return blocks * self._block_size + positions % self._block_size

    def write(
        self, layer: int, slots: torch.Tensor, tokens: Sequence[tuple[PlannedRequest, int, int]]
    ) -> None:
        """Compute tokens of requests, from one position to another, in a layer.

        Args:
            layer: Its number.
            slots: Of all of the tokens, in order.
            tokens: Requests, with the first token and after the last.
        """
        values = [value for planned, s, e in tokens for value in self._values(planned, s, e)]
        self._slots[layer][slots // self._block_size, slots % self._block_size] = self._expected(
            values, layer
        )

    def first_wrong(
        self, planned: PlannedRequest, table: Sequence[int], start: int, end: int, layer: int
    ) -> Wrong | None:
        """The first token of some that is not as it should be, in a layer."""
        if start >= end:
            return None
        slots = self.slots_of(table, start, end)
        found = self._slots[layer][slots // self._block_size, slots % self._block_size]
        expected = self._expected(self._values(planned, start, end), layer)
        wrong = (found != expected).flatten(1).any(1).nonzero().flatten().tolist()
        if not wrong:
            return None
        at = wrong[0]
        word = (int(found[at].flatten()[0]) - layer * _LAYER_STEP) & _MASK
        there = self._names.get(word, "the bytes of no token")
        if there.startswith("the bytes of no") and not bool(found[at].any()):
            there = "nothing that was ever written"
        block_id = int(slots[at]) // self._block_size
        return Wrong(planned.request.request_id, start + at, block_id, layer, there)

    def holds(self, planned: PlannedRequest, table: Sequence[int], start: int, end: int) -> bool:
        """Whether all bytes of some tokens are there already, in all layers."""
        return all(
            self.first_wrong(planned, table, start, end, layer) is None
            for layer in range(len(self._slots))
        )

    def _values(self, planned: PlannedRequest, start: int, end: int) -> list[int]:
        states = self._states.setdefault(planned, [])
        while len(states) < end:
            position = len(states)
            before = states[-1] if states else 12345
            state = before * 6364136223846793005 + planned.token(position) * 1442695040888963407
            states.append(((state + 0x9E3779B97F4A7C15) ^ (before >> 29)) & ((1 << 62) - 1))
            name = f"those of token {position} of request {planned.request.request_id!r}"
            self._names.setdefault(_value(states[-1]), name)
        return [_value(state) for state in states[start:end]]

    def _expected(self, values: Sequence[int], layer: int) -> torch.Tensor:
        column = torch.tensor(values, dtype=torch.int64).reshape(-1, *[1] * self._words.dim())
        return ((column + layer * _LAYER_STEP + self._words) & _MASK).to(torch.int32)


def _value(state: int) -> int:
    return (state ^ (state >> 31)) & _MASK


def attention_metadata(
    compute: TokenCompute,
    scheduled: Mapping[str, int],
    starts: Mapping[str, int],
    tables: Mapping[str, Sequence[Sequence[int]]],
) -> object:
    """What a layer-wise connector reads of a step: slots, block tables and lengths.

    Args:
        compute: Knows the slots.
        scheduled: Tokens that the step computes, by request.
        starts: Tokens whose KV exists before it.
        tables: Blocks, of one group.
    """
    from types import SimpleNamespace

    ends = {name: starts[name] + number for name, number in scheduled.items()}
    slots = [compute.slots_of(tables[name][0], starts[name], end) for name, end in ends.items()]
    width = max(len(tables[name][0]) for name in scheduled)
    rows = [[*tables[name][0], *[0] * (width - len(tables[name][0]))] for name in scheduled]
    block_table = torch.tensor(rows, dtype=torch.int32)
    counts = torch.tensor([0, *scheduled.values()], dtype=torch.int32)
    return SimpleNamespace(
        slot_mapping=torch.cat(slots),
        block_table=block_table,
        block_table_tensor=block_table,
        seq_lens=torch.tensor(list(ends.values()), dtype=torch.int32),
        query_start_loc=counts.cumsum(0).to(torch.int32),
        num_actual_tokens=sum(scheduled.values()),
        max_seq_len=max(ends.values()),
        max_query_len=max(scheduled.values()),
        num_reqs=len(scheduled),
        causal=True,
    )
