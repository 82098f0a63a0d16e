"""Geometries: hits of a manager, errors, the prefix search, keys of blocks."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import FrozenInstanceError
from functools import partial

import pytest
from hypothesis import given, settings, strategies as st

from kvview import (
    BlockHash,
    CacheGeometry,
    FullAttention,
    GeometryError,
    make_offload_key,
)
from tests.geometry.hits import KINDS, Sizes, compare_hits, sizes
from tests.geometry.model import GeometryModel, blocks_read, misfits
from tests.geometry.prefix_cache import PrefixCache


def as_geometry(given_sizes: Sizes) -> CacheGeometry:
    return CacheGeometry(*given_sizes)


# --- a manager ---


@settings(max_examples=200, deadline=None)
@given(sizes(), st.data(), st.sampled_from((True, True, True, False)))
def test_hits(given_sizes: Sizes, data: st.DataObject, is_on: bool) -> None:
    cache = PrefixCache(*given_sizes, is_on=is_on)
    model = GeometryModel(*given_sizes, cache.null_block_id, is_on=is_on)
    compare_hits(cache, model, data)


@given(st.integers(-1, 16), st.integers(-1, 8), st.lists(st.integers(1, 16)))
def test_geo_2_exactly_sizes_that_do_not_divide_are_refused(
    scheduler_block_size: int, hash_block_size: int, block_sizes: list[int]
) -> None:
    found = misfits(scheduler_block_size, hash_block_size, block_sizes)
    groups = [FullAttention(size) for size in block_sizes]
    if not found:
        PrefixCache(scheduler_block_size, hash_block_size, groups)
        return
    with pytest.raises(GeometryError, match=r"^GEO-2: ") as caught:
        PrefixCache(scheduler_block_size, hash_block_size, groups)
    named = set(map(int, re.findall(r"-?\d+", str(caught.value))))
    assert any(sizes <= named for sizes in found), f"GEO-2: {caught.value} names one of {found}"


# --- GEO-1 ---


def test_geo_1_a_geometry_cannot_change() -> None:
    with pytest.raises(FrozenInstanceError):
        CacheGeometry.single(4).scheduler_block_size = 8  # type: ignore[misc]


def test_groups_given_as_a_list_become_a_tuple() -> None:
    geometry = CacheGeometry(4, 4, [FullAttention(4)])  # type: ignore[arg-type]
    assert geometry.groups == (FullAttention(4),)
    assert hash(geometry) == hash(CacheGeometry.single(4))


# --- GEO-2 ---


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "4", None])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_geo_2_sizes_of_a_group_are_positive_ints(kind: str, size: int) -> None:
    expected = r"^GEO-2: (\w+) must be a positive int \(tokens\), got "
    with pytest.raises(GeometryError, match=expected):
        KINDS[kind](size, 1)
    if kind in ("window", "chunked"):
        with pytest.raises(GeometryError, match=expected):
            KINDS[kind](4, size)


# --- the search without a manager ---


@settings(max_examples=300)
@given(st.data(), sizes().map(as_geometry), st.integers(-2, 70))
def test_longest_prefixes(data: st.DataObject, geometry: CacheGeometry, max_tokens: int) -> None:
    some = [data.draw(st.sets(st.integers(0, 69), max_size=9)) for _ in geometry.groups]
    is_missing = data.draw(st.booleans())
    looked_up: Counter[tuple[int, int]] = Counter()

    def is_cached(group: int, block: int) -> bool:
        looked_up[group, block] += 1
        return (block in some[group]) != is_missing

    def is_hit(index: int, num_tokens: int) -> bool:
        blocks = blocks_read(geometry.groups[index], num_tokens)
        return all((block in some[index]) != is_missing for block in blocks)

    indices = range(len(geometry.groups))
    shared = geometry.longest_prefix(max_tokens, is_cached)
    assert max(looked_up.values(), default=0) <= 1
    ends = range(0, max_tokens + 1, geometry.scheduler_block_size)
    hits = [end for end in ends if all(is_hit(index, end) for index in indices)]
    assert shared == max(hits, default=0)
    for index, group in enumerate(geometry.groups):
        found = group.longest_prefix(max_tokens, partial(is_cached, index), group.block_size)
        ends = range(0, max_tokens + 1, group.block_size)
        assert found == max((end for end in ends if is_hit(index, end)), default=0)


# --- keys of blocks ---


@given(sizes().map(as_geometry), st.integers(0, 20), st.integers(0, 60))
def test_a_block_has_a_key_once_its_last_token_is_hashed(
    geometry: CacheGeometry, block: int, num_hashes: int
) -> None:
    size = geometry.hash_block_size
    hashes = [BlockHash(b"covers %d tokens" % ((i + 1) * size)) for i in range(num_hashes)]
    for index, group in enumerate(geometry.groups):
        end = (block + 1) * group.block_size
        expected = None
        if end <= num_hashes * size:
            expected = make_offload_key(b"covers %d tokens" % end, index)
        assert geometry.block_key(hashes, index, block) == expected
