"""The guard: the view that a connector gets by default, which checks every call.

If an engine does not check calls, a connector can free a block twice, free a block that another
connector holds, or pin the whole pool. The damage appears hours later (vLLM #42571 and #42085).
``GuardedView`` counts references in the pool's ledger and refuses a wrong call.

Laws: GUARD-1 to GUARD-7 in ``kvview/laws.toml``.

Source: vLLM issue #27046 (pin caps); the incidents above.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakSet

from kvview.errors import ConfigError
from kvview.guard.home import here
from kvview.guard.leak import Leak
from kvview.guard.ledger import CheckedView, GuardStats, LedgerView, Stamp
from kvview.guard.queries import GuardedQueries
from kvview.keys import OffloadKey
from kvview.pool import GPUBlockPoolView

_logger = logging.getLogger(__name__)

_NEAR_FRAMES = 8

_guards: WeakSet[GuardedView] = WeakSet()


def _open_view(view: GPUBlockPoolView, owner: str, max_blocks: int | None) -> LedgerView:
    """Open a ledger view for a guard, in the ledger of the view below if there is one."""
    if isinstance(view, GuardedView):
        return view.open_view(owner, max_blocks)
    below = view if isinstance(view, LedgerView) else CheckedView(view, owner)
    return below.open_view(owner, max_blocks)


class GuardedView(GuardedQueries):
    """A view that checks every call before it acts, with a budget and a leak report.

    1. A guard satisfies POOL-2 to POOL-5 and POOL-10 over a view that does not check. If the view
       below has a ledger, nothing is checked or counted twice.
    2. A guard has exactly the optional queries of the view below (test with ``isinstance(guard,
       Supports...)``), and ``num_pinnable_blocks`` if the guard has a budget.

    Args:
        view: The view to guard.
        owner: Name of the owner, for errors and reports.
        pin_budget: Largest share of the pool's blocks that may be held after a touch
            through this guard, 0 to 1 (GUARD-3); None for no limit.
        clock: Returns monotonic seconds; for tests.
        trace: Whether to record the line that took each hold (slow).

    Raises:
        ConfigError: ``pin_budget`` is not a share, or the pool's size is unknown.
    """

    def __init__(
        self,
        view: GPUBlockPoolView,
        *,
        owner: str = "connector",
        pin_budget: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        trace: bool = False,
    ) -> None:
        if pin_budget is not None and not 0 < pin_budget <= 1:
            raise ConfigError(f"pin_budget must be a share of the pool in (0, 1], got {pin_budget}")
        size: int | None = getattr(view, "num_blocks", None)
        if size is None and pin_budget is not None:
            raise ConfigError("pin_budget needs a view with num_blocks (SupportsPoolSize)")
        max_blocks = None
        if size is not None and pin_budget is not None:
            # 0.29 * 100 is 28.999..., which stands for 29 blocks.
            max_blocks = max(1, int(pin_budget * size + 1e-6))
        super().__init__(owner, _open_view(view, owner, max_blocks))
        self._below = view
        self.now = self._view.clock = clock
        self._view.caller = _caller if trace else None
        self._null = self._view.ledger.null_block_id
        self._offer_queries()
        _guards.add(self)

    # --- the contract ---

    def touch_blocks(self, block_ids: Sequence[int]) -> None:
        """Take one reference on each block, once per occurrence."""
        if here.home is not self._home:
            self._enter()
        self._view.touch_blocks(block_ids)

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """Release one reference on each block, once per occurrence."""
        if here.home is not self._home:
            self._enter()
        self._view.free_blocks(block_ids)

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
        """Walk the free blocks that still hold reusable KV, next victim first."""
        self._enter()
        for block_id, key in self._below.iter_free_block_ids_with_hash():
            if block_id != self._null:
                yield block_id, key
                self._enter()

    def open_view(self, owner: str, max_blocks: int | None = None) -> LedgerView:
        """Open this guard's ledger view for another owner, which is a guard over this guard."""
        self._enter()
        return self._view.open_view(owner, max_blocks)

    # --- reports ---

    def guards(self) -> list[GuardedView]:
        """Return this guard and the guards over it."""
        views = set(self._view.tree())
        return [guard for guard in _guards if guard._view in views]

    def held_blocks(self) -> Mapping[int, int]:
        """Return all references by block, with those of guards over this one."""
        self._enter()
        return self._view.held_blocks()

    def leaks(self, older_than: float = 0.0) -> list[Leak]:
        """Return the references that are at least ``older_than`` seconds old, oldest first."""
        now = self.now()
        held: dict[tuple[str, Stamp | None], list[int]] = {}
        for view in self._view.tree():
            for block_id, times, stamp in view.references():
                held.setdefault((view.owner, stamp), []).extend([block_id] * times)
        leaks: list[Leak] = []
        for (owner, stamp), block_ids in held.items():
            seconds, request_id, taken_at = stamp or (now, None, None)
            leaks.append(Leak(owner, tuple(block_ids), now - seconds, taken_at, request_id))
        leaks = [leak for leak in leaks if leak.age >= older_than]
        return sorted(leaks, key=lambda leak: -leak.age)

    def speak_of(self, request_id: str | None) -> None:
        """Set the request for which references are taken from now on; called by the engine."""
        self._view.ledger.request_id = request_id

    def accounts(self) -> dict[str, list[GuardStats]]:
        """Return the counters of this guard and then of the guards over it, by owner."""
        found: dict[str, list[GuardStats]] = {}
        for view in self._view.tree():
            counters = found.setdefault(view.owner, [])
            if view.stats is not None and all(view.stats is not other for other in counters):
                counters.append(view.stats)
        return found

    def free_all(self) -> None:
        """Free every block that is held through this guard, and close it; called by the engine.

        If a guard over this guard was closed earlier, its references stay, because the engine
        releases them (POOL-10).
        """
        for view in self._view.tree():
            if view.is_open:
                view.free_blocks([b for b, times, _ in view.references() for _ in range(times)])
        self.close()

    def close(self) -> Mapping[int, int]:
        """Close the guard and the view under it; returns the references still held.

        After ``close``, ``leaks`` still reports the age of these references.
        """
        below, self._below = self._below, None
        still_held = self._view.close()
        close = getattr(below, "close", None)
        if close is not None:
            close()
        return still_held

    def __del__(self) -> None:
        with suppress(Exception):  # a finaliser must not raise, even at interpreter exit
            if not self.is_at_home or not self._view.is_open:
                return
            if not (still_held := self._view.held_blocks()):
                self._view.close()
            elif self._view.ledger.has_pool:  # otherwise the pool is gone too
                _logger.warning(
                    "GUARD-5: the guard of %r was garbage-collected while it held %d blocks, which "
                    "can no longer be freed: %s; close the guard first",
                    self.owner,
                    len(still_held),
                    list(still_held)[:8],
                )


def _caller() -> str:
    """Return the line that called a guard."""
    import traceback  # imported here, because traceback takes a third of kvview's import time

    near = traceback.extract_stack(limit=_NEAR_FRAMES)
    first_own = next(i for i, frame in enumerate(near) if frame.filename == __file__)
    caller = near[max(first_own - 1, 0)]
    return f"{caller.filename}:{caller.lineno} in {caller.name}"


if TYPE_CHECKING:
    _: type[GPUBlockPoolView] = GuardedView
