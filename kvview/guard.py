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
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import TracebackType
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
from kvview.pool import GPUBlockPoolView

_INT_ONLY = {int}
_OPTIONAL_QUERIES = (
    "num_free_blocks",
    "is_free",
    "block_hashes",
    "find_cached_block",
    "iter_free_block_ids",
)


@dataclass(frozen=True)
class Leak:
    """Blocks that were held too long, or at the end.

    Args:
        owner: Whose guard it is.
        job: The lease's job, or None for plain touches.
        block_ids: The blocks, one entry a reference.
        age: Seconds since the last of them was taken.
        taken_at: ``file:line in function`` of the caller when tracing, else None.
    """

    owner: str
    job: object
    block_ids: tuple[int, ...]
    age: float
    taken_at: str | None

    def __str__(self) -> str:
        where = self.taken_at or "unknown: trace=True tells"
        return (
            f"{self.owner!r} holds {len(self.block_ids)} references for {self.age:.1f} s "
            f"(job {self.job!r}, blocks {list(self.block_ids[:8])}, taken at {where})"
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


class Lease:
    """References that are given back exactly once (GUARD-2); made by ``lease``.

    As a context manager it ends with the block; as an object, by ``release``.
    """

    def __init__(
        self, guard: GuardedView, block_ids: tuple[int, ...], job: object, taken_at: str | None
    ) -> None:
        self.block_ids = block_ids
        self.job = job
        self.deadline: float | None = None
        self.is_active = True
        self._guard = guard
        self._since = guard.now()
        self._taken_at = taken_at

    def renew(self, ttl: float) -> None:
        """Move the deadline to ``ttl`` seconds from now.

        Raises:
            BlockNotHeldError: The lease has ended: its blocks may be anyone's.
            ConfigError: ``ttl`` is not positive.
        """
        self._guard._renew(self, ttl)

    def release(self) -> bool:
        """Give the references back; False when the lease had ended already."""
        return self._guard._release(self)

    def leak(self) -> Leak:
        """What a leak report says of this lease."""
        age = self._guard.now() - self._since
        return Leak(self._guard.owner, self.job, self.block_ids, age, self._taken_at)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


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
        self._thread = threading.get_ident()
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
        self._held: Counter[int] = Counter()  # plain references
        self._since: dict[int, tuple[float, str | None]] = {}
        self._leased: Counter[int] = Counter()
        self._leases: set[Lease] = set()
        self._deadlines: list[tuple[float, int, Lease]] = []
        self._serial = count()

    # --- the contract ---

    def touch_blocks(self, block_ids: Sequence[int], /) -> None:
        """Take one reference on each block named, once per occurrence."""
        view = self._enter()
        real = self._check(block_ids)
        self._check_budget(real)
        view.touch_blocks(real)
        self._held.update(real)
        self._since.update(dict.fromkeys(real, (self.now(), self._caller())))
        self._count_touched(len(real))

    def free_blocks(self, block_ids: Sequence[int], /) -> None:
        """Give back one plain reference on each block named, once per occurrence."""
        view = self._enter()
        real = self._check(block_ids)
        held = self._held
        is_unique = len(set(real)) == len(real)
        for block_id, times in ((b, 1) for b in real) if is_unique else Counter(real).items():
            if held.get(block_id, 0) < times:
                self.stats.refused += 1
                raise BlockNotHeldError(
                    f"POOL-4: {self.owner!r} frees block {block_id} {times}x and holds it "
                    f"{held.get(block_id, 0)}x"
                    + (
                        f", beside {self._leased[block_id]} leased"
                        if self._leased[block_id]
                        else ""
                    )
                )
        self._give_back(view, real)
        for block_id in real:
            left = held[block_id] - 1
            if left:
                held[block_id] = left
            else:
                del held[block_id], self._since[block_id]

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, bytes]]:
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
        expected_hashes: Sequence[bytes] | None = None,
    ) -> Lease:
        """Hold blocks until released, at most ``ttl`` seconds.

        Args:
            block_ids: What to hold; the null block is skipped.
            job: Named in reports; one job may have several leases.
            ttl: Seconds until the lease ends by itself, or None. Expired leases
                are released at the next call of any kind.
            expected_hashes: One hash a block: hold only if each block still has it.

        Returns:
            A lease, active from now; also a context manager.

        Raises:
            StaleBlockError: A block does not hold the hash expected any more.
            PinBudgetExceeded: More blocks than the budget allows.
            ConfigError: ``ttl`` is not positive, or the view cannot tell hashes.
        """
        view = self._enter()
        real = self._check(block_ids)
        if ttl is not None and not ttl > 0:
            raise ConfigError(f"ttl must be positive seconds, got {ttl}")
        if expected_hashes is not None:
            self._check_hashes(block_ids, expected_hashes)
        self._check_budget(real)
        view.touch_blocks(real)
        lease = Lease(self, tuple(real), job, self._caller())
        self._leased.update(real)
        self._leases.add(lease)
        self.stats.leases += 1
        self._count_touched(len(real))
        if ttl is not None:
            self._schedule(lease, ttl)
        return lease

    def release_expired(self) -> list[Leak]:
        """Release the leases whose deadline has passed; every other call does so too.

        Returns:
            What was released, earliest deadline first.
        """
        self._check_open()
        return self._expire()

    def _expire(self) -> list[Leak]:
        expired = []
        now = self.now()
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, _, lease = heapq.heappop(self._deadlines)
            if lease.is_active and lease.deadline == deadline:  # else renewed or released
                expired.append(lease.leak())
                self.stats.expired += 1
                self._end(lease)
        return expired

    def _schedule(self, lease: Lease, ttl: float) -> None:
        lease.deadline = self.now() + ttl
        heapq.heappush(self._deadlines, (lease.deadline, next(self._serial), lease))

    def _renew(self, lease: Lease, ttl: float) -> None:
        self._enter()
        if not ttl > 0:
            raise ConfigError(f"ttl must be positive seconds, got {ttl}")
        if not lease.is_active:
            raise BlockNotHeldError(f"the lease of job {lease.job!r} has ended: take a new one")
        self._schedule(lease, ttl)

    def _release(self, lease: Lease) -> bool:
        if self._view is None or not lease.is_active:
            return False  # close() or expiry was first
        self._enter()
        if not lease.is_active:
            return False
        self._end(lease)
        return True

    def _end(self, lease: Lease) -> None:
        assert self._view is not None, "only an open guard ends leases"
        self._give_back(self._view, lease.block_ids)
        lease.is_active = False
        self._leases.remove(lease)
        self._leased -= Counter(lease.block_ids)

    # --- reports ---

    def held_blocks(self) -> Mapping[int, int]:
        """References held, plain and leased, ``{block_id: count}``."""
        self._enter()
        return dict(self._held + self._leased)

    def leaks(self, older_than: float = 0.0) -> list[Leak]:
        """What is held for at least ``older_than`` seconds, oldest first."""
        now = self.now()
        plain: dict[tuple[float, str | None], list[int]] = {}
        for block_id, times in self._held.items():
            plain.setdefault(self._since[block_id], []).extend([block_id] * times)
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
        still_held = dict(self._held + self._leased)
        for lease in self._leases:
            lease.is_active = False
        view, self._view = self._view, None
        if view is None:
            return {}
        close = getattr(view, "close", None)
        if close is not None:
            close()
        return still_held

    # --- checks ---

    def _check_open(self) -> GPUBlockPoolView:
        if threading.get_ident() != self._thread:
            self.stats.refused += 1
            raise WrongThreadError(
                f"the guard of {self.owner!r} belongs to thread {self._thread}, called from "
                f"{threading.get_ident()}: call it on the scheduler's thread only"
            )
        if self._view is None:
            self.stats.refused += 1
            raise ViewClosedError(
                f"POOL-10: the view of {self.owner!r} was closed; ask the engine for a new one"
            )
        return self._view

    def _enter(self) -> GPUBlockPoolView:
        view = self._check_open()
        if self._deadlines and self._deadlines[0][0] <= self.now():
            self._expire()
        return view

    def _check(self, block_ids: Sequence[int]) -> Sequence[int]:
        """The ids without the null block, when all of them name blocks."""
        if block_ids:
            last = self._size if self._size is not None else float("inf")
            is_int = set(map(type, block_ids)) == _INT_ONLY
            if not is_int or min(block_ids) < 0 or max(block_ids) >= last:
                self.stats.refused += 1
                wrong = next(b for b in block_ids if type(b) is not int or not 0 <= b < last)
                raise UnknownBlockError(
                    f"POOL-4: {wrong!r} ({type(wrong).__name__}) is no block of the pool of "
                    f"{self.owner!r}; block ids are ints from 0 to {last - 1:.0f}"
                )
        if self._null in block_ids:
            return [block_id for block_id in block_ids if block_id != self._null]
        return block_ids

    def _check_budget(self, block_ids: Sequence[int]) -> None:
        limit = self._max_held
        if limit is None or len(self._held) + len(self._leased) + len(block_ids) <= limit:
            return
        wanted = len(self._held.keys() | self._leased.keys() | set(block_ids))
        if wanted > limit:
            self.stats.refused += 1
            raise PinBudgetExceeded(
                f"{self.owner!r} would hold {wanted} blocks, its budget is {limit} of "
                f"{self._size}: free some first, or store later"
            )

    def _check_hashes(self, block_ids: Sequence[int], expected: Sequence[bytes]) -> None:
        hashes_of = getattr(self, "block_hashes", None)
        if hashes_of is None or len(expected) != len(block_ids):
            raise ConfigError(
                f"expected_hashes needs a view with block_hashes, and one hash a block: "
                f"{len(expected)} for {len(block_ids)} blocks"
            )
        for block_id, block_hash in zip(block_ids, expected, strict=True):
            if block_id != self._null and block_hash not in hashes_of(block_id):
                self.stats.refused += 1
                raise StaleBlockError(
                    f"block {block_id} does not hold {block_hash.hex()} any more: it was reused "
                    f"or evicted since it was seen"
                )

    def _give_back(self, view: GPUBlockPoolView, block_ids: Sequence[int]) -> None:
        # Engines up to vLLM 0.23 queue a block twice that one call names twice (vLLM
        # #42571): surplus mentions go first, and what may set blocks free goes last,
        # in the order of the last mentions (POOL-11).
        last = list(dict.fromkeys(reversed(block_ids)))[::-1]
        if len(last) < len(block_ids):
            surplus = Counter(block_ids)
            surplus.subtract(last)
            while surplus := +surplus:
                view.free_blocks(list(surplus))
                surplus.subtract(list(surplus))
        view.free_blocks(last)
        self.stats.freed += len(block_ids)

    def _count_touched(self, number: int) -> None:
        stats = self.stats
        stats.touched += number
        stats.peak_held = max(stats.peak_held, stats.touched - stats.freed)

    def _query(self, name: str, *args: Any) -> Any:
        return getattr(self._enter(), name)(*args)

    def _caller(self) -> str | None:
        if not self._trace:
            return None
        import traceback  # a third of the import time of all kvview, for tracing alone

        for frame in reversed(traceback.extract_stack()):
            if frame.filename != __file__:
                return f"{frame.filename}:{frame.lineno} in {frame.name}"
        return None
