"""The guard in vLLM, which makes the view of a connector and logs old holds.

Source: :mod:`kvview.guard`, whose laws this module satisfies.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvview import GuardedView, Leak
from kvview_vllm.pool import view

_logger = logging.getLogger(__name__)
_SECONDS_BETWEEN_LOOKS = 10.0
_LONGEST_PAUSE = 3600.0  # seconds between two reports
_MOST_LINES = 5


def guarded_view(
    block_pool: Any, owner: str, *, pin_budget: float | None, trace_holds: bool
) -> GuardedView:
    """Make a guarded view of a real ``BlockPool``.

    Args:
        block_pool: The scheduler's pool.
        owner: Name of the user's connector, the owner in errors and reports.
        pin_budget: Largest share of the pool that the owner may hold; None for no limit.
        trace_holds: Whether to record the line that took each hold (slow).
    """
    return GuardedView(
        view(block_pool, owner=owner), owner=owner, pin_budget=pin_budget, trace=trace_holds
    )


def close_view(guard: GuardedView) -> None:
    """Close the view, and log the blocks that it still holds."""
    _log("at close", guard.leaks())
    guard.close()


class LeakReporter:
    """Reports long-held blocks, once per step.

    1. Holds are examined every ten seconds, or less often if that would take more than a
       thousandth of the time.
    2. Holds older than ``report_after`` are logged when they are found, and then at intervals that
       double up to one hour.

    Args:
        guard: The view of the connector.
        report_after: Age in seconds from which a hold is reported; None for no reports.
        describe: Adds facts about the engine to a leak before the leak is logged.
        late_work: Returns log lines about other work that has taken at least the given number of
            seconds.
    """

    def __init__(
        self,
        guard: GuardedView,
        report_after: float | None,
        describe: Callable[[Leak], Leak],
        late_work: Callable[[float], list[str]],
    ) -> None:
        self.guard = guard
        self.oldest = 0.0
        """Unix time at which the oldest reference was taken; 0 without references."""
        self._report_after = report_after
        self._describe = describe
        self._late_work = late_work
        self._next_look = self._next_report = float("-inf")
        self._pause = 0.0

    def step(self) -> None:
        """Examine holds if the next examination is due."""
        guard = self.guard
        if guard.now() >= self._next_look and guard.is_open:
            self._look()

    def _look(self) -> None:
        began = time.perf_counter()
        leaks, now, today = self.guard.leaks(), self.guard.now(), time.time()
        self.oldest = today - max((leak.age for leak in leaks), default=today)
        if self._report_after is not None:
            self._report(now, [leak for leak in leaks if leak.age >= self._report_after])
        cost = time.perf_counter() - began
        self._next_look = now + max(_SECONDS_BETWEEN_LOOKS, 1000 * cost)

    def _report(self, now: float, leaks: list[Leak]) -> None:
        assert self._report_after is not None, "else nothing is reported"
        late = self._late_work(self._report_after)
        if not leaks and not late:
            self._pause, self._next_report = 0.0, now
        elif now >= self._next_report:
            self._pause = min(2 * self._pause or self._report_after, _LONGEST_PAUSE)
            self._next_report = now + self._pause
            _log("held for long", [self._describe(leak) for leak in leaks[:_MOST_LINES]])
            for line in late[:_MOST_LINES]:
                _logger.warning("kvview: %s", line)
            more = len(leaks[_MOST_LINES:]) + len(late[_MOST_LINES:])
            if more:
                _logger.warning(
                    "kvview: %d further reports about %r are omitted", more, self.guard.owner
                )


def _log(when: str, leaks: list[Leak]) -> None:
    for leak in leaks:
        if leak.taken_at is None:
            leak = replace(leak, taken_at="an unknown line, which trace_holds records")
        _logger.warning("%s: %s", when, leak)
