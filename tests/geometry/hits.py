"""Drawn geometries, and the comparison of their hits with the model (GEO-1, GEO-3, GEO-4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

from kvview import CacheGroup, ChunkedLocalAttention, FullAttention, Mamba, SlidingWindow
from tests.geometry.model import GeometryModel

KINDS: dict[str, Callable[[int, int], CacheGroup]] = {
    "full": lambda block_size, span: FullAttention(block_size),
    "window": SlidingWindow,
    "chunked": ChunkedLocalAttention,
    "mamba": lambda block_size, span: Mamba(block_size),
}
MOST_TOKENS = 60
MOST_CACHED = 64

Sizes = tuple[int, int, tuple[CacheGroup, ...]]
"""``scheduler_block_size``, ``hash_block_size`` and groups."""


@st.composite
def groups(draw: st.DrawFn, hash_block_size: int = 1) -> CacheGroup:
    block_size = hash_block_size * draw(st.integers(1, 4))
    span = draw(st.integers(1, 20) | st.sampled_from((block_size, 2 * block_size)))
    return KINDS[draw(st.sampled_from(sorted(KINDS)))](block_size, span)


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    hash_block_size = draw(st.integers(1, 3))
    mix = draw(st.lists(groups(hash_block_size), min_size=1, max_size=4))
    common = math.lcm(*(group.block_size for group in mix))
    return common * draw(st.integers(1, 2)), hash_block_size, tuple(mix)


def compare_hits(cache: Any, model: GeometryModel, data: st.DataObject) -> None:
    """Cache blocks of requests that share prefixes, and compare each hit with the model."""
    num_tokens = min(MOST_TOKENS, 5 * model.step)
    requests = draw_requests(data, num_tokens // model.hash_block_size)
    for _ in range(data.draw(st.integers(1, 3))):
        hashes = data.draw(st.sampled_from(requests))
        for group, block in draw_blocks(data, model, num_tokens):
            key = model.key(hashes, group, block)
            if key not in model.cached and len(model.cached) < MOST_CACHED:
                block_id = cache.cache(hashes, group, block)
                if model.is_on:
                    model.cached[key] = block_id
        ends = range(0, num_tokens + 1, model.step)
        limits = {*ends[-3:], num_tokens, data.draw(st.integers(0, num_tokens))}
        for hashes in requests:
            for limit in limits:
                compare_hit(cache, model, hashes, limit)


def draw_requests(data: st.DataObject, num_hashes: int) -> list[list[bytes]]:
    """Draw the block hashes of requests, each with a prefix of an earlier one."""
    requests: list[list[bytes]] = []
    for name in (b"a", b"b", b"c"):
        like = data.draw(st.sampled_from(requests)) if requests else []
        shared = data.draw(st.integers(0, len(like)))
        requests.append(like[:shared] + [b"%s%d" % (name, n) for n in range(shared, num_hashes)])
    return requests


def draw_blocks(
    data: st.DataObject, model: GeometryModel, num_tokens: int
) -> Iterator[tuple[int, int]]:
    """Draw blocks of a request: exactly those that a prefix needs, or all, each but a few."""
    prefixes = range(model.step, num_tokens + 1, model.step)
    if prefixes and data.draw(st.booleans()):
        blocks = model.needed(data.draw(st.sampled_from(prefixes)))
    else:
        sized = [(n, num_tokens // group.block_size) for n, group in enumerate(model.groups)]
        blocks = [(number, block) for number, count in sized for block in range(count)]
    missing = data.draw(st.sets(st.integers(0, len(blocks)), max_size=3))
    yield from (one for number, one in enumerate(blocks) if number not in missing)


def compare_hit(cache: Any, model: GeometryModel, hashes: list[bytes], limit: int) -> None:
    tables, num_tokens = cache.manager.find_longest_cache_hit(hashes, limit)
    expected = model.longest_hit(hashes, limit)
    name = f"the hit of at most {limit} tokens is {num_tokens} tokens"
    assert num_tokens % model.step == 0, f"GEO-1: {name}, not a multiple of {model.step}"
    law = "GEO-4" if len(model.groups) > 1 or not model.is_on else "GEO-3"
    assert num_tokens == expected, f"{law}: {name}, not {expected}"
    found, needed = [list(table) for table in tables], model.tables(hashes, expected)
    assert found == needed, f"GEO-3: {name} in the blocks {found}, not {needed}"
