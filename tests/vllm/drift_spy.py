"""The example connector, which records its calls; ``drift_plays.py`` compares the records."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvview import (
    MEDIUM_CPU,
    OffloadingEvent,
    SchedulerConnector,
    StepPlan,
    SupportsFindCachedBlock,
    TransferResult,
    WorkerConnector,
)
from kvview.targets import load_connector

_EXAMPLE = Path(__file__).parents[2] / "examples" / "host_cache.py"
_HostCache: Any = load_connector(f"{_EXAMPLE}:HostCacheConnector")
_example: Any = sys.modules[_HostCache.__module__]


class SpyConnector(_HostCache):  # type: ignore[misc]
    """Records every call."""

    def make_scheduler(self) -> SchedulerConnector:
        half: SchedulerConnector = _Scheduler(self.config, 64)
        return half


class FailingSpy(SpyConnector):
    """Records every call; all its loads fail."""

    def make_worker(self) -> WorkerConnector:
        half: WorkerConnector = _FailingWorker(64)
        return half


class _Scheduler(_example.HostCacheScheduler):  # type: ignore[misc]
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.saw: list[Any] = []
        self.events: list[OffloadingEvent] = []

    def on_engine_ready(self, facts: Any) -> None:
        super().on_engine_ready(facts)
        self.saw.append(["facts", str(facts)])

    def match_prefix(self, request: Any, num_computed_tokens: int) -> int:
        found: int = super().match_prefix(request, num_computed_tokens)
        content = request.content
        facts = [content.lora_name, content.lora_id, content.cache_salt, list(content.extra_keys)]
        tokens = [int(token) for token in content.token_ids[:3]]
        self.saw.append(["match", _name(request), num_computed_tokens, found, facts, tokens])
        return found

    def on_blocks_allocated(self, request: Any, block_ids: Any, *numbers: int) -> None:
        super().on_blocks_allocated(request, block_ids, *numbers)
        self.saw.append(["allocated", _name(request), _plain(block_ids), numbers])

    def on_request_finished(self, request: Any, block_ids: Any, reason: Any) -> None:
        super().on_request_finished(request, block_ids, reason)
        self.saw.append(["finished", _name(request), _plain(block_ids), reason.name])
        first = request.block_hashes[0] if request.block_hashes else None
        if isinstance(self.view, SupportsFindCachedBlock) and first is not None:
            key = self.key(request, 0, 0)
            self.saw.append(["found", self.view.find_cached_block(key) is not None])

    def on_request_preempted(self, request: Any, block_ids: Any) -> None:
        super().on_request_preempted(request, block_ids)
        self.saw.append(["preempted", _name(request), _plain(block_ids)])

    def plan_step(self, step: Any) -> StepPlan:
        for one in step.scheduled:
            numbers = [one.num_computed_tokens, one.num_scheduled_tokens]
            self.saw.append(["step", _name(one.request), _plain(one.block_ids), numbers])
        if step.preempted:
            self.saw.append(["lost", list(step.preempted)])
        plan: StepPlan = super().plan_step(step)
        return plan

    def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
        for result in results:
            self.saw.append(["ended", result.success])
            if result.job_id in self.stores:
                keys = tuple(self.stores[result.job_id][0])
                self.events += [
                    OffloadingEvent(keys, MEDIUM_CPU, removed=False),
                    OffloadingEvent(keys, MEDIUM_CPU, removed=True),
                ]
        super().on_transfers_finished(results)
        if self.view is not None:
            self.saw.append(["walk", len(list(self.view.iter_free_block_ids_with_hash()))])

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self.events = self.events, []
        return events

    def reset_cache(self) -> bool:
        self.saw.append(["reset"])
        done: bool = super().reset_cache()
        return done


class _FailingWorker(_example.HostCacheWorker):  # type: ignore[misc]
    def start_plan(self, plan: StepPlan) -> None:
        super().start_plan(StepPlan(stores=plan.stores))
        self.finished += [
            TransferResult(job.job_id, success=False, error="planted") for job in plan.loads
        ]


def _name(request: Any) -> list[Any]:
    return [request.request_id, request.num_tokens, len(request.block_hashes)]


def _plain(block_ids: Any) -> list[list[int]]:
    return [[int(block_id) for block_id in group] for group in block_ids]
