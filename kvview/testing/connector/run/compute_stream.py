"""The compute stream of a simulated engine; an event ends when the engine processes an output."""

from __future__ import annotations

from collections import deque

from kvview.testing.transfer.compute import GatedComputeEvent, GatedComputeStream


class StepStream:
    """The steps that a simulated model runner has launched, in order.

    1. A job that starts between two launches follows all steps that were launched before it. So the
       event of the job ends when the output of the last of the earlier steps is processed.
    2. The thread that steps the engine must not wait for an event; other threads may.
    """

    def __init__(self) -> None:
        self._launched: deque[GatedComputeStream] = deque()

    def launch(self) -> None:
        """Record the launch of a step."""
        gate = GatedComputeStream()
        gate.hold()
        self._launched.append(gate)

    def take(self) -> None:
        """Process the output of the oldest step; the bytes of the step are then written."""
        self._launched.popleft().release()

    def finish(self) -> None:
        """Process the output of all steps, for example before a shutdown."""
        while self._launched:
            self.take()

    def record_event(self) -> GatedComputeEvent:
        """Record an event after the steps that were launched so far."""
        newest = self._launched[-1] if self._launched else GatedComputeStream()
        return newest.record_event()
