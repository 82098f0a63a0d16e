"""Wrong connectors: several side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

from kvview import (
    EngineFacts,
    GPUBlockPoolView,
    OffloadingEvent,
    SchedulerConnector,
    TransferResult,
    ViewNotBoundError,
    WorkerConnector,
)
from kvview.testing import Mutant
from kvview_reference.connector.multi import MultiScheduler, MultiWorker
from kvview_reference.connector.offload import OffloadScheduler

from .connector import Offload, breaker

MUTANTS: list[Mutant] = []
breaks = breaker(MUTANTS)


class NeedsTheView(Offload):
    """Raises if it was not bound."""

    class scheduler(OffloadScheduler):
        def on_engine_ready(self, facts: EngineFacts) -> None:
            if self._view is None:
                raise ViewNotBoundError("this connector needs the view of the block pool")
            super().on_engine_ready(facts)


class Two(NeedsTheView):
    """The right one: two of a kind side by side."""

    multi: ClassVar[type[MultiScheduler]] = MultiScheduler

    def make_scheduler(self) -> SchedulerConnector:
        return self.multi([NeedsTheView.make_scheduler(self), NeedsTheView.make_scheduler(self)])

    def make_worker(self) -> WorkerConnector:
        return MultiWorker([super().make_worker(), super().make_worker()])


@breaks("CONN-1", "binds the first child only", "vllm#39654")
class BindsOneChild(Two):
    class multi(MultiScheduler):
        def bind_gpu_block_pool_view(self, view: GPUBlockPoolView) -> None:
            self._children[0].bind_gpu_block_pool_view(view)


@breaks("EVENT-2", "passes the results of each child to all children")
class MixesUpChildren(Two):
    class multi(MultiScheduler):
        def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
            own = [replace(r, job_id=self._jobs.pop(r.job_id)[1]) for r in results]
            self._each(lambda child: child.on_transfers_finished(own))


@breaks("EVENT-2", "takes the events of every child, and passes on those of the first")
class LosesEvents(Two):
    class multi(MultiScheduler):
        def take_events(self) -> Iterable[OffloadingEvent]:
            taken = [list(child.take_events()) for child in self._children]
            self._speaking.update(index for index, events in enumerate(taken) if events)
            return taken[0]


@breaks("CONN-4", "two connectors share one table of pins", "ascend#15990")
class SharesPins(Two):
    class multi(MultiScheduler):
        def __init__(self, children: Sequence[SchedulerConnector]) -> None:
            super().__init__(children)
            one, other = children
            assert isinstance(one, OffloadScheduler)
            assert isinstance(other, OffloadScheduler)
            other._stores = one._stores
