"""A canary for the pool, which uses a view of a small new pool once.

The other canaries are in ``connector/`` and ``offloading/``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from kvview import SupportsReuseNotice
from kvview_vllm.releases import PoolSeam, expect, reading
from kvview_vllm.releases.calls import make_block_pool

_SEAM = PoolSeam.seam


@cache
def check_pool(make_view: Callable[..., object]) -> None:
    """Touch, free, walk and watch blocks, once per process.

    Args:
        make_view: Called with a pool of the installed vLLM.

    Raises:
        UnsupportedEngineError: A result differs from the result of the tested releases.
    """
    with reading(_SEAM, "a pool, used dry"):
        pool = make_block_pool(8)
        bound: Any = make_view(pool)
        num_free = bound.num_free_blocks()
        bound.touch_blocks([1, 2, 1])
        expect(_SEAM, "free blocks while two are held", bound.num_free_blocks(), num_free - 2)
        bound.free_blocks([1, 2, 1])
        expect(_SEAM, "free blocks after all were released", bound.num_free_blocks(), num_free)
        free = sorted(bound.iter_free_block_ids())
        expect(_SEAM, "blocks in the free queue", free, list(range(1, 8)))
        expect(_SEAM, "keys of a new block", bound.block_keys([1]), [()])
        queue = list(bound.iter_free_block_ids())
        taken = pool.get_new_blocks(3)
        expect(_SEAM, "the next victims", [block.block_id for block in taken], queue[:3])
        pool.free_blocks(taken)
        bound.touch_blocks([3])
        watched: object = bound
        if isinstance(watched, SupportsReuseNotice):
            reused: list[int] = []
            watched.free_blocks_with_notice([3], reused.append)
            pool.get_new_blocks(7)
            expect(_SEAM, "blocks that were allocated again", reused, [3])
        bound.close()
