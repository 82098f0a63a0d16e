"""The guard: what a connector gets by default instead of a bare view.

An engine that does not check lets a connector free twice, free what another one
holds, or pin the whole pool; what follows is seen hours later (vLLM #42571, #42085).
``GuardedView`` opens accounts in the pool's ledger and refuses first.

Laws: GUARD-1 to GUARD-11 in ``kvview/laws.toml``.

Source: vLLM issues #41383 and #46289 (leases), #27046 (pin caps); the incidents
above.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakSet

from kvview.errors import ConfigError, StaleBlockError
from kvview.guard.home import here
from kvview.guard.lease import GuardedLease, Leak
from kvview.guard.ledger import CheckedView, GuardStats, LedgerView, Stamp
from kvview.guard.queries import GuardedQueries
from kvview.keys import OffloadKey, require_offload_key
from kvview.pool import GPUBlockPoolView, SupportsLeases

_logger = logging.getLogger(__name__)

_NEAR_FRAMES = 8

_guards: WeakSet[GuardedView] = WeakSet()


def _open_view(view: GPUBlockPoolView, owner: str, max_blocks: int | None) -> LedgerView:
    """A view of its own for a guard, in the ledger of the view below if that has one."""
    if isinstance(view, GuardedView):
        return view.open_view(owner, max_blocks)
    below = view if isinstance(view, LedgerView) else CheckedView(view, owner)
    return below.open_view(owner, max_blocks)


class GuardedView(GuardedQueries):
    """A view that checks first: leases, a budget, one thread, a leak report.

    1. Keeps POOL-2 to POOL-5 and POOL-10 over a view that does not check; over one
       that keeps a ledger itself, nothing is checked or counted a second time.
    2. Has exactly the optional queries that the view under it has, which
       ``isinstance(guard, Supports...)`` tells; ``num_pinnable_blocks`` where there
       is a budget.
    3. References are either plain (``touch_blocks``/``free_blocks``) or a lease's;
       one kind can not give back the other's.

    Args:
        view: The view to guard.
        owner: Named in errors and reports.
        pin_budget: Largest share of the pool's blocks that may be held after a touch
            through this guard, 0 to 1 (GUARD-5); None for no limit.
        clock: Seconds, monotonic; for tests.
        trace: Whether to note the line that took each hold (slow).

    Raises:
        ConfigError: ``pin_budget`` is no share, or the pool's size is unknown.
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
            raise ConfigError("a pin budget needs a view that knows num_blocks")
        max_blocks = None
        if size is not None and pin_budget is not None:
            # 0.29 * 100 is 28.999...: what is that close to a whole block is one.
            max_blocks = max(1, int(pin_budget * size + 1e-6))
        super().__init__(owner, _open_view(view, owner, max_blocks), clock)
        self._below = view
        self._view.caller = _caller if trace else None
        self._null = self._view.ledger.null_block_id
        self._offer_queries()
        _guards.add(self)

    # --- the contract ---

    def touch_blocks(self, block_ids: Sequence[int]) -> None:
        """Take one reference on each block named, once per occurrence."""
        deadlines = self.deadlines
        if here.home is not self._home or (deadlines and deadlines[0][0] <= self._clock()):
            self._enter()
        self._view.touch_blocks(block_ids)

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """Give back one plain reference on each block named, once per occurrence."""
        deadlines = self.deadlines
        if here.home is not self._home or (deadlines and deadlines[0][0] <= self._clock()):
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
        """The view under this guard for another owner, as a guard over this one needs it."""
        self._enter()
        return self._view.open_view(owner, max_blocks)

    # --- leases ---

    def lease(
        self,
        block_ids: Sequence[int],
        *,
        job: object = None,
        ttl: float | None = None,
        expected_keys: Sequence[OffloadKey] | None = None,
    ) -> GuardedLease:
        """Hold blocks until released, at most ``ttl`` seconds.

        Args:
            block_ids: What to hold; the null block is skipped.
            job: Named in reports; one job may have several leases.
            ttl: Seconds until the lease ends by itself, or None. Expired leases
                are released at the next call of any kind; engines make one each step.
            expected_keys: One key a block: hold only if each block still has it.

        Returns:
            A lease, active from now; also a context manager.

        Raises:
            StaleBlockError: A block does not hold the key expected any more.
            NotAnOffloadKeyError: An expected key cannot be one.
            PinBudgetExceeded: More blocks than the budget allows.
            ConfigError: ``ttl`` is not positive, or the view cannot tell keys.
        """
        self._enter()
        block_ids = list(block_ids)
        if expected_keys is not None:
            with self._counted():
                self._check_keys(block_ids, expected_keys)
        return self._take(block_ids, job, ttl)

    # --- reports ---

    def guards(self) -> list[GuardedView]:
        """This guard, and the guards over it."""
        views = set(self._view.tree())
        return [guard for guard in _guards if guard._view in views]

    def held_blocks(self) -> Mapping[int, int]:
        """References held, plain, leased and by guards over this one, ``{block_id: count}``."""
        self._enter()
        return self._view.held_blocks()

    def leaks(self, older_than: float = 0.0) -> list[Leak]:
        """What is held for at least ``older_than`` seconds, oldest first."""
        now = self.now()
        plain: dict[tuple[str, Stamp | None], list[int]] = {}
        leaks: list[Leak] = []
        for view in self._view.tree():
            if view.leases is not None:
                leaks += [self._leak(hold, view.owner) for hold in view.leases]
            else:
                for block_id, times, stamp in view.references():
                    plain.setdefault((view.owner, stamp), []).extend([block_id] * times)
        for (owner, stamp), block_ids in plain.items():
            seconds, request_id, taken_at = stamp or (now, None, None)
            leaks.append(Leak(owner, None, tuple(block_ids), now - seconds, taken_at, request_id))
        leaks = [leak for leak in leaks if leak.age >= older_than]
        return sorted(leaks, key=lambda leak: -leak.age)

    def speak_of(self, request_id: str | None) -> None:
        """For the engine: what is taken from now on is taken for this request, by whomever."""
        self._view.ledger.request_id = request_id

    def accounts(self) -> dict[str, list[GuardStats]]:
        """The counters of this guard and of those over it, by owner, this one first."""
        found: dict[str, list[GuardStats]] = {}
        for view in self._view.tree():
            counters = found.setdefault(view.owner, [])
            if view.stats is not None and all(view.stats is not other for other in counters):
                counters.append(view.stats)
        return found

    def free_all(self) -> None:
        """For the engine: give back all that is held through this guard and close it.

        What was held when it was closed is the engine's to clean up, and stays (POOL-10).
        """
        for view in self._view.tree():
            if view.is_open:
                view.free_blocks([b for b, times, _ in view.references() for _ in range(times)])
        for guard in self.guards():
            guard._holds.clear()
            guard.deadlines.clear()
            guard.stats.active_leases = 0
        self.close()

    def close(self) -> Mapping[int, int]:
        """Close the guard and the view under it; reports what was still held.

        ``leaks`` still tells more about it afterwards.
        """
        below, self._below = self._below, None
        still_held = self._view.close()
        close = getattr(below, "close", None)
        if close is not None:
            close()
        return still_held

    def __del__(self) -> None:
        with suppress(Exception):  # nothing may come out of here, also at the interpreter's end
            if not self.is_at_home or not self._view.is_open:
                return
            if not (still_held := self._view.held_blocks()):
                self._view.close()
            elif self._view.ledger.has_pool:  # else the pool goes with it
                _logger.warning(
                    "GUARD-9: the guard of %r was dropped and still holds %d blocks, which nobody "
                    "can give back any more: %s; close it first",
                    self.owner,
                    len(still_held),
                    list(still_held)[:8],
                )

    # --- checks ---

    def _check_keys(self, block_ids: Sequence[int], expected: Sequence[OffloadKey]) -> None:
        if not hasattr(self, "block_keys") or len(expected) != len(block_ids):
            raise ConfigError(
                f"GUARD-1: expected_keys needs a view with block_keys, and one key a block: "
                f"{len(expected)} for {len(block_ids)} blocks"
            )
        for block_id, key, keys in zip(
            block_ids, expected, self._ask("block_keys", block_ids), strict=True
        ):
            if block_id != self._null and require_offload_key(key) not in keys:
                raise StaleBlockError(
                    f"GUARD-1: block {block_id} does not hold {key.hex()} any more: it was reused "
                    f"or evicted since it was seen"
                )


def _caller() -> str:
    """The line that called a guard."""
    import traceback  # a third of the import time of all kvview, for tracing alone

    near = traceback.extract_stack(limit=_NEAR_FRAMES)
    first_own = next(i for i, frame in enumerate(near) if frame.filename == __file__)
    caller = near[max(first_own - 1, 0)]
    return f"{caller.filename}:{caller.lineno} in {caller.name}"


if TYPE_CHECKING:
    _: type[GPUBlockPoolView] = GuardedView
    _leases: type[SupportsLeases] = GuardedView
