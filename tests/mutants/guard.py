"""Wrong guards."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvview import GPUBlockPoolView, GuardedView, Leak
from kvview.guard import GuardedLease
from kvview.testing import Mutant
from kvview_reference.harness import GuardedReferencePool

from .planting import planter

MUTANTS: list[Mutant] = []
planted = planter(MUTANTS)


class WrongGuardPool(GuardedReferencePool):
    """The pool behind a guard of the class ``Guard``."""

    Guard: type[GuardedView] = GuardedView

    def make_view(self) -> GPUBlockPoolView:
        return self.Guard(
            self.pool.view("mutant"),
            owner="mutant",
            pin_budget=self.pin_budget,
            clock=lambda: self.seconds,
        )


def _is_plainly_held(guard: GuardedView, block_id: int) -> bool:
    return guard._held[block_id] > guard._leased[block_id]


@planted("GUARD-1", "check_guard_1_failed_lease_holds_nothing")
class LeasesUntilAnIdIsWrong(WrongGuardPool):
    """Blocks are taken one by one; those before a wrong id stay taken."""

    class Guard(GuardedView):
        def lease(self, block_ids: Sequence[int], **options: Any) -> GuardedLease:
            leases = [super(type(self), self).lease([b], **options) for b in block_ids[:-1]]
            last = super().lease(block_ids, **options)
            for lease in leases:
                lease.release()
            return last


@planted("GUARD-1", "check_guard_1_lease_of_a_reused_block_is_refused", "vllm#46951")
class LeasesWhateverIsThere(WrongGuardPool):
    """A block that was reused since it was seen is held, and its bytes stored."""

    class Guard(GuardedView):
        def _check_keys(self, block_ids: Sequence[int], expected: Sequence[bytes]) -> None:
            pass


@planted("GUARD-1", "check_guard_1_hold_beyond_the_budget_is_refused", "vllm#42085")
class HasNoBudget(WrongGuardPool):
    """One connector may hold the whole pool; the next long request finds none."""

    class Guard(GuardedView):
        def _check_budget(self, block_ids: Sequence[int]) -> None:
            pass


@planted("GUARD-2", "check_guard_2_lease_gives_back_once")
class ReleasesTwice(WrongGuardPool):
    """A lease that has ended takes references of others with it."""

    class Guard(GuardedView):
        def _release(self, lease: GuardedLease) -> bool:
            if lease.is_active:
                return super()._release(lease)
            held = [block for block in lease.block_ids if _is_plainly_held(self, block)]
            self.free_blocks(list(dict.fromkeys(held)))
            return False


@planted("GUARD-2", "check_guard_2_lease_ends_when_an_exception_flies", "vllm#43742")
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


@planted("GUARD-2", "check_guard_2_leases_of_one_block_are_counted_apart", "vllm#52372")
class CountsLeasesByBlock(WrongGuardPool):
    """The end of one job's lease ends what any other job holds of its blocks."""

    class Guard(GuardedView):
        def _end(self, lease: GuardedLease) -> None:
            super()._end(lease)
            for other in list(self._leases):
                if set(other.block_ids) & set(lease.block_ids):
                    super()._end(other)


@planted("GUARD-2", "check_guard_2_leased_reference_can_not_be_freed_as_a_plain_one")
class FreesLeasesAsPlainHolds(WrongGuardPool):
    """``free_blocks`` gives back what a lease holds; its release does so again."""

    class Guard(GuardedView):
        def free_blocks(self, block_ids: Sequence[int], /) -> None:
            leased = [b for b in block_ids if b in self._leased and not _is_plainly_held(self, b)]
            super().free_blocks([block for block in block_ids if block not in leased])
            if leased and self._view is not None:
                self._view.free_blocks(leased)


@planted("GUARD-2", "check_guard_2_expired_lease_is_not_released_again", "vllm#51637")
class ReleasesAnExpiredLease(WrongGuardPool):
    """A release that comes after the expiry takes the reference of a newer hold."""

    class Guard(GuardedView):
        def _release(self, lease: GuardedLease) -> bool:
            if not lease.is_active:
                self.free_blocks([b for b in lease.block_ids if _is_plainly_held(self, b)])
                return True
            return super()._release(lease)


@planted("GUARD-3", "check_guard_3_lease_expires", "ROCm/ATOM#2261")
class HoldsForEver(WrongGuardPool):
    """A peer that never reports keeps its blocks until the engine ends."""

    class Guard(GuardedView):
        def _schedule(self, lease: GuardedLease, ttl: float) -> None:
            pass


@planted("GUARD-3", "check_guard_3_leases_expire_by_deadline_not_by_age", "vllm#58222")
class ExpiresInTheOrderTaken(WrongGuardPool):
    """The reaper looks at the oldest lease only; a short one behind it stays."""

    class Guard(GuardedView):
        def _expire(self) -> list[Leak]:
            oldest = min(self._leases, key=lambda lease: lease._since, default=None)
            taken = sorted(self.deadlines, key=lambda entry: entry[1])
            if oldest is not None and taken and taken[0][0] > self.now():
                return []
            return super()._expire()


@planted("GUARD-3", "check_guard_3_renewed_lease_expires_at_its_new_deadline", "vllm#50789")
class RenewsInPlace(WrongGuardPool):
    """A renewed lease keeps its old place in the queue of deadlines."""

    class Guard(GuardedView):
        def _renew(self, lease: GuardedLease, ttl: float) -> None:
            pass


@planted("GUARD-4", "check_guard_4_another_thread_is_refused")
class ServesAnyThread(WrongGuardPool):
    """Calls from other threads race with the scheduler's."""

    class Guard(GuardedView):
        def _check_open(self) -> GPUBlockPoolView:
            self._thread = threading.get_ident()
            return super()._check_open()


@planted("POOL-10", "check_pool_10_close_reports_what_was_held")
class ForgetsCountsAtTheEnd(WrongGuardPool):
    """The leak report at the end names each block once, however often it is held."""

    class Guard(GuardedView):
        def close(self) -> Mapping[int, int]:
            return dict.fromkeys(super().close(), 1)


@planted("POOL-2", "check_pool_2_two_touches_need_two_frees")
class LedgerIsASet(WrongGuardPool):
    """The guard knows which blocks it holds, not how often."""

    class Guard(GuardedView):
        def touch_blocks(self, block_ids: Sequence[int], /) -> None:
            new = Counter(block_ids)
            super().touch_blocks([block for block in new if not _is_plainly_held(self, block)])
