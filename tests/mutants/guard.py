"""Wrong guards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, SupportsIndex

from kvview import GPUBlockPoolView, GuardedView, Leak
from kvview.guard import GuardedLease
from kvview.guard.home import here
from kvview.guard.lease import Hold
from kvview.testing import Mutant
from kvview_reference.harness import GuardedReferencePool

from .planting import planter

MUTANTS: list[Mutant] = []
planted = planter(MUTANTS)


class WrongGuardPool(GuardedReferencePool):
    """The pool behind a guard of the class ``Guard``."""


def _is_plainly_held(guard: GuardedView, block_id: int) -> bool:
    return guard._view._held[block_id] > 0


@planted("GUARD-1", "vllm#46951")
class LeasesWhateverIsThere(WrongGuardPool):
    """A block that was reused since it was seen is held, and its bytes stored."""

    class Guard(GuardedView):
        def _check_keys(self, block_ids: Sequence[int], expected: Sequence[bytes]) -> None:
            pass


@planted("GUARD-5", "vllm#42085")
class HasNoBudget(WrongGuardPool):
    """One connector may hold the whole pool; the next long request finds none."""

    class Guard(GuardedView):
        def __init__(self, view: GPUBlockPoolView, **options: Any) -> None:
            super().__init__(view, **options)
            self._view.max_blocks = None


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


@planted("GUARD-6")
class CopiesLikeAnyObject(WrongGuardPool):
    """A copy of a lease gives back what the original gives back too."""

    class Guard(GuardedView):
        def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
            return object.__reduce_ex__(self, protocol)


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


@planted("GUARD-10", "vllm#52372")
class SharesOneAccount(WrongGuardPool):
    """Two connectors' guards count together: one gives back what the other holds."""

    class Guard(GuardedView):
        def __init__(self, view: GPUBlockPoolView, **options: Any) -> None:
            super().__init__(view, **options)
            if isinstance(view, GuardedView):
                self._view = view._view


class _SwallowingLease(GuardedLease):
    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        return self.release()


@planted("GUARD-11")
class ReportsLeasesOnly(WrongGuardPool):
    """What a plain touch holds for ever is in no report."""

    class Guard(GuardedView):
        def leaks(self, older_than: float = 0.0) -> list[Leak]:
            return [leak for leak in super().leaks(older_than) if leak.job is not None]


# --- what stands around it ---
