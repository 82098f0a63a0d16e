"""What late releases of vLLM have beyond the contract, and what becomes of it under kvview.

Source: the paths named at each; ``kvview doctor`` names those that the installed vLLM has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvview_vllm.releases.shapes import owner_of, shape_of

_TIERING = "vllm.v1.kv_offload.tiering"


@dataclass(frozen=True)
class Beyond:
    """One thing that a release may have.

    Args:
        name: As vLLM calls it.
        since: First release that has it.
        what: What it is.
        met: Whether kvview does what it asks.
        how: How, or what to do where kvview does not.
    """

    name: str
    since: str
    what: str
    met: bool
    how: str


def _has(owner: str, name: str, word: str = "") -> Callable[[], bool]:
    def has() -> bool:
        try:
            shape = shape_of(owner_of(owner), name)
        except Exception:  # a module that cannot be imported here is used by nobody either
            return False
        return shape is not None and word in shape

    return has


KNOWN: tuple[tuple[Beyond, Callable[[], bool]], ...] = (
    (
        Beyond(
            "OffloadingManager.lock",
            "0.33.0",
            "every caller of a manager but shutdown holds it; it is not re-entrant",
            True,
            "VLLMOffloadingManager enters it; a manager of kvview's keeps vLLM's no-op, for it is "
            "called on one thread only",
        ),
        _has("OffloadingManager", "lock"),
    ),
    (
        Beyond(
            "tolerates_off_thread_polling",
            "0.33.0",
            "a secondary tier may be polled from a thread of vLLM's tiering manager",
            True,
            "KVViewTier says that it is not to be, whatever the default: it serves nobody outside; "
            "a VLLMOffloadingManager over a tiering manager holds its lock",
        ),
        _has(f"{_TIERING}.base:SecondaryTierManager", "tolerates_off_thread_polling"),
    ),
    (
        Beyond(
            "SchedulerOutput.kv_connector_block_state",
            "0.29.0",
            "block tables of the step, and exact boundary states of Mamba layers to store",
            False,
            "tables are followed from the step, and boundary states are not offered to a "
            "connector: a Mamba block is stored when it is full",
        ),
        _has("vllm.v1.core.sched.output:SchedulerOutput", "kv_connector_block_state"),
    ),
    (
        Beyond(
            "ReqContext.kv_hints",
            "0.31.0",
            "typed hints of the caller about a request's KV",
            False,
            "they are not handed on; a manager reads kv_transfer_params, which are",
        ),
        _has("ReqContext", "kv_hints"),
    ),
    (
        Beyond(
            "TieringOffloadingSpec",
            "0.22.0",
            "host memory in front of secondary tiers, loaded by module_path from 0.28",
            True,
            "KVViewTieringSpec is one, and KVViewTier a tier of it; under KVViewOffloadingSpec "
            "compose tiers in the manager that you name",
        ),
        _has(f"{_TIERING}.spec:TieringOffloadingSpec", "get_manager"),
    ),
    (
        Beyond(
            "cache_policy_module_path",
            "0.27.0",
            "an eviction policy of vLLM's managers, by module path",
            False,
            "KVViewTieringSpec reads it, as vLLM's does; KVViewOffloadingSpec does not: name the "
            'policy in "kvview": {"manager_options": {"cache_policy": ...}}',
        ),
        _has(
            "vllm.v1.kv_offload.cpu.manager:CPUOffloadingManager",
            "__init__",
            "cache_policy_module_path",
        ),
    ),
)


def beyond() -> tuple[Beyond, ...]:
    """Those that the installed vLLM has."""
    return tuple(each for each, is_there in KNOWN if is_there())
