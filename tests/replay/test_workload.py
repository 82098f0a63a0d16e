"""The generated workload: deterministic, and in the shape of the real trace."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from typing import Any

import pytest

from kvview.errors import ConfigError
from kvview_reference.replay.workload import generate_trace
from kvview_reference.traces.trace import TraceRequest
from tests.replay.trace_rows import to_lines
from tests.traces import mooncake_row


def digest(requests: Iterable[TraceRequest]) -> str:
    state = hashlib.sha256()
    for request in requests:
        state.update(to_lines([mooncake_row(request)]).rstrip())
    return state.hexdigest()[:16]


def test_the_workload_is_the_same_on_every_platform() -> None:
    assert digest(generate_trace(num_requests=1_000, seed=0)) == "2b2f76acca7ef151"
    assert digest(generate_trace(num_requests=1_000, seed=1)) != "2b2f76acca7ef151"


@pytest.mark.parametrize("block_size", [1, 16, 500, 512, 10**9])
def test_block_sizes(block_size: int) -> None:
    requests = list(generate_trace(num_requests=200, block_size=block_size))
    for request, other in zip(requests, generate_trace(num_requests=200), strict=True):
        assert request.num_prompt_tokens == other.num_prompt_tokens
        assert request.arrival_s == other.arrival_s
        assert len(request.hash_ids) == -(-request.num_prompt_tokens // block_size)
        assert len(set(request.hash_ids)) == len(request.hash_ids)


def test_equal_ids_have_equal_prefixes() -> None:
    before: dict[int, int] = {}
    for request in generate_trace(num_requests=3_000):
        for previous, hash_id in itertools.pairwise((-1, *request.hash_ids)):
            assert before.setdefault(hash_id, previous) == previous


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"num_requests": -1}, "num_requests must be an int of at least 0, got -1"),
        ({"num_requests": True}, "got True"),
        ({"seed": -1}, "seed must be"),
        ({"seed": "1"}, "got '1'"),
        ({"block_size": 0}, "block_size must be an int of at least 1, got 0"),
        ({"block_size": 1.5}, "got 1.5"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        generate_trace(**arguments)
