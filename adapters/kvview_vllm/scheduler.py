"""vLLM's schedulers, extended to bind the block pool, for ``--scheduler-cls``.

These schedulers are needed for releases that have no hook for the pool (0.11 to 0.18) or do not
pass it to the children of ``MultiConnector`` (0.19 to 0.21). In other releases the schedulers are
harmless, because binding the same pool again changes nothing (BIND-2).

Source: ``SchedulerConfig.scheduler_cls``, vllm/config/scheduler.py, every release.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from kvview_vllm.binding import BlockPoolViewMixin, walk_connectors
from kvview_vllm.releases import check_scheduler, reading

with reading("binding", "the schedulers"):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

__all__ = ["AsyncViewScheduler", "ViewScheduler"]

check_scheduler()


class ViewScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, which binds the pool to every connector that needs the view."""

    @wraps(Scheduler.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _bind(self)


class AsyncViewScheduler(AsyncScheduler):  # type: ignore[misc]
    """The scheduler for ``--async-scheduling``, which binds the pool too."""

    @wraps(AsyncScheduler.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _bind(self)


def _bind(scheduler: Any) -> None:
    with reading("binding", "the pool of a scheduler"):
        pool = scheduler.kv_cache_manager.block_pool
        connectors = [*walk_connectors(scheduler.connector)]
    for connector in connectors:
        if isinstance(connector, BlockPoolViewMixin):
            connector.bind_gpu_block_pool(pool)
