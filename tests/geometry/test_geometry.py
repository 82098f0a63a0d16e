"""The geometry laws GEO-1 to GEO-4, against attention masks written down independently."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvview import (
    BlockHash,
    CacheGeometry,
    CacheGroup,
    ChunkedLocalAttention,
    FullAttention,
    GeometryError,
    Mamba,
    SlidingWindow,
    make_offload_key,
)

KINDS: dict[str, Callable[[int, int], CacheGroup]] = {
    "full": lambda block_size, span: FullAttention(block_size),
    "window": SlidingWindow,
    "chunked": ChunkedLocalAttention,
    "mamba": lambda block_size, span: Mamba(block_size),
}


def reads(group: CacheGroup, token: int) -> list[int]:
    """Positions before ``token`` whose KV (or state) the token reads: the mask, row by row."""
    before = range(token)
    if isinstance(group, SlidingWindow):
        return [p for p in before if token - p < group.sliding_window]
    if isinstance(group, ChunkedLocalAttention):
        chunk = group.attention_chunk_size
        return [p for p in before if p // chunk == token // chunk]
    if isinstance(group, Mamba):
        return [p for p in before if p == token - 1]
    return list(before)


def needed_blocks(group: CacheGroup, num_tokens: int) -> list[int]:
    return sorted({p // group.block_size for p in reads(group, num_tokens)})


def is_hit(group: CacheGroup, num_tokens: int, cached: set[int]) -> bool:
    return set(needed_blocks(group, num_tokens)) <= cached


@st.composite
def groups(draw: st.DrawFn, hash_block_size: int = 1) -> CacheGroup:
    block_size = hash_block_size * draw(st.integers(1, 4))
    return KINDS[draw(st.sampled_from(sorted(KINDS)))](block_size, draw(st.integers(1, 20)))


@st.composite
def geometries(draw: st.DrawFn) -> CacheGeometry:
    hash_block_size = draw(st.integers(1, 3))
    mix = draw(st.lists(groups(hash_block_size), min_size=1, max_size=4))
    scheduler = math.lcm(*(group.block_size for group in mix)) * draw(st.integers(1, 2))
    return CacheGeometry(scheduler, hash_block_size, tuple(mix))


# --- GEO-1 ---


def test_geo1_scheduler_block_size_is_taken_as_given() -> None:
    geometry = CacheGeometry(48, 4, (FullAttention(8), Mamba(12)))
    assert geometry.scheduler_block_size == 48  # not lcm(8, 12) == 24
    every_block = geometry.longest_prefix(100, lambda group, block: True)
    assert every_block == 96


def test_geo1_geometry_cannot_change() -> None:
    with pytest.raises(FrozenInstanceError):
        CacheGeometry.single(4).scheduler_block_size = 8  # type: ignore[misc]


def test_groups_given_as_a_list_become_a_tuple() -> None:
    geometry = CacheGeometry(4, 4, [FullAttention(4)])  # type: ignore[arg-type]
    assert geometry.groups == (FullAttention(4),)
    assert hash(geometry) == hash(CacheGeometry.single(4))


# --- GEO-2 ---


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            (8, 4, (FullAttention(6),)),
            "the block size of group 0 (6) must be a multiple of hash_block_size (4); 6 % 4 == 2",
        ),
        (
            (16, 4, (FullAttention(16), Mamba(12))),
            "scheduler_block_size (16) must be a multiple of the block size of group 1 (12); "
            "16 % 12 == 4",
        ),
        (
            (3, 4, (FullAttention(4),)),
            "scheduler_block_size (3) must be a multiple of the block size of group 0 (4); "
            "3 % 4 == 3",
        ),
        ((4, 4, ()), "groups is empty: a cache needs at least one KV-cache group"),
        ((0, 4, (Mamba(4),)), "scheduler_block_size must be a positive int (tokens), got 0"),
        ((4.0, 4, (Mamba(4),)), "scheduler_block_size must be a positive int (tokens), got 4.0"),
        ((4, -4, (Mamba(4),)), "hash_block_size must be a positive int (tokens), got -4"),
        ((4, True, (Mamba(4),)), "hash_block_size must be a positive int (tokens), got True"),
    ],
)
def test_geo2_error_names_the_numbers(
    sizes: tuple[int, int, tuple[CacheGroup, ...]], message: str
) -> None:
    with pytest.raises(GeometryError) as caught:
        CacheGeometry(*sizes)
    assert str(caught.value) == f"GEO-2: {message}"
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "4", None])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_geo2_group_sizes_are_positive_ints(kind: str, size: int) -> None:
    with pytest.raises(
        GeometryError, match=r"^GEO-2: block_size must be a positive int \(tokens\), got "
    ):
        KINDS[kind](size, 1)


@pytest.mark.parametrize("span", [0, -1, False])
@pytest.mark.parametrize(
    ("kind", "field"), [("window", "sliding_window"), ("chunked", "attention_chunk_size")]
)
def test_geo2_spans_are_positive_ints(kind: str, field: str, span: int) -> None:
    with pytest.raises(GeometryError, match=rf"^GEO-2: {field} must be a positive int .*{span}\b"):
        KINDS[kind](4, span)


@given(st.integers(1, 60), st.integers(1, 12), st.lists(st.integers(1, 30), max_size=4))
def test_geo2_accepts_exactly_the_sizes_that_divide(
    scheduler: int, hash_size: int, sizes: list[int]
) -> None:
    fits = bool(sizes) and all(scheduler % size == 0 == size % hash_size for size in sizes)
    mix = tuple(FullAttention(size) for size in sizes)
    if fits:
        geometry = CacheGeometry(scheduler, hash_size, mix)
        assert geometry.scheduler_block_size % geometry.hash_block_size == 0
    else:
        with pytest.raises(GeometryError):
            CacheGeometry(scheduler, hash_size, mix)


# --- GEO-3 ---


@given(groups(), st.integers(0, 80))
def test_geo3_skipped_tokens_are_those_never_read(group: CacheGroup, num_tokens: int) -> None:
    read = reads(group, num_tokens)
    assert group.num_skipped_tokens(num_tokens) == (read[0] if read else num_tokens)


@given(groups(), st.integers(0, 60))
def test_geo3_what_is_skipped_once_is_never_read_again(group: CacheGroup, num_tokens: int) -> None:
    for later in range(num_tokens, num_tokens + 25):
        assert min(reads(group, later), default=later) >= group.num_skipped_tokens(num_tokens)


@given(groups(), st.integers(0, 30))
def test_geo3_required_blocks_are_those_that_are_read(group: CacheGroup, num_blocks: int) -> None:
    num_tokens = num_blocks * group.block_size
    assert list(group.required_blocks(num_tokens)) == needed_blocks(group, num_tokens)


def test_geo3_the_four_kinds_by_hand() -> None:
    assert FullAttention(4).required_blocks(16) == range(4)
    assert SlidingWindow(4, 4).required_blocks(16) == range(3, 4)  # reads 13, 14, 15
    assert SlidingWindow(4, 6).required_blocks(16) == range(2, 4)  # reads 11 to 15
    assert ChunkedLocalAttention(4, 12).required_blocks(16) == range(3, 4)
    assert list(ChunkedLocalAttention(4, 8).required_blocks(16)) == []  # a new chunk begins
    assert Mamba(4).required_blocks(16) == range(3, 4)
    assert list(SlidingWindow(4, 1).required_blocks(16)) == []  # reads itself only


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_geo3_an_empty_prefix_needs_nothing(kind: str) -> None:
    group = KINDS[kind](4, 6)
    assert group.num_skipped_tokens(0) == 0
    assert list(group.required_blocks(0)) == []


# --- GEO-3 and GEO-4: the longest prefix ---


@settings(max_examples=300)
@given(groups(), st.integers(-2, 60), st.integers(1, 3), st.sets(st.integers(0, 60)), st.booleans())
def test_geo3_longest_prefix_of_one_group(
    group: CacheGroup, max_tokens: int, multiple: int, some: set[int], invert: bool
) -> None:
    cached = set(range(60)) - some if invert else some
    alignment = group.block_size * multiple
    asked: Counter[int] = Counter()

    def is_cached(block: int) -> bool:
        asked[block] += 1
        return block in cached

    candidates = [n for n in range(0, max_tokens + 1, alignment) if is_hit(group, n, cached)]
    assert group.longest_prefix(max_tokens, is_cached, alignment) == max(candidates, default=0)
    assert set(asked) <= set(range(max(0, max_tokens) // group.block_size))
    assert max(asked.values(), default=0) <= 1


@settings(max_examples=300)
@given(st.data(), geometries(), st.integers(0, 70))
def test_geo4_longest_prefix_of_all_groups(
    data: st.DataObject, geometry: CacheGeometry, max_tokens: int
) -> None:
    cached = [
        set(range(70))
        - data.draw(st.sets(st.integers(0, 69), max_size=6), label=f"missing {index}")
        for index in range(len(geometry.groups))
    ]
    expected = max(
        n
        for n in range(0, max_tokens + 1, geometry.scheduler_block_size)
        if all(is_hit(g, n, c) for g, c in zip(geometry.groups, cached, strict=True))
    )
    asked: Counter[tuple[int, int]] = Counter()

    def is_cached(group: int, block: int) -> bool:
        asked[group, block] += 1
        return block in cached[group]

    assert geometry.longest_prefix(max_tokens, is_cached) == expected
    assert max(asked.values(), default=0) <= 1


@settings(max_examples=300)
@given(st.data(), geometries(), st.integers(-2, 70))
def test_longest_prefixes_are_those_of_each_group_alone(
    data: st.DataObject, geometry: CacheGeometry, max_tokens: int
) -> None:
    cached = [
        data.draw(st.sets(st.integers(0, 69)), label=f"cached {index}")
        if data.draw(st.booleans())
        else set(range(70)) - data.draw(st.sets(st.integers(0, 69), max_size=6))
        for index in range(len(geometry.groups))
    ]
    expected = tuple(
        max(
            (n for n in range(0, max_tokens + 1, g.block_size) if is_hit(g, n, c)),
            default=0,
        )
        for g, c in zip(geometry.groups, cached, strict=True)
    )

    def is_cached(group: int, block: int) -> bool:
        return block in cached[group]

    found = geometry.longest_prefixes(max_tokens, is_cached)
    assert found == expected
    assert geometry.longest_prefix(max_tokens, is_cached) <= min(found)


def test_longest_prefixes_may_all_be_longer_than_what_they_share() -> None:
    geometry = CacheGeometry(8, 4, (Mamba(8), FullAttention(4)))
    cached = ({0, 3}, {0, 1, 2, 3, 4})
    assert geometry.longest_prefixes(35, lambda group, block: block in cached[group]) == (32, 20)
    assert geometry.longest_prefix(35, lambda group, block: block in cached[group]) == 8


def test_geo4_groups_correct_each_other_to_a_fixed_point() -> None:
    """Full allows 24; the window then allows 16 only; Mamba, at 16, allows 8; all agree on 8."""
    geometry = CacheGeometry(8, 8, (Mamba(8), SlidingWindow(8, 8), FullAttention(8)))
    cached = ({0, 2, 3}, {0, 1}, {0, 1, 2})
    assert geometry.longest_prefix(32, lambda group, block: block in cached[group]) == 8


def test_longest_prefix_asks_once_a_block_of_a_window() -> None:
    asked: list[int] = []
    group = SlidingWindow(1, 1000)
    # Block 2000 is missing: it spoils a thousand prefixes, and none of them is walked again.

    def is_cached(block: int) -> bool:
        asked.append(block)
        return block != 2000

    assert group.longest_prefix(2500, is_cached, 1) == 2000
    assert len(asked) == len(set(asked)) <= 1500


# --- names of blocks ---


@given(geometries(), st.integers(0, 20))
def test_block_hash_index_is_the_hash_at_the_end_of_the_block(
    geometry: CacheGeometry, block: int
) -> None:
    for index, group in enumerate(geometry.groups):
        end = (block + 1) * group.block_size
        hash_ends = [(i + 1) * geometry.hash_block_size for i in range(end)]
        assert hash_ends[geometry.block_hash_index(index, block)] == end


def test_single_is_one_full_attention_group() -> None:
    assert CacheGeometry.single(16) == CacheGeometry(16, 16, (FullAttention(16),))


@given(geometries(), st.integers(0, 20), st.integers(0, 60))
def test_block_key_names_a_block_when_its_last_token_is_hashed(
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
