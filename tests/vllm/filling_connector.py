"""A connector that compares ``StepInfo.filling`` with all scheduled requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from examples.host_cache import HostCacheConnector
from kvview import (
    BlockIds,
    FinishReason,
    RequestInfo,
    SchedulerConnector,
    StepInfo,
    StepPlan,
    full_blocks,
)

SKIPPED = 7
"""One step in this many is not compared."""

seen: Counter[str] = Counter()


class ComparesFilling(HostCacheConnector):
    """Compares the requests that fill a block with all scheduled requests, in every step."""

    def make_scheduler(self) -> SchedulerConnector:
        half = super().make_scheduler()
        return _Comparing(half, self.config.geometry)


class _Comparing(SchedulerConnector):
    def __init__(self, half: SchedulerConnector, geometry: Any) -> None:
        self._geometry = geometry
        self._full: dict[str, set[tuple[int, int]]] = {}  # of each request, group and number
        self._is_new = True  # or the last step was not compared
        self._steps = 0
        self._plan_step, self._finished = half.plan_step, half.on_request_finished
        for name in vars(SchedulerConnector):
            if not name.startswith("_") and name not in ("plan_step", "on_request_finished"):
                object.__setattr__(self, name, getattr(half, name))

    def plan_step(self, step: StepInfo) -> StepPlan:
        self._steps += 1
        is_skipped = self._steps % SKIPPED == 0
        shown = set() if is_skipped else {one.request.request_id for one in step.filling()}
        seen["shown"] += len(shown)
        seen["scheduled"] += 0 if is_skipped else len(step.scheduled)
        for one in step.scheduled:
            end = one.num_computed_tokens + one.num_scheduled_tokens
            request = replace(one.request, num_computed_tokens=end)
            blocks = full_blocks(self._geometry, request, one.block_ids)
            full = {(block.group_idx, block.number) for block in blocks}
            before = self._full.get(request.request_id, set())
            self._full[request.request_id] = full
            size = self._geometry.groups
            taken_back = any(
                (number + 1) * size[group].block_size > one.num_computed_tokens
                for group, number in before
            )
            if self._is_new or is_skipped or request.request_id in shown:
                continue
            assert full <= before, f"{request.request_id}: {sorted(full - before)} became full"
            assert not taken_back, f"{request.request_id}: tokens were taken back"
        self._is_new = is_skipped
        return self._plan_step(step)

    def on_request_finished(
        self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
    ) -> None:
        self._full.pop(request.request_id, None)
        self._finished(request, block_ids, reason)
