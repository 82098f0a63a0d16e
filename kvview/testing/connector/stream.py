"""The compute stream of a simulated engine: a mark is reached when a step's output is taken."""

from __future__ import annotations

from collections import deque

from kvview.testing.transfer.compute import GatedComputeEvent, GatedComputeStream


class StepStream:
    """What a simulated model runner has launched, step after step.

    1. A job that starts between two launches comes after all steps launched before: its
       mark is reached when the output of the last of them is taken.
    2. The thread that steps the engine must not wait for a mark; another may.
    """

    def __init__(self) -> None:
        self._launched: deque[GatedComputeStream] = deque()

    def launch(self) -> None:
        """A step is launched."""
        gate = GatedComputeStream()
        gate.hold()
        self._launched.append(gate)

    def take(self) -> None:
        """The output of the oldest step is taken: its bytes are written by now."""
        self._launched.popleft().release()

    def finish(self) -> None:
        """Everything has come to its end, as before a shutdown."""
        while self._launched:
            self.take()

    def record_event(self) -> GatedComputeEvent:
        """Mark what was launched until now."""
        newest = self._launched[-1] if self._launched else GatedComputeStream()
        return newest.record_event()
