"""Wrong guards."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, SupportsIndex

from kvview import GPUBlockPoolView, GuardedView, Leak, PinBudgetExceeded, UnknownBlockError
from kvview.guard import GuardedLease
from kvview.guard.home import here
from kvview.guard.lease import Hold
from kvview.guard.ledger import Ledger, LedgerView
from kvview.testing import Mutant
from kvview_reference.harness import GuardedReferencePool

from .planting import planter

MUTANTS: list[Mutant] = []
planted = planter(MUTANTS)


class WrongGuardPool(GuardedReferencePool):
    """The pool behind a guard of the class ``Guard``."""


def _is_plainly_held(guard: GuardedView, block_id: int) -> bool:
    return guard._view._held[block_id] > 0


@planted("GUARD-1")
class LeasesUntilAnIdIsWrong(WrongGuardPool):
    """Blocks are taken one by one; those before a wrong id stay taken."""

    class Guard(GuardedView):
        def lease(self, block_ids: Sequence[int], **options: Any) -> GuardedLease:
            leases = [super(type(self), self).lease([b], **options) for b in block_ids[:-1]]
            last = super().lease(block_ids, **options)
            for lease in leases:
                lease.release()
            return last


@planted("GUARD-1", "vllm#46951")
class LeasesWhateverIsThere(WrongGuardPool):
    """A block that was reused since it was seen is held, and its bytes stored."""

    class Guard(GuardedView):
        def _check_keys(self, block_ids: Sequence[int], expected: Sequence[bytes]) -> None:
            pass


@planted("GUARD-1", "vllm#42085")
class HasNoBudget(WrongGuardPool):
    """One connector may hold the whole pool; the next long request finds none."""

    class Guard(GuardedView):
        def __init__(self, view: GPUBlockPoolView, **options: Any) -> None:
            super().__init__(view, **options)
            self._view.max_blocks = None


@planted("GUARD-2")
class ReleasesTwice(WrongGuardPool):
    """A lease that has ended takes references of others with it."""

    class Guard(GuardedView):
        def _release(self, lease: GuardedLease) -> bool:
            if lease.is_active:
                return super()._release(lease)
            held = [block for block in lease.block_ids if _is_plainly_held(self, block)]
            self.free_blocks(list(dict.fromkeys(held)))
            return False


@planted("GUARD-2", "vllm#43742")
class LeaksWhenAnExceptionFlies(WrongGuardPool):
    """The end of a ``with`` block releases on the good path only."""

    class Guard(GuardedView):
        def lease(self, block_ids: Sequence[int], **options: Any) -> GuardedLease:
            lease = super().lease(block_ids, **options)
            lease.__class__ = _LeakyLease
            return lease


class _LeakyLease(GuardedLease):
    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.release()


@planted("GUARD-2", "vllm#52372")
class CountsLeasesByBlock(WrongGuardPool):
    """The end of one job's lease ends what any other job holds of its blocks."""

    class Guard(GuardedView):
        def _end(self, hold: Hold) -> None:
            super()._end(hold)
            for other in list(self._holds):
                if set(other.block_ids) & set(hold.block_ids):
                    super()._end(other)


@planted("GUARD-2")
class FreesLeasesAsPlainHolds(WrongGuardPool):
    """``free_blocks`` gives back what a lease holds; its release does so again."""

    class Guard(GuardedView):
        def free_blocks(self, block_ids: Sequence[int], /) -> None:
            leased = [b for b in block_ids if not _is_plainly_held(self, b)]
            super().free_blocks([block for block in block_ids if block not in leased])
            if leased and self._lease_view is not None:
                self._lease_view.free_blocks(leased)


@planted("GUARD-2", "vllm#51637")
class ReleasesAnExpiredLease(WrongGuardPool):
    """A release that comes after the expiry takes the reference of a newer hold."""

    class Guard(GuardedView):
        def _release(self, lease: GuardedLease) -> bool:
            if not lease.is_active:
                self.free_blocks([b for b in lease.block_ids if _is_plainly_held(self, b)])
                return True
            return super()._release(lease)


@planted("GUARD-3", "ROCm/ATOM#2261")
class HoldsForEver(WrongGuardPool):
    """A peer that never reports keeps its blocks until the engine ends."""

    class Guard(GuardedView):
        def _schedule(self, hold: Hold, ttl: float) -> None:
            pass


@planted("GUARD-3", "vllm#58222")
class ExpiresInTheOrderTaken(WrongGuardPool):
    """The reaper looks at the oldest lease only; a short one behind it stays."""

    class Guard(GuardedView):
        def _expire(self) -> list[Leak]:
            oldest = min(self._holds, key=lambda hold: hold.stamp[0], default=None)
            taken = sorted(self.deadlines, key=lambda entry: entry[1])
            if oldest is not None and taken and taken[0][0] > self.now():
                return []
            return super()._expire()


@planted("GUARD-3", "vllm#50789")
class RenewsInPlace(WrongGuardPool):
    """A renewed lease keeps its old place in the queue of deadlines."""

    class Guard(GuardedView):
        def _renew(self, lease: GuardedLease, ttl: float) -> None:
            pass


@planted("GUARD-4")
class ServesAnyThread(WrongGuardPool):
    """Calls from other threads race with the scheduler's."""

    class Guard(GuardedView):
        def _check_open(self) -> None:
            self._home = here.home
            super()._check_open()


@planted("GUARD-5")
class TellsItsBudget(WrongGuardPool):
    """A connector that asks is told the whole budget, whatever is held."""

    class Guard(GuardedView):
        def _num_pinnable_blocks(self) -> int:
            return self._view.max_blocks or 0


@planted("GUARD-5")
class CountsItsOwnHoldsOnly(WrongGuardPool):
    """Two connectors with half of the pool each leave the engine nothing."""

    class Guard(GuardedView):
        def __init__(self, view: GPUBlockPoolView, **options: Any) -> None:
            super().__init__(view, **options)
            self._view.ledger = Ledger(range(self.num_blocks), self.null_block_id)
            self._view.ledger.count_holders()


@planted("GUARD-6")
class CopiesLikeAnyObject(WrongGuardPool):
    """A copy of a lease gives back what the original gives back too."""

    class Guard(GuardedView):
        def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
            return object.__reduce_ex__(self, protocol)


@planted("GUARD-7")
class EntersAnEndedLease(WrongGuardPool):
    """A ``with`` block copies from blocks that are the engine's again."""

    class Guard(GuardedView):
        def _check_lease(self, lease: GuardedLease) -> None:
            pass


@planted("GUARD-7")
class OutlivesItsView(WrongGuardPool):
    """A connector copies from blocks that a lease of a closed view still names."""

    class Guard(GuardedView):
        @property
        def is_open(self) -> bool:
            return True


@planted("GUARD-8")
class ForgetsWhatWasNotTakenBack(WrongGuardPool):
    """A lease that the engine did not take back at its expiry is held for ever."""

    class Guard(GuardedView):
        def _end(self, hold: Hold) -> None:
            with suppress(RuntimeError):
                super()._end(hold)


@planted("GUARD-9")
class GoesInSilence(WrongGuardPool):
    """A guard that is dropped takes the knowledge of what it held with it."""

    class Guard(GuardedView):
        def __del__(self) -> None:
            pass


@planted("GUARD-9")
class ComplainsOfAPoolThatIsGone(WrongGuardPool):
    """An engine that ends, and takes its connector with it, leaves warnings behind."""

    class Guard(GuardedView):
        def __del__(self) -> None:
            logging.getLogger("kvview").warning("GUARD-9: %r was dropped", self.owner)


@planted("GUARD-3")
class TellsOfTheLastExpiryOnly(WrongGuardPool):
    """Of leases that ended together the last one is told."""

    class Guard(GuardedView):
        def release_expired(self) -> list[Leak]:
            return super().release_expired()[-1:]


@planted("GUARD-10", "vllm#52372")
class SharesOneAccount(WrongGuardPool):
    """Two connectors' guards count together: one gives back what the other holds."""

    class Guard(GuardedView):
        def __init__(self, view: GPUBlockPoolView, **options: Any) -> None:
            super().__init__(view, **options)
            if isinstance(view, GuardedView):
                self._view = view._view


@planted("POOL-10")
class ForgetsCountsAtTheEnd(WrongGuardPool):
    """The leak report at the end names each block once, however often it is held."""

    class Guard(GuardedView):
        def close(self) -> Mapping[int, int]:
            return dict.fromkeys(super().close(), 1)


@planted("POOL-2")
class LedgerIsASet(WrongGuardPool):
    """The guard knows which blocks it holds, not how often."""

    class Guard(GuardedView):
        def touch_blocks(self, block_ids: Sequence[int], /) -> None:
            new = Counter(block_ids)
            super().touch_blocks([block for block in new if not _is_plainly_held(self, block)])


@planted("GUARD-2")
class SwallowsWhatWasRaised(WrongGuardPool):
    """A ``with`` block over a lease hides every error of the copy inside."""

    class Guard(GuardedView):
        def lease(self, block_ids: Sequence[int], **options: Any) -> GuardedLease:
            lease = super().lease(block_ids, **options)
            lease.__class__ = _SwallowingLease
            return lease


class _SwallowingLease(GuardedLease):
    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        return self.release()


@planted("GUARD-3")
class ExpiresAfterGoodCallsOnly(WrongGuardPool):
    """A connector that is refused again and again keeps what has expired."""

    class Guard(GuardedView):
        def touch_blocks(self, block_ids: Sequence[int]) -> None:
            self._check_open()
            self._view.touch_blocks(block_ids)
            self._expire()


@planted("GUARD-3")
class ExpiresWhenItIsTouchedOnly(WrongGuardPool):
    """Whoever only looks is shown what has expired as held."""

    class Guard(GuardedView):
        def _query(self, name: str, *args: Any) -> Any:
            self._check_open()
            return getattr(self._below, name)(*args)


@planted("GUARD-5")
class UsesUpItsBudgetByRefusals(WrongGuardPool):
    """Each refused hold takes a block off the budget for good."""

    class Guard(GuardedView):
        def touch_blocks(self, block_ids: Sequence[int]) -> None:
            try:
                super().touch_blocks(block_ids)
            except PinBudgetExceeded:
                self._view.ledger.num_pinned += 1
                raise


@planted("GUARD-5")
class CountsPlainHoldsOnly(WrongGuardPool):
    """Room that leases take is told as room."""

    class Guard(GuardedView):
        def _num_pinnable_blocks(self) -> int:
            plain = {block for block, _, _ in self._view.references()}
            return (self._view.max_blocks or 0) - len(plain)


@planted("GUARD-5")
class ForgetsTheBudgetBelow(WrongGuardPool):
    """A guard over a guard tells its own budget, which is never to be had."""

    class Guard(GuardedView):
        def open_view(self, owner: str, max_blocks: int | None = None) -> LedgerView:
            view = super().open_view(owner, max_blocks)
            view.max_blocks = max_blocks
            return view

        def _num_pinnable_blocks(self) -> int:
            allowed = self._view.max_blocks or self.num_blocks
            return max(0, allowed - self._view.ledger.num_pinned)


@planted("GUARD-11")
class ReportsLeasesOnly(WrongGuardPool):
    """What a plain touch holds for ever is in no report."""

    class Guard(GuardedView):
        def leaks(self, older_than: float = 0.0) -> list[Leak]:
            return [leak for leak in super().leaks(older_than) if leak.job is not None]


@planted("GUARD-11")
class IsAsYoungAsItsRenewal(WrongGuardPool):
    """A lease that is renewed for ever is never old."""

    class Guard(GuardedView):
        def _renew(self, lease: GuardedLease, ttl: float) -> None:
            super()._renew(lease, ttl)
            lease._hold.stamp = self._stamp()


@planted("GUARD-11")
class TakesBackWhatWasClosed(WrongGuardPool):
    """An engine that ends a connector raises if that had closed its view."""

    class Guard(GuardedView):
        def free_all(self) -> None:
            if held := [block for block, _, _ in self._view.references()]:
                self._view.free_blocks(held)
            super().free_all()


@planted("GUARD-11")
class ReportsWhatWasGivenBack(WrongGuardPool):
    """Leases that have ended stay in the report."""

    class Guard(GuardedView):
        def _end(self, hold: Hold) -> None:
            super()._end(hold)
            self._holds.add(hold)


@planted("GUARD-11")
class ReportsWhatWasRefused(WrongGuardPool):
    """A lease that the budget refused is told as held."""

    class Guard(GuardedView):
        def lease(self, block_ids: Sequence[int], **options: Any) -> GuardedLease:
            try:
                return super().lease(block_ids, **options)
            except PinBudgetExceeded:
                self._holds.add(Hold(tuple(block_ids), options.get("job"), self._stamp()))
                raise


@planted("GUARD-11")
class ReportsAllUnderOneName(WrongGuardPool):
    """Whose a leak is can not be told."""

    class Guard(GuardedView):
        def leaks(self, older_than: float = 0.0) -> list[Leak]:
            return [replace(leak, owner=self.owner) for leak in super().leaks(older_than)]


@planted("GUARD-5")
class CountsABlockForEachGuard(WrongGuardPool):
    """A block that two guards hold takes room for two."""

    class Guard(GuardedView):
        def _num_pinnable_blocks(self) -> int:
            views = [v for v in self._view.ledger.views if v.is_open]
            twice = sum(len(v.held_blocks()) for v in views if v._parent is None)
            held = sum(times > 1 for times in self._view.ledger.num_holders or ())
            return max(0, super()._num_pinnable_blocks() - held * (twice > 3))


# --- what stands around it ---


@planted("GUARD-1")
class CountsWhatTheEngineRefused(WrongGuardPool):
    """A touch that failed in the engine is held in the guard's books for ever."""

    class Guard(GuardedView):
        def touch_blocks(self, block_ids: Sequence[int]) -> None:
            try:
                super().touch_blocks(block_ids)
            except RuntimeError:
                for block_id in block_ids:
                    self._view._held[block_id] += 1
                raise


@planted("GUARD-5")
class ForgetsWhatWasHeldBefore(WrongGuardPool):
    """A budget that is set while the server runs starts from nothing."""

    class Guard(GuardedView):
        def __init__(self, view: GPUBlockPoolView, **options: Any) -> None:
            super().__init__(view, **options)
            self._view.ledger.num_pinned = 0


@planted("GUARD-6")
class GoesOnInAFork(WrongGuardPool):
    """A forked worker gives back what the first process holds."""

    class Guard(GuardedView):
        def touch_blocks(self, block_ids: Sequence[int]) -> None:
            self._view.touch_blocks(block_ids)


@planted("GUARD-10")
class TrustsTheViewBelow(WrongGuardPool):
    """Over an engine that checks nothing, nothing is checked."""

    class Guard(GuardedView):
        def free_blocks(self, block_ids: Sequence[int]) -> None:
            with suppress(UnknownBlockError):
                super().free_blocks(block_ids)


@planted("GUARD-11")
class CountsNoRefusals(WrongGuardPool):
    """An exporter shows a connector that never does anything wrong."""

    class Guard(GuardedView):
        def __init__(self, view: GPUBlockPoolView, **options: Any) -> None:
            super().__init__(view, **options)
            self._view.count_refused = lambda: None  # type: ignore[method-assign]


@planted("GUARD-11")
class NamesItself(WrongGuardPool):
    """Every leak was taken in the guard's own file."""

    class Guard(GuardedView):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._view.caller = lambda: f"{__file__}:1 in lease"
