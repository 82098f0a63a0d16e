"""The laws of the geometry contract, one small scenario each."""

from __future__ import annotations

import re
from itertools import combinations, permutations, product

from kvview.geometry import (
    CacheGroup,
    ChunkedLocalAttention,
    FullAttention,
    Mamba,
    SlidingWindow,
)
from kvview.testing.checks import check
from kvview.testing.geometry.driver import GeometryDriver, geometry_check
from kvview.testing.harness import Capability, Factory

WINDOW, CHUNK, MAMBA = Capability.SLIDING_WINDOW, Capability.CHUNKED_LOCAL, Capability.MAMBA
HYBRID = Capability.HYBRID


def _check_each_subset(factory: Factory, law: str, *groups: CacheGroup, num_tokens: int) -> None:
    """Whichever blocks of a request are cached, every limit finds the longest hit."""
    sizes = [group.block_size for group in groups]
    subsets = [_subsets(range(num_tokens // size)) for size in sizes]
    for chosen in product(*subsets):
        cache = GeometryDriver(factory, law).start(max(sizes), min(sizes), *groups)
        request = cache.request("a", num_tokens)
        for index, blocks in enumerate(chosen):
            cache.cache(request, index, blocks)
        cache.check_hits(request, num_tokens)


def _subsets(blocks: range) -> list[tuple[int, ...]]:
    return [chosen for size in range(len(blocks) + 1) for chosen in combinations(blocks, size)]


def _other_kinds(cache: GeometryDriver, block_size: int, span: int) -> list[CacheGroup]:
    """A group of each kind that the harness takes beside full attention."""
    kinds: dict[Capability, CacheGroup] = {
        WINDOW: SlidingWindow(block_size, span),
        CHUNK: ChunkedLocalAttention(block_size, span),
        MAMBA: Mamba(block_size),
    }
    return [group for capability, group in kinds.items() if cache.can(capability)]


# --- GEO-1: scheduler_block_size is given ---


@geometry_check("GEO-1")
def check_geo_1_hit_of_one_group_is_a_multiple_of_the_size_given(cache: GeometryDriver) -> None:
    """Not of the group's block size, when ``scheduler_block_size`` is larger."""
    for group in (FullAttention(4), *_other_kinds(cache, 4, 8)):
        for scheduler_block_size in (4, 8, 12):
            cache.start(scheduler_block_size, 4, group)
            request = cache.request("a", 44)
            cache.cache(request, 0, range(11))
            cache.check_hits(request, 44)


@geometry_check("GEO-1", HYBRID)
def check_geo_1_size_given_is_not_computed_again(cache: GeometryDriver) -> None:
    """48 is given for blocks of 8 and 12 tokens: their least common multiple is no hit."""
    cache.start(48, 4, FullAttention(8), FullAttention(12))
    request = cache.request("a", 120)
    cache.cache(request, 0, range(15))
    cache.cache(request, 1, range(10))
    for max_tokens in (24, 47, 48, 72, 95, 96, 120):
        cache.check_hit(request, max_tokens)


@geometry_check("GEO-1", HYBRID)
def check_geo_1_every_group_is_looked_up_at_the_size_given(cache: GeometryDriver) -> None:
    """Beside full attention, a hit that ends between multiples is none."""
    for group in _other_kinds(cache, 4, 5):
        cache.start(16, 4, FullAttention(4), group)
        request = cache.request("a", 40)
        cache.cache(request, 0, range(10))
        cache.cache(request, 1, [2, 3, 4, 5, 6])  # 16 and 28 end in cached blocks
        cache.check_hits(request, 40)


# --- GEO-2: sizes divide ---


@geometry_check("GEO-2")
def check_geo_2_sizes_that_do_not_divide_are_refused(cache: GeometryDriver) -> None:
    """Each kind of misfit is a GeometryError that names the two numbers."""
    for sizes, numbers in (
        ((12, 4, FullAttention(6)), (6, 4)),
        ((48, 16, FullAttention(24)), (24, 16)),
        ((10, 4, FullAttention(4)), (10, 4)),
        ((18, 3, FullAttention(12)), (18, 12)),
        ((8, 4, FullAttention(16)), (8, 16)),
    ):
        _check_names(cache, cache.refuse(*sizes), numbers)


@geometry_check("GEO-2", HYBRID)
def check_geo_2_every_group_must_fit(cache: GeometryDriver) -> None:
    """One group that does not divide is refused, wherever it stands and of whatever kind."""
    for wrong in (FullAttention(12), *_other_kinds(cache, 12, 24)):
        for groups in permutations((FullAttention(16), FullAttention(4), wrong)):
            _check_names(cache, cache.refuse(16, 4, *groups), (16, 12))
            _check_names(cache, cache.refuse(48, 8, FullAttention(16), wrong), (12, 8))


@geometry_check("GEO-2")
def check_geo_2_sizes_are_positive(cache: GeometryDriver) -> None:
    """Zero and negative sizes are a GeometryError that names them."""
    for size in (0, -4):
        _check_names(cache, cache.refuse(size, 4, FullAttention(4)), (size,))
        _check_names(cache, cache.refuse(4, size, FullAttention(4)), (size,))


@geometry_check("GEO-2")
def check_geo_2_sizes_that_divide_are_taken(cache: GeometryDriver) -> None:
    """Hashes smaller than blocks, and blocks smaller than the scheduler's."""
    for hash_size, blocks, multiple in product((1, 3, 4), (1, 2, 3), (1, 2)):
        block_size = hash_size * blocks
        cache.start(block_size * multiple, hash_size, FullAttention(block_size))
        request = cache.request("a", 60)
        cache.cache(request, 0, range(48 // block_size))
        cache.check_hit(request, 60)


@geometry_check("GEO-2", HYBRID)
def check_geo_2_blocks_need_not_divide_each_other(cache: GeometryDriver) -> None:
    """Blocks of 8 and 12 tokens fit under 24, in either order."""
    for groups in permutations((FullAttention(8), FullAttention(12))):
        cache.start(24, 4, *groups)
        request = cache.request("a", 56)
        for index, group in enumerate(groups):
            cache.cache(request, index, range(56 // group.block_size))
        cache.check_hits(request, 56)


def _check_names(cache: GeometryDriver, error: Exception, numbers: tuple[int, ...]) -> None:
    named = re.findall(r"-?\d+", str(error))
    for number in map(str, numbers):
        cache.true(number in named, f"the message names {number}", str(error), number)


# --- GEO-3: what a prefix needs ---


@check("GEO-3", contract="geometry")
def check_geo_3_full_attention_needs_every_block(factory: Factory) -> None:
    """A hit ends before the first block that is missing, whatever is cached behind it."""
    _check_each_subset(factory, "GEO-3", FullAttention(2), num_tokens=10)


@check("GEO-3", WINDOW, contract="geometry")
def check_geo_3_sliding_window_needs_the_blocks_of_its_window(factory: Factory) -> None:
    """The ``sliding_window - 1`` tokens before: no block less, and no block more."""
    for window in (2, 3, 4, 5, 6, 20):
        _check_each_subset(factory, "GEO-3", SlidingWindow(2, window), num_tokens=10)


@geometry_check("GEO-3", WINDOW)
def check_geo_3_sliding_window_of_one_token_needs_no_block(cache: GeometryDriver) -> None:
    """A token that reads itself only finds everything before it computed."""
    cache.start(2, 2, SlidingWindow(2, 1))
    cache.check_hits(cache.request("a", 10), 10)


@check("GEO-3", CHUNK, contract="geometry")
def check_geo_3_chunked_attention_needs_the_blocks_of_its_chunk(factory: Factory) -> None:
    """What lies in the chunk of the next token, and nothing at the start of a chunk."""
    for chunk in (2, 4, 6, 20):
        _check_each_subset(factory, "GEO-3", ChunkedLocalAttention(2, chunk), num_tokens=10)


@check("GEO-3", CHUNK, contract="geometry")
def check_geo_3_chunk_may_begin_inside_a_block(factory: Factory) -> None:
    """The block that a chunk begins in is read too, when the chunk has begun."""
    for chunk in (1, 3, 5):
        _check_each_subset(factory, "GEO-3", ChunkedLocalAttention(2, chunk), num_tokens=10)


@check("GEO-3", MAMBA, contract="geometry")
def check_geo_3_mamba_needs_the_last_block_only(factory: Factory) -> None:
    """One cached state is a hit, whatever is missing before it."""
    _check_each_subset(factory, "GEO-3", Mamba(2), num_tokens=10)


@geometry_check("GEO-3")
def check_geo_3_table_names_what_is_read_and_null_before(cache: GeometryDriver) -> None:
    """All is cached: blocks that the next token does not read are the null block still."""
    for group in (FullAttention(4), *_other_kinds(cache, 4, 8)):
        cache.start(4, 4, group)
        request = cache.request("a", 32)
        cache.cache(request, 0, range(8))
        cache.check_hits(request, 32)


@geometry_check("GEO-3")
def check_geo_3_hit_is_of_the_same_prefix(cache: GeometryDriver) -> None:
    """A request hits what it shares with another one, and nothing behind the difference."""
    for group in (FullAttention(4), *_other_kinds(cache, 4, 8)):
        cache.start(4, 4, group)
        first = cache.request("a", 32)
        cache.cache(first, 0, range(8))
        second = cache.request("b", 32, first, 3)
        cache.check_hits(second, 32)
        cache.cache(second, 0, range(4, 8))
        cache.check_hits(second, 32)
        cache.check_hits(first, 32)


@geometry_check("GEO-3", HYBRID)
def check_geo_3_groups_do_not_share_blocks(cache: GeometryDriver) -> None:
    """A block that is cached in one group is missing in the other."""
    cache.start(4, 4, FullAttention(4), FullAttention(4))
    request = cache.request("a", 16)
    cache.cache(request, 0, range(4))
    cache.check_hit(request, 16)
    cache.cache(request, 1, range(2))
    cache.check_hit(request, 16)


# --- GEO-4: what all groups share ---


@check("GEO-4", HYBRID, contract="geometry")
def check_geo_4_hit_is_shared_by_groups_of_one_kind(factory: Factory) -> None:
    """Two full-attention groups of different block sizes: the shorter prefix, aligned."""
    for groups in permutations((FullAttention(2), FullAttention(4))):
        _check_each_subset(factory, "GEO-4", *groups, num_tokens=8)


@check("GEO-4", HYBRID, contract="geometry")
def check_geo_4_full_attention_beside_each_other_kind(factory: Factory) -> None:
    """The longest prefix that both have, whichever blocks are cached."""
    for other in _other_kinds(GeometryDriver(factory, "GEO-4"), 4, 8):
        _check_each_subset(factory, "GEO-4", other, FullAttention(2), num_tokens=12)


@check("GEO-4", HYBRID, contract="geometry")
def check_geo_4_kinds_with_holes_beside_each_other(factory: Factory) -> None:
    """Two groups that both skip blocks may share a hit far below the hit of either."""
    kinds = _other_kinds(GeometryDriver(factory, "GEO-4"), 2, 2)
    for groups in product(kinds, repeat=2):
        _check_each_subset(factory, "GEO-4", *groups, num_tokens=8)


@geometry_check("GEO-4", HYBRID, WINDOW, MAMBA)
def check_geo_4_groups_correct_each_other_until_all_agree(cache: GeometryDriver) -> None:
    """Full allows 24; there the window allows 16; there Mamba allows 8; there all agree."""
    cached = {Mamba(8): (0, 2, 3), SlidingWindow(8, 8): (0, 1), FullAttention(8): (0, 1, 2)}
    for groups in permutations(cached):
        cache.start(8, 8, *groups)
        request = cache.request("a", 32)
        for index, group in enumerate(groups):
            cache.cache(request, index, cached[group])
        cache.check_hits(request, 32)


@geometry_check("GEO-4", HYBRID)
def check_geo_4_every_table_ends_with_the_hit(cache: GeometryDriver) -> None:
    """A group with a longer hit of its own names no block behind the shared one."""
    for other in (FullAttention(8), *_other_kinds(cache, 8, 16)):
        for groups in permutations((FullAttention(4), other)):
            cache.start(8, 4, *groups)
            request = cache.request("a", 40)
            for index, group in enumerate(groups):
                num_tokens = 40 if group is not other else 16
                cache.cache(request, index, range(num_tokens // group.block_size))
            cache.check_hits(request, 40)


@geometry_check("GEO-4", Capability.CACHING_OFF)
def check_geo_4_nothing_is_a_hit_with_the_prefix_cache_off(cache: GeometryDriver) -> None:
    """Whatever was computed: no tokens, and an empty table a group."""
    shapes: list[tuple[CacheGroup, ...]] = [(FullAttention(4),)]
    if cache.can(HYBRID):
        shapes.append((FullAttention(4), FullAttention(8)))
    for groups in shapes:
        cache.start(8, 4, *groups)
        cache.use(cache.call(cache.harness, "without_caching"), "coordinator")
        request = cache.request("a", 16)
        for index, group in enumerate(groups):
            for block in range(16 // group.block_size):
                cache.call(cache.harness, "cache", request, index, block)
        for max_tokens in (0, 8, 16):
            found = cache.call(cache.subject, "find_longest_cache_hit", request, max_tokens)
            tables, num_tokens = found
            told = [list(table) for table in tables], num_tokens
            cache.derive()
            cache.equal(told, ([[] for _ in groups], 0), "nothing is a hit without a cache")


@check("GEO-*", contract="geometry")
def check_geo_any_mix_of_groups(factory: Factory) -> None:
    """Random groups, requests and cached blocks, each hit compared with an oracle."""
    from kvview.testing.geometry.machine import run_geometry_machine  # hypothesis is slow

    run_geometry_machine(factory)
