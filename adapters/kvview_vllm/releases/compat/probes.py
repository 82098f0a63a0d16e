"""Recognition of vLLM objects by their shapes, which are checked once and determine the seam.

1. A shape that no tested release has **must** be refused before anything is bound.
2. A release after the tested range **must** be refused too, because its known shapes may have
   another meaning. ``KVVIEW_ALLOW_UNTESTED_VLLM=1`` turns the refusal into a warning; for a version
   string that names no known release, only the warning is logged.
3. Probing **must** change nothing.

Source: every release of the tested range; :mod:`.seams` lists the differences.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from kvview import make_offload_key
from kvview_vllm.releases.compat.seams import (
    BindingSeam,
    ConnectorSeam,
    GeometrySeam,
    PoolSeam,
    takes,
)
from kvview_vllm.releases.compat.shapes import (
    check_shapes,
    expect,
    is_in_every_release,
    known_signatures,
    reading,
    signature_of,
)
from kvview_vllm.releases.compat.versions import engine_version, importing, refusal, vllm

_UTILS = "v1.core.kv_cache_utils"
_BASE = "distributed.kv_transfer.kv_connector.v1.base"


@dataclass(frozen=True)
class Release:
    """The installed vLLM, of which each seam is probed at its first use.

    For an existing pool, :func:`probe_pool` also finds differences that the classes do not show.

    Args:
        version: Its version string.
    """

    version: str

    @cached_property
    @importing()
    def binding(self) -> BindingSeam:
        """The way in which connectors are bound."""
        check_shapes(BindingSeam.seam)
        return BindingSeam.found_on(vllm(_BASE).KVConnectorBase_V1)

    @cached_property
    @importing()
    def geometry(self) -> GeometrySeam:
        """The way in which block sizes are configured."""
        check_shapes(GeometrySeam.seam)
        return GeometrySeam.found_on(vllm("v1.kv_cache_interface"))

    @cached_property
    @importing()
    def connector(self) -> ConnectorSeam:
        """The messages between scheduler, connector and workers."""
        check_shapes(ConnectorSeam.seam)
        return ConnectorSeam.found_on(vllm(_BASE).KVConnectorBase_V1)


def installed() -> Release:
    """Return the installed vLLM, the same object for all calls in a process.

    Raises:
        VLLMNotInstalledError: vLLM cannot be imported.
    """
    return _release(engine_version())


_release = cache(Release)


def _check_signatures(seam: str, owner: Any, table_owner: str) -> None:
    """Compare an object's methods with those that the table lists for the class."""
    kind = owner if isinstance(owner, type) else type(owner)
    for method, expected in known_signatures(table_owner).items():
        if not hasattr(owner, method) and not is_in_every_release(table_owner, method):
            continue
        if (found := signature_of(owner, method)) not in expected:
            wanted = " or ".join(method + signature for signature in sorted(expected))
            raise refusal(seam, f"{kind.__name__}.{method}{found}", wanted)


def check_keys(seam: str, make_key: Callable[[Any, int], Any]) -> None:
    """Check that the key of a hash in a KV-cache group has the same bytes as kvview's."""
    block_hash = b"%032d" % 1
    with reading(seam, "the key of a block"):
        expect(
            seam, "bytes of a key", bytes(make_key(block_hash, 1)), make_offload_key(block_hash, 1)
        )


# --- the pool seam: vllm.v1.core.block_pool.BlockPool ---

_POOL_ATTRIBUTES = {
    "BlockPool": ("blocks", "num_gpu_blocks", "null_block", "free_block_queue"),
    "FreeKVCacheBlockQueue": ("fake_free_list_head", "fake_free_list_tail", "num_free_blocks"),
    "KVCacheBlock": ("block_id", "block_hash", "prev_free_block", "next_free_block"),
}


def probe_pool(block_pool: Any) -> PoolSeam:
    """Recognise a block pool, once, when a view is made for it.

    1. The pool does not change, because the only calls are touches of an empty list of blocks.
    2. A shape that no tested release has is refused.

    Args:
        block_pool: The pool, which should be a ``vllm.v1.core.block_pool.BlockPool``.

    Returns:
        The differences found on the pool.

    Raises:
        UnsupportedEngineError: The shape is unknown.
        VLLMNotInstalledError: vLLM cannot be imported.
    """
    seam = PoolSeam.seam
    check_shapes(seam)
    check_keys(seam, vllm(_UTILS).make_block_hash_with_group_id)
    _check_attributes(block_pool, "BlockPool")
    _check_attributes(block_pool.free_block_queue, "FreeKVCacheBlockQueue")
    _check_attributes(block_pool.null_block, "KVCacheBlock")
    blocks = block_pool.blocks
    if type(blocks) is not list or blocks[0] is not block_pool.null_block:
        raise refusal(seam, "BlockPool.blocks in another order", "a list with the null block first")
    if blocks[0].block_id != 0 or blocks[-1].block_id != len(blocks) - 1:
        raise refusal(seam, "block ids that are not list positions", "blocks[i].block_id == i")
    _check_signatures(seam, block_pool, "vllm.v1.core.block_pool:BlockPool")
    if not takes(block_pool.touch, []):
        raise refusal(seam, "BlockPool.touch([]) raises", "BlockPool.touch to accept an empty list")
    return PoolSeam.found_on(block_pool)


def _check_attributes(owner: Any, name: str) -> None:
    wanted = _POOL_ATTRIBUTES[name]
    if missing := [attribute for attribute in wanted if not hasattr(owner, attribute)]:
        kind = type(owner)
        if name == "BlockPool" != kind.__name__:  # because any object may be passed as a pool
            name = f"{kind.__module__}.{kind.__qualname__}"
        raise refusal(
            PoolSeam.seam,
            f"{name} without {', '.join(missing)}",
            f"{name} with {', '.join(wanted)}",
        )


# --- the binding seam: vllm.v1.core.sched.scheduler.Scheduler ---


def check_scheduler() -> None:
    """Check that vLLM's ``Scheduler`` has the attributes that the binding of a pool reads.

    Raises:
        UnsupportedEngineError: An attribute is missing.
    """
    code = inspect.unwrap(vllm("v1.core.sched.scheduler").Scheduler.__init__).__code__
    wanted = ("connector", "kv_cache_manager")
    if missing := [name for name in wanted if name not in code.co_names]:
        raise refusal(
            BindingSeam.seam,
            f"a Scheduler without {', '.join(missing)}",
            f"a Scheduler with {' and '.join(wanted)}",
        )
