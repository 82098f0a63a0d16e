"""Block tables of the coordinators: what cannot be meant so changes nothing (TABLE-1, TABLE-2)."""

from __future__ import annotations

import pytest

from kvview import (
    CacheGeometry,
    FullAttention,
    Mamba,
    SlidingWindow,
)
from kvview_reference.geometry.kv_cache_manager import KVCacheManager
from tests.geometry.test_coordinator import make_hashes, make_manager, run_prompt

Tokens = tuple[int, ...]
Key = bytes
NULL = 0


# --- TABLE-1 and TABLE-2: what cannot be meant so changes nothing ---

HYBRID = CacheGeometry(8, 4, (FullAttention(4), SlidingWindow(8, 9), Mamba(8)))


def state(manager: KVCacheManager) -> object:
    pool = manager.pool
    blocks = range(pool.num_blocks)
    return (
        list(pool.iter_free_block_ids()),
        [pool.ref_cnt(block) for block in blocks],
        pool.block_keys(list(blocks)),
        [manager.block_ids(name) for name in ("r", "other")],
    )


@pytest.mark.parametrize("fewer", [1, 8, 55, 56, 70, 71])
@pytest.mark.parametrize("geometry", [CacheGeometry.single(16), HYBRID])
def test_asking_for_less_room_keeps_what_is_there(geometry: CacheGeometry, fewer: int) -> None:
    manager = make_manager(geometry, 60)
    assert manager.allocate_slots("r", 71)
    before = state(manager)
    assert manager.allocate_slots("r", fewer)
    assert state(manager) == before
    assert manager.allocate_slots("r", 90)
    manager.free("r")
    assert manager.pool.num_free_blocks() == 59


def test_asking_for_less_room_is_granted_when_nothing_is_free() -> None:
    manager = make_manager(CacheGeometry.single(16), 6)
    assert manager.allocate_slots("r", 80)
    assert manager.allocate_slots("r", 56)
    assert not manager.allocate_slots("r", 81)


@pytest.mark.parametrize("num_tokens", [0, -1, -71])
@pytest.mark.parametrize("name", ["r", "other"])
def test_room_for_no_tokens_is_refused(name: str, num_tokens: int) -> None:
    manager = make_manager(HYBRID, 60)
    assert manager.allocate_slots("r", 71)
    before = state(manager)
    with pytest.raises(ValueError, match=f"^TABLE-1: request '{name}' .* room for {num_tokens} "):
        manager.allocate_slots(name, num_tokens)
    assert state(manager) == before


def test_room_for_less_than_is_computed_is_refused() -> None:
    manager = make_manager(CacheGeometry.single(4), 20)
    run_prompt(manager, "a", (1,) * 17)
    hits, num_hit = manager.find_computed_blocks(make_hashes((1,) * 17, 4), 17)
    before = state(manager)
    for num_tokens, num_computed in ((num_hit - 1, num_hit), (4, 8), (4, -4)):
        with pytest.raises(ValueError, match=r"^TABLE-1: "):
            manager.allocate_slots(
                "r", num_tokens, hit_blocks=hits, num_computed_tokens=num_computed
            )
    assert state(manager) == before


def test_hits_come_with_the_first_room_only() -> None:
    manager = make_manager(CacheGeometry.single(4), 20)
    run_prompt(manager, "a", (1,) * 17)
    hits, num_hit = manager.find_computed_blocks(make_hashes((1,) * 17, 4), 17)
    assert manager.allocate_slots("r", 8)
    before = state(manager)
    with pytest.raises(ValueError, match=r"^TABLE-2: request 'r' has block tables already"):
        manager.allocate_slots("r", 17, hit_blocks=hits, num_computed_tokens=num_hit)
    with pytest.raises(ValueError, match=r"^TABLE-2: "):
        manager.allocate_slots("r", 17, num_computed_tokens=4)
    assert state(manager) == before


@pytest.mark.parametrize("enable_caching", [True, False])
def test_what_has_no_room_cannot_be_cached(enable_caching: bool) -> None:
    manager = make_manager(HYBRID, 60, enable_caching=enable_caching)
    hashes = make_hashes(tuple(range(90)), 4)
    assert manager.allocate_slots("r", 30)
    before = state(manager)
    for name, num_tokens in (("other", 8), ("other", 0), ("r", 40)):
        with pytest.raises(ValueError, match=f"^TABLE-2: request '{name}' has . blocks in group"):
            manager.cache_blocks(name, hashes, num_tokens)
        assert state(manager) == before


def test_what_has_no_hash_cannot_be_cached() -> None:
    manager = make_manager(HYBRID, 60)
    assert manager.allocate_slots("r", 30)
    before = state(manager)
    with pytest.raises(ValueError, match=r"^TABLE-2: request 'r' has 4 block hashes, 24 .* need 6"):
        manager.cache_blocks("r", make_hashes(tuple(range(16)), 4), 24)
    assert state(manager) == before
    manager.cache_blocks("r", make_hashes(tuple(range(16)), 4), 19)


def test_free_may_come_twice_and_for_nobody() -> None:
    manager = make_manager(HYBRID, 60)
    assert manager.allocate_slots("r", 71)
    for name in ("other", "r", "r"):
        manager.free(name)
    assert manager.pool.num_free_blocks() == 59
    assert manager.allocate_slots("r", 71)  # a second life
