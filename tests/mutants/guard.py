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
class LeasesReusedBlocks(WrongGuardPool):
    """A lease takes a block that was reused, so wrong bytes are stored."""

    class Guard(GuardedView):
        def _check_keys(self, block_ids: Sequence[int], expected: Sequence[bytes]) -> None:
            pass


@planted("GUARD-5", "vllm#42085")
class HasNoBudget(WrongGuardPool):
    """One connector may hold the whole pool, so the next long request finds no block."""

    class Guard(GuardedView):
        def __init__(self, view: GPUBlockPoolView, **options: Any) -> None:
            super().__init__(view, **options)
            self._view.max_blocks = None


@planted("GUARD-2", "vllm#43742")
class LeaksOnAnException(WrongGuardPool):
    """A ``with`` block that ends with an exception does not release its lease."""

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
    """The end of one job's lease also ends the leases of other jobs on its blocks."""

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
class NeverExpires(WrongGuardPool):
    """The blocks of a peer that never reports stay held until the engine ends."""

    class Guard(GuardedView):
        def _schedule(self, hold: Hold, ttl: float) -> None:
            pass


@planted("GUARD-3", "vllm#58222")
class ExpiresInTheOrderTaken(WrongGuardPool):
    """Only the oldest lease can expire, so a shorter one taken later stays."""

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
    """Calls from other threads are accepted, and race with the scheduler's."""

    class Guard(GuardedView):
        def _check_open(self) -> None:
            self._home = here.home
            super()._check_open()


@planted("GUARD-6")
class CopiesLikeAnyObject(WrongGuardPool):
    """A lease can be copied, so its references are released twice."""

    class Guard(GuardedView):
        def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
            return object.__reduce_ex__(self, protocol)


@planted("GUARD-7")
class OutlivesItsView(WrongGuardPool):
    """A lease of a closed view stays active."""

    class Guard(GuardedView):
        @property
        def is_open(self) -> bool:
            return True


@planted("GUARD-8")
class DoesNotRetryARefusedExpiry(WrongGuardPool):
    """The blocks of an expired lease stay held if the engine refuses them once."""

    class Guard(GuardedView):
        def _end(self, hold: Hold) -> None:
            with suppress(RuntimeError):
                super()._end(hold)


@planted("GUARD-9")
class IsDroppedSilently(WrongGuardPool):
    """A guard that is garbage-collected while it holds blocks logs nothing."""

    class Guard(GuardedView):
        def __del__(self) -> None:
            pass


@planted("GUARD-10", "vllm#52372")
class SharesOneAccount(WrongGuardPool):
    """Two connectors' guards share one count, so one can free the other's blocks."""

    class Guard(GuardedView):
        def __init__(self, view: GPUBlockPoolView, **options: Any) -> None:
            super().__init__(view, **options)
            if isinstance(view, GuardedView):
                self._view = view._view


@planted("GUARD-11")
class ReportsLeasesOnly(WrongGuardPool):
    """The leak report omits plain touches."""

    class Guard(GuardedView):
        def leaks(self, older_than: float = 0.0) -> list[Leak]:
            return [leak for leak in super().leaks(older_than) if leak.job is not None]
