"""Fields of the scheduler's and the workers' outputs that some releases lack.

Source: vllm/v1/core/sched/output.py and vllm/v1/outputs.py, 0.11.0 to 0.33.0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any


def preempted_requests(output: Any) -> Iterable[str]:
    """Return the requests that a step preempts, which a ``SchedulerOutput`` names since 0.13."""
    return getattr(output, "preempted_req_ids", None) or ()


def resumed_requests(cached: Any) -> Iterable[str]:
    """Return the resumed requests of a ``CachedRequestData``."""
    resumed: Collection[str] | None = getattr(cached, "resumed_req_ids", None)
    if resumed is not None:
        return resumed
    flags = cached.resumed_from_preemption
    return [name for name, flag in zip(cached.req_ids, flags, strict=False) if flag]


def failed_requests(output: Any) -> Iterable[str]:
    """Return the requests that a ``KVConnectorOutput`` lists as not loaded."""
    return getattr(output, "failed_recving", None) or ()


def invalid_blocks(output: Any) -> Iterable[int]:
    """Return the blocks that a ``KVConnectorOutput`` lists as not loaded."""
    return getattr(output, "invalid_block_ids", None) or ()


def window_of(spec: Any) -> int | None:
    """Return the sliding window of a ``KVCacheSpec``, or None."""
    window: int | None = getattr(spec, "sliding_window", None)
    return window


def has_async_scheduling(scheduler_config: Any) -> bool:
    """Whether steps are scheduled ahead of their outputs."""
    return bool(getattr(scheduler_config, "async_scheduling", False))
