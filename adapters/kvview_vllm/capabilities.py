"""What differs between vLLM releases: one table, probed on the objects themselves.

1. A flag **must** be probed on the shape of the object at hand: signatures and
   attributes. A fork or a build whose version string lies is then still served.
2. A version **may** be compared only where the meaning changed under an
   unchanged shape. No flag of the pool seam needs that.
3. A shape that no tested release has **must** be refused when binding, with
   nothing bound. A release outside the tested range whose shapes are all known
   is served, with one logged warning.
4. No other module of this package **may** name a release.

Source: ``vllm/v1/core/block_pool.py`` and ``vllm/v1/core/kv_cache_utils.py`` of
every release of :data:`OLDEST_TESTED` to :data:`NEWEST_TESTED`.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kvview import KVViewError, UnsupportedEngineError

OLDEST_TESTED = "0.11.0"
NEWEST_TESTED = "0.33.0"

POOL_SEAM = "pool"

logger = logging.getLogger(__name__)


class VLLMNotInstalledError(KVViewError, ImportError):
    """Something that needs vLLM was used, and no vLLM can be imported."""


@dataclass(frozen=True)
class Capability:
    """One difference between releases.

    Args:
        name: The flag.
        seam: Which vLLM surface it belongs to.
        what: What a release with the flag does, and what one without does.
        first_release: First release that has it.
        last_release: Last release that has it, None when the newest tested has.
        source: The upstream pull request, or the path where it shows.
        probe: Whether an object of that seam has it.
    """

    name: str
    seam: str
    what: str
    first_release: str
    last_release: str | None
    source: str
    probe: Callable[[Any], bool]


def engine_version() -> str:
    """The version string of the installed vLLM.

    Raises:
        VLLMNotInstalledError: There is none.
    """
    try:
        vllm = import_module("vllm")
    except ImportError as error:
        raise VLLMNotInstalledError(
            f"kvview_vllm wraps an installed vLLM ({OLDEST_TESTED} - {NEWEST_TESTED}), and "
            f"importing it failed: {error}. Install vLLM, or use kvview_reference, which "
            f"keeps the same contract without it"
        ) from error
    return str(getattr(vllm, "__version__", "of unknown version"))


def is_tested(version: str) -> bool:
    """Whether a version string names a minor release of the tested range."""
    minor = _minor(version)
    return minor is not None and (
        (_minor(OLDEST_TESTED) or minor) <= minor <= (_minor(NEWEST_TESTED) or minor)
    )


def refusal(seam: str, found: str, expected: str) -> UnsupportedEngineError:
    """The error for a shape that no tested release has.

    Args:
        seam: Which vLLM surface.
        found: The shape that was found.
        expected: The shapes that tested releases have.
    """
    return UnsupportedEngineError(
        f"the {seam} seam of vLLM {engine_version()} has an unknown shape, nothing was bound: "
        f"found {found}; expected {expected}. Tested: vLLM {OLDEST_TESTED} - {NEWEST_TESTED}. "
        f"Run a tested release or upgrade kvview; if the newest kvview refuses too, report "
        f"this message, and the patches if your vLLM is a fork"
    )


def _minor(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


# --- the pool seam: vllm.v1.core.block_pool.BlockPool ---

_POOL_ATTRIBUTES = {
    "BlockPool": ("blocks", "null_block", "free_block_queue", "get_num_free_blocks"),
    "FreeKVCacheBlockQueue": ("fake_free_list_head", "fake_free_list_tail"),
    "KVCacheBlock": ("block_id", "block_hash", "prev_free_block", "next_free_block"),
}
_POOL_SIGNATURES: dict[str, tuple[str, ...]] = {
    "touch": ("(blocks)",),
    "free_blocks": ("(ordered_blocks)", "(ordered_blocks, prepend=False)"),
    "get_cached_block": ("(block_hash, kv_cache_group_ids)",),
}


def probe_pool(block_pool: Any) -> frozenset[str]:
    """Recognise a block pool, once, when a view is made of it.

    1. Nothing of the pool changes: the only calls are touches of no block at all.
    2. A shape that no tested release has is refused.

    Args:
        block_pool: What should be a ``vllm.v1.core.block_pool.BlockPool``.

    Returns:
        The names of its capabilities.

    Raises:
        UnsupportedEngineError: The shape is unknown.
        VLLMNotInstalledError: No vLLM can be imported.
    """
    version = engine_version()
    _check_pool_attributes(block_pool)
    for method, expected in _POOL_SIGNATURES.items():
        if (found := _signature(block_pool, method)) not in expected:
            wanted = " or ".join(method + signature for signature in expected)
            raise refusal(POOL_SEAM, f"BlockPool.{method}{found}", wanted)
    if not _takes(block_pool.touch, []):
        raise refusal(POOL_SEAM, "BlockPool.touch([]) raises", "that touching no block is allowed")
    if not is_tested(version):
        logger.warning(
            "vLLM %s is outside the tested range %s - %s; its block pool has a known shape, so "
            "it is used",
            *(version, OLDEST_TESTED, NEWEST_TESTED),
        )
    return frozenset(
        capability.name
        for capability in CAPABILITIES
        if capability.seam == POOL_SEAM and capability.probe(block_pool)
    )


def _check_pool_attributes(pool: Any) -> None:
    missing = [name for name in _POOL_ATTRIBUTES["BlockPool"] if not hasattr(pool, name)]
    if missing:
        raise refusal(
            POOL_SEAM,
            f"{type(pool).__module__}.{type(pool).__qualname__} without {', '.join(missing)}",
            f"a BlockPool with {', '.join(_POOL_ATTRIBUTES['BlockPool'])}",
        )
    for name, instance in (
        ("FreeKVCacheBlockQueue", pool.free_block_queue),
        ("KVCacheBlock", pool.null_block),
    ):
        missing = [
            attribute for attribute in _POOL_ATTRIBUTES[name] if not hasattr(instance, attribute)
        ]
        if missing:
            raise refusal(
                POOL_SEAM,
                f"{name} without {', '.join(missing)}",
                f"{name} with {', '.join(_POOL_ATTRIBUTES[name])}",
            )
    blocks = pool.blocks
    if type(blocks) is not list or blocks[0] is not pool.null_block:
        raise refusal(
            POOL_SEAM, "BlockPool.blocks of another order", "a list with the null block first"
        )
    if pool.null_block.block_id != 0 or blocks[-1].block_id != len(blocks) - 1:
        raise refusal(POOL_SEAM, "block ids that are no list positions", "blocks[i].block_id == i")


def _signature(owner: Any, method: str) -> str:
    """The names and defaults of a method's parameters, as "(a, b=1)"."""
    try:
        parameters = inspect.signature(getattr(owner, method)).parameters.values()
    except (AttributeError, TypeError, ValueError) as error:
        return f" (unreadable: {error})"
    return f"({', '.join(str(p.replace(annotation=p.empty)) for p in parameters)})"


def _takes(touch: Callable[[Any], object], blocks: object) -> bool:
    """Whether ``touch`` takes a group of blocks in which there is no block."""
    try:
        touch(blocks)
    except (AttributeError, TypeError):
        return False
    return True


CAPABILITIES: tuple[Capability, ...] = (
    Capability(
        name="touch_nested",
        seam=POOL_SEAM,
        what="touch takes a tuple of lists, one per KV-cache group; later a flat sequence",
        first_release="0.11.0",
        last_release="0.13.0",
        source="vllm/v1/core/block_pool.py",
        # The flat form looks for the reference count of the inner list, and fails.
        probe=lambda pool: _takes(pool.touch, ([],)),
    ),
    Capability(
        name="free_prepend",
        seam=POOL_SEAM,
        what="free_blocks(prepend=True) puts blocks to the front of the free queue",
        first_release="0.23.0",
        last_release="0.23.0",
        source="vllm/v1/core/block_pool.py",
        probe=lambda pool: "prepend" in _signature(pool, "free_blocks"),
    ),
    Capability(
        name="unhashed_first",
        seam=POOL_SEAM,
        what="freed blocks without a hash go to the front of the free queue; before, to the tail",
        first_release="0.24.0",
        last_release=None,
        source="vllm-project/vllm PR #42656",
        probe=lambda pool: (
            hasattr(pool.free_block_queue, "prepend_n")
            and "prepend" not in _signature(pool, "free_blocks")
        ),
    ),
    Capability(
        name="several_hashes",
        seam=POOL_SEAM,
        what="a block may have hashes beside its primary one",
        first_release="0.24.0",
        last_release=None,
        source="vllm-project/vllm PR #45939",
        probe=lambda pool: hasattr(pool, "cached_block_hashes_by_block"),
    ),
    Capability(
        name="block_pool_link",
        seam=POOL_SEAM,
        what="a block names its pool, and free_blocks hands foreign blocks on to theirs",
        first_release="0.30.0",
        last_release=None,
        source="vllm/v1/core/kv_cache_utils.py",
        probe=lambda pool: getattr(pool.null_block, "pool", None) is pool,
    ),
    Capability(
        name="reuse_watchers",
        seam=POOL_SEAM,
        what="unpin_blocks frees blocks and says when they are handed out again",
        first_release="0.30.0",
        last_release=None,
        source="vllm/v1/core/block_pool.py",
        probe=lambda pool: hasattr(pool, "unpin_blocks"),
    ),
)
"""Every flag, of every seam; the docs' table and ``kvview doctor`` print it."""
