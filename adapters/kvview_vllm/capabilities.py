"""What differs between vLLM releases: one table, probed on the objects themselves.

1. A flag **must** be probed on the shape of the object at hand: signatures and
   attributes. A fork or a build whose version string lies is then still served.
2. A version **may** be compared only where the meaning changed under an
   unchanged shape. No flag of any seam needs that.
3. A shape that no tested release has **must** be refused when binding, with
   nothing bound. A release outside the tested range whose shapes are all known
   is served, with one logged warning.
4. No other module of this package **may** name a release.

Source: ``vllm/v1/core/block_pool.py``, ``vllm/v1/core/kv_cache_utils.py`` and
``vllm/v1/kv_offload/`` of every release of :data:`OLDEST_TESTED` to
:data:`NEWEST_TESTED`.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kvview import KVViewError, UnsupportedEngineError

OLDEST_TESTED = "0.11.0"
NEWEST_TESTED = "0.33.0"

POOL_SEAM = "pool"
OFFLOADING_SEAM = "offloading"

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


def _check_signatures(seam: str, owner: Any, known: Mapping[str, tuple[str, ...]]) -> None:
    for method, expected in known.items():
        if (found := _signature(owner, method)) not in expected:
            wanted = " or ".join(method + signature for signature in expected)
            raise refusal(seam, f"{type(owner).__name__}.{method}{found}", wanted)


def _flags(seam: str, owner: Any) -> frozenset[str]:
    """The flags that an object of a known shape has; says when its release is not tested."""
    version = engine_version()
    if not is_tested(version):
        logger.warning(
            "vLLM %s is outside the tested range %s - %s; its %s seam has a known shape, so "
            "it is used",
            *(version, OLDEST_TESTED, NEWEST_TESTED, seam),
        )
    return frozenset(
        capability.name
        for capability in CAPABILITIES
        if capability.seam == seam and capability.probe(owner)
    )


def _signature(owner: Any, method: str) -> str:
    """The names and defaults of a method's parameters, as "(a, b=1)"."""
    try:
        parameters = inspect.signature(getattr(owner, method)).parameters.values()
    except (AttributeError, TypeError, ValueError) as error:
        return f" (unreadable: {error})"
    return f"({', '.join(str(p.replace(annotation=p.empty)) for p in parameters)})"


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
    engine_version()
    _check_pool_attributes(block_pool)
    _check_signatures(POOL_SEAM, block_pool, _POOL_SIGNATURES)
    if not _takes(block_pool.touch, []):
        raise refusal(POOL_SEAM, "BlockPool.touch([]) raises", "that touching no block is allowed")
    return _flags(POOL_SEAM, block_pool)


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


def _takes(touch: Callable[[Any], object], blocks: object) -> bool:
    """Whether ``touch`` takes a group of blocks in which there is no block."""
    try:
        touch(blocks)
    except (AttributeError, TypeError):
        return False
    return True


# --- the offloading seam: vllm.v1.kv_offload's managers ---

_ONE_ARGUMENT = ("(block_hashes)", "(keys)", "(keys, req_context)")
_OFFLOADING_SIGNATURES: dict[str, tuple[str, ...]] = {
    "lookup": ("(block_hashes)", "(key, req_context)"),
    "prepare_load": ("(block_hashes)", "(keys, req_context)"),
    "prepare_store": ("(block_hashes)", "(keys, req_context)"),
    "touch": _ONE_ARGUMENT,
    "complete_load": _ONE_ARGUMENT,
    "complete_store": (
        *("(block_hashes, success=True)", "(keys, success=True)"),
        "(keys, req_context, success=True)",
    ),
    "take_events": ("()",),
}
_OFFLOADING_HOOKS: dict[str, tuple[str, ...]] = {
    "on_new_request": ("(req_context)",),
    "on_request_finished": ("(req_context)",),
    "on_schedule_end": ("()", "(context)"),
    "has_pending_work": ("()",),
    "reset_cache": ("()",),
    "shutdown": ("()",),
}


def probe_offloading(manager: Any) -> frozenset[str]:
    """Recognise an offloading manager, once, when it is wrapped; nothing is called.

    Args:
        manager: What should be a manager of ``vllm.v1.kv_offload``.

    Returns:
        The names of its capabilities.

    Raises:
        UnsupportedEngineError: The shape is unknown.
        VLLMNotInstalledError: No vLLM can be imported.
    """
    engine_version()
    present = {
        name: _OFFLOADING_HOOKS[name] for name in _OFFLOADING_HOOKS if hasattr(manager, name)
    }
    _check_signatures(OFFLOADING_SEAM, manager, _OFFLOADING_SIGNATURES | present)
    return _flags(OFFLOADING_SEAM, manager)


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
    Capability(
        name="prefix_lookup",
        seam=OFFLOADING_SEAM,
        what="lookup takes a prefix and counts its hits; later one key and a context",
        first_release="0.11.0",
        last_release="0.19.1",
        source="vllm/v1/kv_offload/abstract.py",
        probe=lambda manager: _signature(manager, "lookup") == "(block_hashes)",
    ),
    Capability(
        name="page_backend",
        seam=OFFLOADING_SEAM,
        what="a manager is one policy over a backend of pages; later it has its pages itself",
        first_release="0.11.0",
        last_release="0.18.1",
        source="vllm/v1/kv_offload/backend.py",
        probe=lambda manager: hasattr(manager, "backend"),
    ),
    Capability(
        name="completion_context",
        seam=OFFLOADING_SEAM,
        what="touch and the completions take the request's context too",
        first_release="0.21.0",
        last_release=None,
        source="vllm/v1/kv_offload/base.py",
        probe=lambda manager: _signature(manager, "touch") == "(keys, req_context)",
    ),
    Capability(
        name="cache_reset",
        seam=OFFLOADING_SEAM,
        what="reset_cache forgets every key, those in flight too",
        first_release="0.22.0",
        last_release=None,
        source="vllm/v1/kv_offload/base.py",
        probe=lambda manager: hasattr(manager, "reset_cache"),
    ),
    Capability(
        name="request_hooks",
        seam=OFFLOADING_SEAM,
        what="the manager hears of new and finished requests and of the end of a step",
        first_release="0.23.0",
        last_release=None,
        source="vllm/v1/kv_offload/base.py",
        probe=lambda manager: hasattr(manager, "on_new_request"),
    ),
    Capability(
        name="step_context",
        seam=OFFLOADING_SEAM,
        what="on_schedule_end takes what was scheduled",
        first_release="0.25.0",
        last_release=None,
        source="vllm/v1/kv_offload/base.py",
        probe=lambda manager: _signature(manager, "on_schedule_end") == "(context)",
    ),
    Capability(
        name="lookup_results",
        seam=OFFLOADING_SEAM,
        what="lookup tells a key that is being stored from a miss; before, a bool or None",
        first_release="0.25.0",
        last_release=None,
        source="vllm/v1/kv_offload/base.py",
        probe=lambda manager: (
            "LookupResult" in str(inspect.signature(manager.lookup).return_annotation)
        ),
    ),
)
"""Every flag, of every seam; the docs' table and ``kvview doctor`` print it."""
