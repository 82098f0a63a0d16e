"""A pool of ten blocks, nine of them free under a key each."""

from __future__ import annotations

import pytest

from kvview_reference.pool import BlockPool


@pytest.fixture
def pool() -> BlockPool:
    pool = BlockPool(10)
    block_ids = pool.allocate_blocks(9)
    pool.cache_blocks(block_ids, [f"h{i}".encode() for i in block_ids], block_size=16)
    pool.free_blocks(block_ids)
    return pool
