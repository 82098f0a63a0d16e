"""What differs between vLLM releases: one table, probed on the objects themselves.

1. A flag **must** be probed on the shape of the object at hand: signatures and
   attributes. A fork or a build whose version string lies is then still served.
2. A version **may** be compared only where the meaning changed under an
   unchanged shape. No flag of any seam needs that.
3. No other module of this package **may** decide by a release.

:mod:`kvview_vllm.releases.probes` reads the flags and refuses what it does not know.

Source: ``vllm/v1/core/``, ``vllm/v1/kv_offload/`` and
``vllm/distributed/kv_transfer/kv_connector/v1/base.py`` of every release of
:data:`OLDEST_TESTED` to :data:`NEWEST_TESTED`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kvview import KVViewError, UnsupportedEngineError

OLDEST_TESTED = "0.11.0"
NEWEST_TESTED = "0.33.0"

POOL_SEAM = "pool"
OFFLOADING_SEAM = "offloading"
CONNECTOR_SEAM = "connector"


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


def is_newer(version: str) -> bool:
    """Whether a version string names a release after the tested range."""
    return (_minor(version) or (0, 0)) > (_minor(NEWEST_TESTED) or (0, 0))


def refusal(seam: str, found: str, expected: str) -> UnsupportedEngineError:
    """The error for a shape that no tested release has.

    Args:
        seam: Which vLLM surface.
        found: The shape that was found.
        expected: The shapes that tested releases have.
    """
    return UnsupportedEngineError(
        f"the {seam} seam of vLLM {engine_version()} is not known, nothing was bound: "
        f"found {found}; expected {expected}. Tested: vLLM {OLDEST_TESTED} - {NEWEST_TESTED}. "
        f"Run a tested release or upgrade kvview; if the newest kvview refuses too, report "
        f"this message, and the patches if your vLLM is a fork"
    )


def _minor(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def signature_of(owner: Any, method: str) -> str:
    """The names and defaults of a method's parameters, as "(a, b=1)"."""
    try:
        parameters = inspect.signature(getattr(owner, method)).parameters.values()
    except (AttributeError, TypeError, ValueError) as error:
        return f" (unreadable: {error})"
    return f"({', '.join(str(p.replace(annotation=p.empty)) for p in parameters)})"


def takes(touch: Callable[[Any], object], blocks: object) -> bool:
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
        probe=lambda pool: takes(pool.touch, ([],)),
    ),
    Capability(
        name="free_prepend",
        seam=POOL_SEAM,
        what="free_blocks(prepend=True) puts blocks to the front of the free queue",
        first_release="0.23.0",
        last_release="0.23.0",
        source="vllm/v1/core/block_pool.py",
        probe=lambda pool: "prepend" in signature_of(pool, "free_blocks"),
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
            and "prepend" not in signature_of(pool, "free_blocks")
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
        probe=lambda manager: signature_of(manager, "lookup") == "(block_hashes)",
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
        probe=lambda manager: signature_of(manager, "touch") == "(keys, req_context)",
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
        probe=lambda manager: signature_of(manager, "on_schedule_end") == "(context)",
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
    Capability(
        name="cache_config_argument",
        seam=CONNECTOR_SEAM,
        what="the constructor of a connector takes the KVCacheConfig",
        first_release="0.11.1",
        last_release=None,
        source="vllm/distributed/kv_transfer/kv_connector/v1/base.py",
        probe=lambda surface: "kv_cache_config" in signature_of(surface.base, "__init__"),
    ),
    Capability(
        name="several_groups",
        seam=CONNECTOR_SEAM,
        what="a connector may serve several KV-cache groups (SupportsHMA)",
        first_release="0.11.1",
        last_release=None,
        source="vllm/distributed/kv_transfer/kv_connector/v1/base.py",
        probe=lambda surface: hasattr(surface.base_module, "SupportsHMA"),
    ),
    Capability(
        name="failed_blocks",
        seam=CONNECTOR_SEAM,
        what="a worker says which blocks were not loaded",
        first_release="0.11.1",
        last_release=None,
        source="vllm/v1/outputs.py",
        probe=lambda surface: "invalid_block_ids" in surface.fields["KVConnectorOutput"],
    ),
    Capability(
        name="resumed_ids",
        seam=CONNECTOR_SEAM,
        what="the step names the resumed requests; before, a list of flags",
        first_release="0.11.1",
        last_release=None,
        source="vllm/v1/core/sched/output.py",
        probe=lambda surface: "resumed_req_ids" in surface.fields["CachedRequestData"],
    ),
    Capability(
        name="preempted_ids",
        seam=CONNECTOR_SEAM,
        what="the step names the preempted requests",
        first_release="0.12.0",
        last_release=None,
        source="vllm/v1/core/sched/output.py",
        probe=lambda surface: "preempted_req_ids" in surface.fields["SchedulerOutput"],
    ),
    Capability(
        name="connector_reset",
        seam=CONNECTOR_SEAM,
        what="a reset of the prefix cache reaches the connector",
        first_release="0.13.0",
        last_release=None,
        source="vllm/distributed/kv_transfer/kv_connector/v1/base.py",
        probe=lambda surface: hasattr(surface.base, "reset_cache"),
    ),
    Capability(
        name="null_window_blocks",
        seam=CONNECTOR_SEAM,
        what="a load gets null blocks for what a window skips; before, blocks for the whole span",
        first_release="0.14.0",
        last_release=None,
        source="vllm/v1/core/kv_cache_manager.py",
        probe=lambda surface: (
            "num_external_computed_tokens" in signature_of(surface.blocks, "allocate_slots")
        ),
    ),
    Capability(
        name="lora_name",
        seam=CONNECTOR_SEAM,
        what="events of stored blocks must name the LoRA",
        first_release="0.14.0",
        last_release=None,
        source="vllm/distributed/kv_events.py",
        probe=lambda surface: "lora_name" in surface.events.__struct_fields__,
    ),
    Capability(
        name="worker_metadata",
        seam=CONNECTOR_SEAM,
        what="workers answer their scheduler's side; before, in the stats",
        first_release="0.18.0",
        last_release=None,
        source="vllm/distributed/kv_transfer/kv_connector/v1/base.py",
        probe=lambda surface: hasattr(surface.base_module, "KVConnectorWorkerMetadata"),
    ),
    Capability(
        name="event_group",
        seam=CONNECTOR_SEAM,
        what="events of stored blocks name the KV-cache group",
        first_release="0.20.0",
        last_release=None,
        source="vllm/distributed/kv_events.py",
        probe=lambda surface: "group_idx" in surface.events.__struct_fields__,
    ),
    Capability(
        name="pool_hook",
        seam=CONNECTOR_SEAM,
        what="the scheduler binds its block pool to every connector, children too",
        first_release="0.22.0",
        last_release=None,
        source="vllm-project/vllm PR #39654",
        probe=lambda surface: hasattr(surface.base, "bind_gpu_block_pool"),
    ),
    Capability(
        name="pending_work",
        seam=CONNECTOR_SEAM,
        what="a connector keeps the engine stepping while it has work",
        first_release="0.24.0",
        last_release=None,
        source="vllm/distributed/kv_transfer/kv_connector/v1/base.py",
        probe=lambda surface: hasattr(surface.base, "has_pending_push_work"),
    ),
    Capability(
        name="manager_hook",
        seam=CONNECTOR_SEAM,
        what="the scheduler binds its KV-cache manager, which names the pool",
        first_release="0.30.0",
        last_release=None,
        source="vllm/distributed/kv_transfer/kv_connector/v1/base.py",
        probe=lambda surface: hasattr(surface.base, "bind_kv_cache_manager"),
    ),
    Capability(
        name="failed_requests",
        seam=CONNECTOR_SEAM,
        what="a worker says which requests were not loaded, for several groups",
        first_release="0.30.0",
        last_release=None,
        source="vllm/v1/outputs.py",
        probe=lambda surface: "failed_recving" in surface.fields["KVConnectorOutput"],
    ),
)
"""Every flag, of every seam; the docs' table and ``kvview doctor`` print it."""
