"""The block pool as the wrapped connector sees it, with its touches and frees noted.

A connector of kvview gets the pool itself, because its own guard checks these calls. Calls of vLLM
do not pass through this module.

Source: ``BlockPool``, vllm/v1/core/block_pool.py; ``KVCacheManager.block_pool``, 0.19.0 to 0.33.0.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from kvview_vllm.canary.call_laws import CallLaws


def watched_pool(pool: Any, laws: CallLaws) -> Any:
    """Return an object that shares all attributes with a pool, and notes the calls on itself."""
    kind = type(pool)

    class WatchedPool(kind):  # type: ignore[misc,valid-type]
        def touch(self, blocks: Any, *args: Any, **kwargs: Any) -> Any:
            blocks = list(blocks)
            answer = kind.touch(self, blocks, *args, **kwargs)
            laws.hold(_ids(blocks), _caller())
            return answer

        def get_new_blocks(self, *args: Any, **kwargs: Any) -> Any:
            blocks = kind.get_new_blocks(self, *args, **kwargs)
            laws.hold(_ids(blocks), _caller())
            return blocks

        def free_blocks(self, ordered_blocks: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
            blocks = list(ordered_blocks)
            laws.release(_ids(blocks), _caller())
            return kind.free_blocks(self, blocks, *args, **kwargs)

    return _sharing(pool, WatchedPool)


def watched_manager(manager: Any, pool: Any) -> Any:
    """Return an object that shares all attributes with a cache manager, except its pool."""
    kind = type(manager)
    return _sharing(manager, type(kind.__name__, (kind,), {"block_pool": property(lambda _: pool)}))


def _sharing(original: Any, kind: type) -> Any:
    view: Any = object.__new__(kind)
    view.__dict__ = original.__dict__
    return view


def _ids(blocks: Iterable[Any]) -> Iterator[int]:
    for block in blocks:  # up to 0.13 a list for each group
        yield from (one.block_id for one in (block if isinstance(block, list | tuple) else [block]))


def _caller() -> str:
    frame = sys._getframe(2)
    return f"{frame.f_code.co_name}, at {frame.f_code.co_filename}:{frame.f_lineno}"
