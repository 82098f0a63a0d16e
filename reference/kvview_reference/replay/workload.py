"""A seeded workload that resembles a real trace, for users without a trace.

The workload consists of conversations that grow turn by turn over one shared system prompt, with
heavy-tailed lengths and Poisson arrivals. The quantiles below are the rounded quantiles of the
Mooncake conversation trace. With the defaults an infinite cache hits about 35 % of the blocks of
12,000 requests.

Source: kvcache-ai/Mooncake, ``FAST25-release/traces/conversation_trace.jsonl``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from kvview.errors import ConfigError
from kvview_reference.traces.trace import TraceRequest

REQUESTS_PER_SECOND = 3.4
SYSTEM_PROMPT_TOKENS = 600
MAX_PROMPT_TOKENS = 126_000

_FOLLOW_UP_SHARE = 0.34
"""Share of requests that continue a conversation."""
_MAX_CONVERSATIONS = 700
"""Open conversations, so that half of the next turns follow within about 450 requests."""

_Quantiles = Mapping[float, int]
"""Lengths, by the share of requests that are shorter."""
_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_PROMPTS = (890, 900, 1_300, 5_300, 13_000, 25_000, 34_000, 78_000, MAX_PROMPT_TOKENS)
_FIRST_PROMPT: _Quantiles = dict(zip(_SHARES, _PROMPTS, strict=True))
_USER_MESSAGE: _Quantiles = {0.0: 10, 0.5: 250, 0.75: 2_500, 0.9: 7_500, 0.99: 22_000, 1.0: 60_000}
_OUTPUT: _Quantiles = {0: 1, 0.1: 24, 0.25: 156, 0.5: 350, 0.75: 470, 0.9: 600, 0.99: 1120, 1: 2000}


@dataclass(slots=True)
class _Conversation:
    hash_ids: list[int]
    num_prompt_tokens: int
    num_output_tokens: int
    last: str | None = None  # request id of the latest turn


def _draw(random: Random, quantiles: _Quantiles) -> int:
    """Draw a length, by linear interpolation between quantiles."""
    share = random.random()
    (low_share, low), (high_share, high) = next(
        (lower, upper) for lower, upper in pairwise(quantiles.items()) if share < upper[0]
    )
    return low + int((high - low) * (share - low_share) / (high_share - low_share))


def _draw_exponential(random: Random) -> float:
    """Draw from the exponential distribution with mean 1, by von Neumann's method of comparisons.

    Results of ``math.log`` may differ in the last bit between platforms, but comparisons do not.
    """
    whole = 0
    while True:
        first = last = random.random()
        length = 1
        while (following := random.random()) < last:
            last = following
            length += 1
        if length % 2:
            return whole + first
        whole += 1


def generate_trace(
    *, num_requests: int = 12_000, seed: int = 0, block_size: int = 512
) -> Iterator[TraceRequest]:
    """Generate requests; equal arguments give equal requests on every platform.

    Args:
        num_requests: Number of requests.
        seed: Seed of the workload, a whole number from 0.
        block_size: Number of tokens per hash id; prompts and arrivals do not depend on it.

    Returns:
        Requests in the order of arrival, one at a time, so memory does not grow with their number.

    Raises:
        ConfigError: An argument is not a whole number or too small.
    """
    for name, value, least in (
        ("num_requests", num_requests, 0),
        ("seed", seed, 0),
        ("block_size", block_size, 1),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{name} must be an int of at least {least}, got {value!r}")
    return _generate(num_requests, Random(seed), block_size)


def _generate(num_requests: int, random: Random, block_size: int) -> Iterator[TraceRequest]:
    system_ids = range(SYSTEM_PROMPT_TOKENS // block_size)
    next_id = len(system_ids)
    conversations: list[_Conversation] = []
    arrival_ms = 0
    for line in range(1, num_requests + 1):
        arrival_ms += round(_draw_exponential(random) * 1000 / REQUESTS_PER_SECOND)
        # Only random.random() is promised to give the same numbers in every Python.
        slot = int(random.random() * len(conversations))
        if conversations and random.random() < _FOLLOW_UP_SHARE:
            current = conversations[slot]
            # The partial last block of a prompt gets new content, so a new id.
            del current.hash_ids[current.num_prompt_tokens // block_size :]
            current.num_prompt_tokens += current.num_output_tokens + _draw(random, _USER_MESSAGE)
        else:
            current = _Conversation(list(system_ids), _draw(random, _FIRST_PROMPT), 0)
            if len(conversations) < _MAX_CONVERSATIONS:
                slot = len(conversations)
                conversations.append(current)
            else:
                conversations[slot] = current
        current.num_prompt_tokens = min(current.num_prompt_tokens, MAX_PROMPT_TOKENS)
        current.num_output_tokens = _draw(random, _OUTPUT)
        num_new = -(-current.num_prompt_tokens // block_size) - len(current.hash_ids)
        current.hash_ids.extend(range(next_id, next_id + num_new))
        next_id += num_new
        yield TraceRequest(
            request_id=str(line),
            arrival_s=arrival_ms / 1000,
            num_prompt_tokens=current.num_prompt_tokens,
            num_output_tokens=current.num_output_tokens,
            hash_ids=tuple(current.hash_ids),
            line=line,
            continues=current.last,
        )
        current.last = str(line)
        if current.num_prompt_tokens == MAX_PROMPT_TOKENS:
            conversations[slot] = conversations[-1]
            conversations.pop()
