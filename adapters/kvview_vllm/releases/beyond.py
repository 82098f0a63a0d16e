"""Features of late vLLM releases that the contract does not have, and how kvview treats them.

Source: the paths named in each row; ``kvview doctor`` lists those of the installed vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvview_vllm.releases.shapes import owner_of, shape_of

_TIERING = "vllm.v1.kv_offload.tiering"


@dataclass(frozen=True)
class Beyond:
    """One feature.

    Args:
        name: Its name in vLLM.
        since: First release that has it.
        what: Its purpose.
        met: Whether kvview supports it.
        how: How kvview supports it, or what to do instead.
    """

    name: str
    since: str
    what: str
    met: bool
    how: str


Member = tuple[str, str, str]
"""Owner, name, and a word that the shape of the member must have."""

KNOWN: tuple[tuple[Beyond, Member], ...] = (
    (
        Beyond(
            "OffloadingManager.lock",
            "0.33.0",
            "every caller of a manager but shutdown holds it; it is not re-entrant",
            True,
            "VLLMOffloadingManager enters it; a kvview manager keeps vLLM's no-op, because it is "
            "called on one thread only",
        ),
        ("OffloadingManager", "lock", ""),
    ),
    (
        Beyond(
            "tolerates_off_thread_polling",
            "0.33.0",
            "a secondary tier may be polled from a thread of vLLM's tiering manager",
            True,
            "KVViewTier disables it, because it serves no external requests; a "
            "VLLMOffloadingManager over a tiering manager holds its lock",
        ),
        (f"{_TIERING}.base:SecondaryTierManager", "tolerates_off_thread_polling", ""),
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
        ("vllm.v1.core.sched.output:SchedulerOutput", "kv_connector_block_state", ""),
    ),
    (
        Beyond(
            "ReqContext.kv_hints",
            "0.31.0",
            "typed hints of the caller about a request's KV",
            False,
            "they are not passed on; a manager can read kv_transfer_params",
        ),
        ("ReqContext", "kv_hints", ""),
    ),
    (
        Beyond(
            "TieringOffloadingSpec",
            "0.22.0",
            "host memory in front of secondary tiers, loaded by module_path from 0.28",
            True,
            "KVViewTieringSpec is one, and KVViewTier is one of its tiers; with "
            "KVViewOffloadingSpec compose tiers in your own manager",
        ),
        (f"{_TIERING}.spec:TieringOffloadingSpec", "get_manager", ""),
    ),
    (
        Beyond(
            "cache_policy_module_path",
            "0.27.0",
            "an eviction policy of vLLM's managers, by module path",
            False,
            "KVViewTieringSpec reads it, as vLLM's spec does; KVViewOffloadingSpec does not: name "
            'the policy in "kvview": {"manager_options": {"cache_policy": ...}}',
        ),
        (
            "vllm.v1.kv_offload.cpu.manager:CPUOffloadingManager",
            "__init__",
            "cache_policy_module_path",
        ),
    ),
)


def beyond() -> tuple[Beyond, ...]:
    """The features that the installed vLLM has."""
    return tuple(each for each, member in KNOWN if _has(*member))


def _has(owner: str, name: str, word: str) -> bool:
    try:
        shape = shape_of(owner_of(owner), name)
    except Exception:  # a module that cannot be imported here is not used either
        return False
    return shape is not None and word in shape
