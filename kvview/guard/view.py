"""The guard: what a connector gets by default instead of a bare view.

An engine that does not check lets a connector free twice, free what another one
holds, or pin the whole pool; what follows is seen hours later (vLLM #42571,
#42085). ``GuardedView`` keeps a ledger and refuses first.

- GUARD-1 Everything **must** be checked before anything changes: after an error
  the pool, the ledger and the leases are as they were.
- GUARD-2 A lease **must** give its references back exactly once: by ``release``,
  by the end of its ``with`` block, or by expiry, whichever comes first.
- GUARD-3 Leases **must** expire in the order of their deadlines, whatever the
  order in which they were taken or renewed (vLLM #58222, #50789).
- GUARD-4 A call from another thread than the guard's **must** raise.

Source: vLLM issues #41383 and #46289 (leases), #27046 (pin caps); the incidents
above.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from threading import get_ident
from typing import Any

from kvview.errors import (
    BlockNotHeldError,
    ConfigError,
    PinBudgetExceeded,
    StaleBlockError,
    UnknownBlockError,
    ViewClosedError,
    WrongThreadError,
)
from kvview.guard.lease import GuardedLease, Leak
from kvview.keys import OffloadKey, require_offload_key
from kvview.pool import GPUBlockPoolView, SupportsReuseNotice

_OPTIONAL_QUERIES = (
    "num_free_blocks",
    "is_free",
    "block_keys",
    "primary_keys",
    "find_cached_block",
    "iter_free_block_ids",
    "walk_free_blocks",
)


@dataclass
class GuardStats:
    """Counters since the guard was made, for a metrics exporter.

    Args:
        touched: References taken.
        freed: References given back.
        leases: Leases taken.
        expired: Leases that ended by expiry.
        refused: Calls that raised.
        peak_held: Most references held at once.
    """

    touched: int = 0
    freed: int = 0
    leases: int = 0
    expired: int = 0
    refused: int = 0
    peak_held: int = 0


_Taken = tuple[float, str | None]


class GuardedView:
    """A view with a ledger: checks first, leases, a budget, a leak report.

    1. Keeps POOL-2 to POOL-5 and POOL-10 over a view that does not check.
    2. Has exactly the optional queries that the view under it has.
    3. References are either plain (``touch_blocks``/``free_blocks``) or a lease's;
       one kind can not give back the other's.

    Args:
        view: The view to guard.
        owner: Named in errors and reports.
        pin_budget: Largest share of the pool's blocks that may be held at once,
            0 to 1; None for no limit.
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
        self.owner = owner
        self.stats = GuardStats()
        self.now = clock
        self._view: GPUBlockPoolView | None = view
        self._trace = trace
        self._thread = get_ident()
        self._null = getattr(view, "null_block_id", 0)
        size: int | None = getattr(view, "num_blocks", None)
        if size is None and pin_budget is not None:
            raise ConfigError("a pin budget needs a view that knows num_blocks")
        self._size = size
        self._max_held = None if size is None or pin_budget is None else int(pin_budget * size)
        if size is not None:
            self.num_blocks, self.null_block_id = size, self._null
        for name in _OPTIONAL_QUERIES:
            if hasattr(view, name):
                # On the instance, so that isinstance(guard, Supports...) tells the truth.
                setattr(self, name, partial(self._query, name))
        if isinstance(view, SupportsReuseNotice):
            self.free_blocks_with_notice = partial(self._free_with_notice, view)
        # By block id: all references, and when and where the last plain one was taken.
        # Lists where the size is known: dicts cost a third more (benchmarks/guard.py).
        self._held: list[int] | dict[int, int] = defaultdict(int) if size is None else [0] * size
        self._since: list[_Taken | None] | dict[int, _Taken | None]
        self._since = {} if size is None else [None] * size
        self._leased: Counter[int] = Counter()  # the leases' part of _held
        self._pinned: set[int] = set()  # the blocks held, for the budget alone
        self._leases: set[GuardedLease] = set()
        self.deadlines: list[tuple[float, int, GuardedLease]] = []  # a heap; empty: none can expire
        self._serial = count()

    # --- the contract ---

    def touch_blocks(self, block_ids: Sequence[int]) -> None:
        """Take one reference on each block named, once per occurrence."""
        real = self._take(block_ids)
        taken = self.now(), self._caller() if self._trace else None
        since = self._since
        for block_id in real:
            since[block_id] = taken

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """Give back one plain reference on each block named, once per occurrence."""
        view = self._view
        if view is None or self.deadlines or get_ident() != self._thread:
            view = self._enter()
        held, null = self._held, self._null
        real: list[int] = []
        may_repeat = False
        try:
            for block_id in list(block_ids):
                if type(block_id) is not int or block_id < 0:
                    raise IndexError
                if block_id != null:
                    if (times := held[block_id]) == 1:
                        held[block_id] = 0
                    elif times:
                        held[block_id] = times - 1
                        may_repeat = True
                    else:
                        raise IndexError
                    real.append(block_id)
        except IndexError:
            self._count(real, 1)
            self._check_block_ids((block_id,))
            raise self._not_held(block_id, [*real, block_id]) from None
        try:
            if self._leased:
                self._check_not_leased(real)
            self._give_back(view, real, may_repeat)
        except BaseException:
            self._count(real, 1)
            raise

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
        """Walk the free blocks that still hold reusable KV, next victim first."""
        for block_id, block_hash in self._enter().iter_free_block_ids_with_hash():
            if block_id != self._null:
                yield block_id, block_hash
                self._enter()

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
            StaleBlockError: A block does not hold the hash expected any more.
            PinBudgetExceeded: More blocks than the budget allows.
            ConfigError: ``ttl`` is not positive, or the view cannot tell hashes.
        """
        self._enter()
        if ttl is not None and not ttl > 0:
            raise ConfigError(f"ttl must be positive seconds, got {ttl}")
        if expected_keys is not None:
            block_ids = list(block_ids)
            self._check_block_ids(block_ids)
            self._check_keys(block_ids, expected_keys)
        real = self._take(block_ids)
        lease = GuardedLease(self, tuple(real), job, self._caller() if self._trace else None)
        self._leased.update(real)
        self._leases.add(lease)
        self.stats.leases += 1
        if ttl is not None:
            self._schedule(lease, ttl)
        return lease

    def release_expired(self) -> list[Leak]:
        """Release the leases whose deadline has passed; every other call does so too.

        Returns:
            What was released, earliest deadline first.
        """
        self._check_open()
        return self._expire() if self.deadlines else []

    def _expire(self) -> list[Leak]:
        expired = []
        now = self.now()
        while self.deadlines and self.deadlines[0][0] <= now:
            deadline, _, lease = heapq.heappop(self.deadlines)
            if lease.is_active and lease.deadline == deadline:  # else renewed or released
                expired.append(lease.leak())
                self.stats.expired += 1
                self._end(lease)
        return expired

    def _schedule(self, lease: GuardedLease, ttl: float) -> None:
        lease.deadline = self.now() + ttl
        heapq.heappush(self.deadlines, (lease.deadline, next(self._serial), lease))

    def _renew(self, lease: GuardedLease, ttl: float) -> None:
        self._enter()
        if not ttl > 0:
            raise ConfigError(f"ttl must be positive seconds, got {ttl}")
        if not lease.is_active:
            raise BlockNotHeldError(f"the lease of job {lease.job!r} has ended: take a new one")
        self._schedule(lease, ttl)

    def _release(self, lease: GuardedLease) -> bool:
        if self._view is None or not lease.is_active:
            return False  # close() or expiry was first
        self._enter()
        if not lease.is_active:
            return False
        self._end(lease)
        return True

    def _end(self, lease: GuardedLease) -> None:
        assert self._view is not None, "only an open guard ends leases"
        self._count(lease.block_ids, -1)
        try:
            self._give_back(self._view, lease.block_ids, may_repeat=True)
        except BaseException:
            self._count(lease.block_ids, 1)
            raise
        lease.is_active = False
        self._leases.remove(lease)
        self._leased -= Counter(lease.block_ids)

    # --- reports ---

    def held_blocks(self) -> Mapping[int, int]:
        """References held, plain and leased, ``{block_id: count}``."""
        self._enter()
        return self._references()

    def leaks(self, older_than: float = 0.0) -> list[Leak]:
        """What is held for at least ``older_than`` seconds, oldest first."""
        now = self.now()
        plain: dict[_Taken, list[int]] = {}
        for block_id, times in self._references().items():
            if times > self._leased[block_id]:
                taken = self._since[block_id]
                assert taken is not None, "every plain reference is noted"
                plain.setdefault(taken, []).extend([block_id] * (times - self._leased[block_id]))
        leaks = [
            Leak(self.owner, None, tuple(block_ids), now - since, taken_at)
            for (since, taken_at), block_ids in plain.items()
        ]
        leaks += [lease.leak() for lease in self._leases]
        leaks = [leak for leak in leaks if leak.age >= older_than]
        return sorted(leaks, key=lambda leak: -leak.age)

    def close(self) -> Mapping[int, int]:
        """Close the guard and the view under it; reports what was still held.

        ``leaks`` still tells more about it afterwards.
        """
        still_held = self._references()
        for lease in self._leases:
            lease.is_active = False
        view, self._view = self._view, None
        if view is None:
            return {}
        close = getattr(view, "close", None)
        if close is not None:
            close()
        return still_held

    # --- the ledger ---

    def _take(self, block_ids: Sequence[int]) -> list[int]:
        """Take references, or raise with nothing changed; the ids without the null block."""
        view = self._view
        if view is None or self.deadlines or get_ident() != self._thread:
            view = self._enter()
        # One loop that checks and counts; sets and Counter cost more (benchmarks/guard.py).
        held, null = self._held, self._null
        real: list[int] = []
        try:
            for block_id in list(block_ids):
                if type(block_id) is not int or block_id < 0:
                    raise IndexError
                if block_id != null:
                    held[block_id] += 1
                    real.append(block_id)
        except IndexError:
            self._count(real, -1)
            self._check_block_ids((block_id,))
            raise
        try:
            if self._max_held is not None:
                self._check_budget(real)
            view.touch_blocks(real)
        except BaseException:
            self._count(real, -1)
            raise
        if self._max_held is not None:
            self._pinned.update(real)
        stats = self.stats
        stats.touched += len(real)
        if stats.touched - stats.freed > stats.peak_held:
            stats.peak_held = stats.touched - stats.freed
        return real

    def _give_back(
        self, view: GPUBlockPoolView, block_ids: Sequence[int], may_repeat: bool
    ) -> None:
        """Tell the view below; the ledger has let go of these already."""
        if may_repeat:
            # Engines up to vLLM 0.23 queue a block twice that one call names twice (vLLM
            # #42571): surplus mentions go first, and what may set blocks free goes last,
            # in the order of the last mentions (POOL-11).
            last = list(dict.fromkeys(reversed(block_ids)))[::-1]
            surplus = Counter(block_ids)
            surplus.subtract(last)
            while surplus := +surplus:
                view.free_blocks(list(surplus))
                surplus.subtract(list(surplus))
            view.free_blocks(last)
        else:
            view.free_blocks(block_ids)
        if self._max_held is not None:
            self._pinned.difference_update(b for b in block_ids if not self._held[b])
        self.stats.freed += len(block_ids)

    def _free_with_notice(
        self, view: SupportsReuseNotice, block_ids: Sequence[int], on_reuse: Callable[[int], None]
    ) -> None:
        self._enter()
        block_ids = list(block_ids)
        self._check_block_ids(block_ids)
        real = [block_id for block_id in block_ids if block_id != self._null]
        for block_id, times in Counter(real).items():
            if times > self._held[block_id] - self._leased[block_id]:
                raise self._not_held(block_id, real)
        self._count(real, -1)
        try:
            view.free_blocks_with_notice(real, on_reuse)
        except BaseException:
            self._count(real, 1)
            raise
        if self._max_held is not None:
            self._pinned.difference_update(b for b in real if not self._held[b])
        self.stats.freed += len(real)

    def _count(self, block_ids: Sequence[int], step: int) -> None:
        held = self._held
        for block_id in block_ids:
            held[block_id] += step

    def _references(self) -> dict[int, int]:
        held = self._held
        pairs = held.items() if isinstance(held, dict) else enumerate(held)
        return {block_id: times for block_id, times in pairs if times}

    # --- checks ---

    def _check_open(self) -> GPUBlockPoolView:
        if get_ident() != self._thread:
            self.stats.refused += 1
            raise WrongThreadError(
                f"the guard of {self.owner!r} belongs to thread {self._thread}, called from "
                f"{get_ident()}: call it on the scheduler's thread only"
            )
        if self._view is None:
            self.stats.refused += 1
            raise ViewClosedError(
                f"POOL-10: the view of {self.owner!r} was closed; ask the engine for a new one"
            )
        return self._view

    def _enter(self) -> GPUBlockPoolView:
        view = self._check_open()
        if self.deadlines and self.deadlines[0][0] <= self.now():
            self._expire()
        return view

    def _check_block_ids(self, block_ids: Sequence[int]) -> None:
        last = self._size if self._size is not None else float("inf")
        for block_id in block_ids:
            if type(block_id) is not int or not 0 <= block_id < last:
                self.stats.refused += 1
                raise UnknownBlockError(
                    f"POOL-4: {block_id!r} ({type(block_id).__name__}) is no block of the pool "
                    f"of {self.owner!r}; block ids are ints from 0 to {last - 1:.0f}"
                )

    def _check_not_leased(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            if self._held[block_id] < self._leased[block_id]:
                self._count(block_ids, 1)
                error = self._not_held(block_id, block_ids)
                self._count(block_ids, -1)
                raise error

    def _not_held(self, block_id: int, block_ids: Sequence[int]) -> BlockNotHeldError:
        self.stats.refused += 1
        leased = self._leased[block_id]
        return BlockNotHeldError(
            f"POOL-4: {self.owner!r} frees block {block_id} {block_ids.count(block_id)}x and "
            f"holds it {self._held[block_id] - leased}x"
            + (f", beside {leased} leased" if leased else "")
        )

    def _check_budget(self, block_ids: Sequence[int]) -> None:
        wanted = len(self._pinned) + len(set(block_ids) - self._pinned)
        if self._max_held is not None and wanted > self._max_held:
            self.stats.refused += 1
            raise PinBudgetExceeded(
                f"{self.owner!r} would hold {wanted} blocks, its budget is {self._max_held} of "
                f"{self._size}: free some first, or store later"
            )

    def _check_keys(self, block_ids: Sequence[int], expected: Sequence[OffloadKey]) -> None:
        keys_of = getattr(self, "block_keys", None)
        if keys_of is None or len(expected) != len(block_ids):
            raise ConfigError(
                f"expected_keys needs a view with block_keys, and one key a block: "
                f"{len(expected)} for {len(block_ids)} blocks"
            )
        for block_id, key, keys in zip(block_ids, expected, keys_of(block_ids), strict=True):
            if block_id != self._null and require_offload_key(key) not in keys:
                self.stats.refused += 1
                raise StaleBlockError(
                    f"block {block_id} does not hold {key.hex()} any more: it was reused "
                    f"or evicted since it was seen"
                )

    def _query(self, name: str, *args: Any) -> Any:
        return getattr(self._enter(), name)(*args)

    def _caller(self) -> str | None:
        import traceback  # a third of the import time of all kvview, for tracing alone

        for frame in reversed(traceback.extract_stack()):
            if frame.filename != __file__:
                return f"{frame.filename}:{frame.lineno} in {frame.name}"
        return None
