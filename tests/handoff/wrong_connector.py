"""A connector whose consumer never confirms."""

from __future__ import annotations

from kvview.handoff import Handoff
from kvview_reference.handoff.pull import PullConnector, PullWorker


class SilentWorker(PullWorker):
    def close(self, handoff: Handoff, reader: str) -> None:
        pass


class NeverConfirms(PullConnector):
    def make_worker(self) -> PullWorker:
        return SilentWorker()
