"""The compute stream of a simulated engine, whose marks are reached when outputs are taken."""

from __future__ import annotations

from collections import deque

from kvview.testing.transfer.compute import GatedComputeEvent, GatedComputeStream


class StepStream:
    """The steps that a simulated model runner has launched, in order.

    1. A job that starts between two launches follows all steps that were launched before. So its
       mark is reached when the output of the last of them is taken.
    2. The thread that steps the engine must not wait for a mark; another thread may.
    """

    def __init__(self) -> None:
        self._launched: deque[GatedComputeStream] = deque()

    def launch(self) -> None:
        """Launch a step."""
        gate = GatedComputeStream()
        gate.hold()
        self._launched.append(gate)

    def take(self) -> None:
        """Take the output of the oldest step, after which its bytes are written."""
        self._launched.popleft().release()

    def finish(self) -> None:
        """Take the output of all steps, for example before a shutdown."""
        while self._launched:
            self.take()

    def record_event(self) -> GatedComputeEvent:
        """Record a mark after the steps that are launched so far."""
        newest = self._launched[-1] if self._launched else GatedComputeStream()
        return newest.record_event()
