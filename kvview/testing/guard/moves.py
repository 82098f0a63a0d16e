"""Operations on guards and leases, which run on a pool and on the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar

from typing_extensions import override

from kvview.errors import (
    BlockNotHeldError,
    ConfigError,
    KVViewError,
    NotAnOffloadKeyError,
    PinBudgetExceeded,
    StaleBlockError,
    UnknownBlockError,
    WrongThreadError,
)
from kvview.testing.guard.model import GuardModel, LeaseModel
from kvview.testing.guard.unchecked import UncheckedPool
from kvview.testing.harness import Capability as C
from kvview.testing.pool.model import PoolModel
from kvview.testing.pool.player import PoolPlayer
from kvview.testing.search import operation

TICK = 1 / 1024
"""Unit of all times, so that floats are exact; no two leases expire at the same time."""
_MAX_VIEWS = 5
_MAX_LEASES = 12
_RAISED = (None, ValueError("x"), BlockNotHeldError("POOL-4: x"), StopIteration())


def in_a_thread(call: Callable[[], object]) -> None:
    """Run a call on another thread, and re-raise its exception on this thread."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(call).result()


class GuardMoves(PoolPlayer):
    """Plays operations on the guards over one pool, and on their leases."""

    Model: ClassVar[type[PoolModel]] = GuardModel
    sizes = (16, 20, 24, 40)
    model: GuardModel

    @override
    def start(self) -> None:
        self.budget: int | None = None
        super().start()
        self.has_events = False
        self.guard_of = {id(self.subject): 0}
        if self.plan.is_small and not self.plan.moves:  # an example uses the harness's own guard
            return
        kind = self.rng.random()
        if kind < 0.4 and self.can(C.PIN_BUDGET):
            self.budget = self.rng.randint(1, self.num_blocks - 1)
            self.use(self.call(self.harness, "budgeted", self.budget), "view")
            self.begin()
        elif kind < 0.65 and self.can(C.GUARDS):
            line = "from kvview.testing.guard.unchecked import UncheckedPool"
            self.give_name(self, "kit", f"{line}\nclass kit: unchecked = UncheckedPool")
            has_size = self.rng.random() < 0.7
            pool = self.call(
                self, "unchecked", self.harness, self.harness.num_blocks, has_size=has_size
            )
            self.use(pool, "view")
            self.begin()
            if not has_size:  # without a size no id is too large
                self.not_blocks = tuple(
                    one for one in self.not_blocks if type(one) is not int or one < 0
                )

    unchecked = UncheckedPool

    @override
    def begin(self) -> None:
        super().begin()
        self.model.make_guard(0, None, self.budget)
        self.leases: list[tuple[Any, LeaseModel]] = []
        """The leases that were taken last, both active and ended."""
        self.num_jobs = 0
        self.owners: dict[int, str] = {}
        """The name of each guard's owner, once a leak report has named it."""
        self.guard_of = {id(self.subject): 0}

    @override
    def end(self) -> None:
        for view in self.views:
            if hasattr(view, "close"):
                view.close()  # because a dropped guard with blocks is logged (GUARD-9)

    # --- calls ---

    @override
    def refused(
        self,
        error: type[Exception],
        receiver: object,
        method: str,
        *args: Any,
        law: str | None = None,
        **kwargs: Any,
    ) -> Exception:
        raised = super().refused(error, receiver, method, *args, law=law, **kwargs)
        at = self.guard_of.get(id(receiver))
        if at is not None and isinstance(raised, KVViewError):
            self.model.stats[at]["refused"] += 1
        return raised

    @override
    def hold(self, at: int, blocks: Sequence[int]) -> bool:
        is_allowed = self.model.may_hold(at, blocks)
        if is_allowed:
            return super().hold(at, blocks)
        if is_allowed is False:
            self.refused(PinBudgetExceeded, self.views[at], "touch_blocks", blocks, law="GUARD-5")
            self.blame("GUARD-5")
        return False

    @override
    def closing(self, at: int) -> set[int]:
        return self.model.closing(at)

    def guards(self) -> list[int]:
        """Return the open guards, each after the view under it."""
        return [at for at in self.model.stats if at not in self.model.closed]

    def some_lease(self) -> tuple[Any, LeaseModel] | None:
        """Draw a lease, sometimes a lease that has ended."""
        active = [pair for pair in self.leases if self.model.is_active(pair[1])]
        among = active if active and self.rng.random() < 0.75 else self.leases
        return self.rng.choice(among) if among else None

    @override
    @operation("POOL-13", C.CACHE, C.RESUMABLE_WALK)
    def resume_walk(self) -> None:
        super().resume_walk()
        for one in self.resumed:
            if one.view in self.model.stats:
                self.guard_of[id(one.walk)] = one.view

    # --- guards ---

    @operation("GUARD-10", C.GUARDS, weight=4)
    def open_guard(self, below: int | None = None) -> None:
        """Open a guard over any view, with or without a budget."""
        if below is None and len(self.views) - len(self.model.closed) >= _MAX_VIEWS:
            return
        self.blame("GUARD-5")
        below, budget = self.draw_view() if below is None else below, None
        if hasattr(self.views[below], "num_blocks") and self.rng.random() < 0.6:
            budget = self.rng.choice((1, 3, self.rng.randint(1, self.num_blocks)))
        guard = self.call(self.harness, "guard_over", self.views[below], budget)
        at = len(self.views)
        self.name(guard, f"guard_{at}")
        self.views.append(guard)
        self.guard_of[id(guard)] = at
        self.model.add_view()
        self.model.make_guard(at, below, budget)

    @operation("GUARD-10", weight=2)
    def free_what_others_hold(self) -> None:
        """Release a block through a guard that has no plain reference on it."""
        at = self.rng.choice(self.guards())
        others = Counter[int]()
        for refs in self.model.accounts():
            others.update(refs.keys())
        among = [block for block in others if not self.model.held[at][block]]
        if among:
            self.blame("GUARD-10")
            own = self.some(self.model.held[at].elements())
            wrong = [*own, *self.some(among)]
            self.rng.shuffle(wrong)
            self.refused(BlockNotHeldError, self.views[at], "free_blocks", wrong, law="GUARD-10")

    @operation("GUARD-5", C.GUARDS, weight=2)
    def use_up(self) -> None:
        """Hold as many blocks as the budget allows, and then one more."""
        for at in self.guards():
            left = self.model.num_pinnable(at)
            if left is None:
                continue
            self.blame("GUARD-5")
            pinned = self.model.pinned()
            new = [block for block in self.model.blocks if block not in pinned]
            self.rng.shuffle(new)
            if len(new) > left:
                self.hold(at, [*self.some(pinned), *new[: left + 1]])
            if self.rng.random() < 0.5:
                self.hold(at, new[:left])
            return

    @operation("GUARD-4", C.ONE_THREAD, weight=0.5)
    def call_on_a_thread(self) -> None:
        """Call a guard or a lease on another thread."""
        self.blame("GUARD-4")
        at = self.rng.choice(self.guards())
        view, block = self.views[at], self.rng.choice(self.model.blocks)
        calls: list[tuple[object, str, list[Any]]] = [
            (view, "touch_blocks", [[block]]),
            *((view, method, [[], *self.other_arguments(method)]) for method in self.frees()),
            (view, "lease", [[block]]),
            *((view, method, args) for method, args in self.queries(block)),
        ]
        for one, lease in self.leases:
            if self.model.is_active(lease):
                calls += [(one, "release", []), (one, "renew", [1.0])]
        receiver, method, args = self.rng.choice(calls)
        line = "from kvview.testing.guard.moves import in_a_thread"
        self.give_name(in_a_thread, "in_a_thread", line)
        code = f"in_a_thread(lambda: {self._code(receiver, method, tuple(args), {})})"
        call = partial(getattr(receiver, method), *args)
        error = self.refuses(WrongThreadError, code, partial(in_a_thread, call), "GUARD-4")
        is_named = str(error).startswith("GUARD-4: ")
        self.true(is_named, "the error names its law", error, "GUARD-4", "GUARD-4")
        self.model.stats[self.guard_of[id(receiver)]]["refused"] += 1

    # --- leases ---

    @operation("GUARD-2", weight=9)
    def take_lease(self, at: int | None = None) -> None:
        """Lease blocks, sometimes on the condition that they still have the keys that were read."""
        at = self.rng.choice(self.guards()) if at is None else at
        among = self.rng.choice((self.model.blocks, self.model.order() or self.model.blocks))
        blocks = list(self.with_null(self.some(among, repeat=self.rng.random() < 0.3)))
        self.num_jobs += 1
        options: dict[str, Any] = {"job": self.rng.choice((None, "job", self.num_jobs))}
        ttl = self._ttl()
        if ttl is not None:
            options["ttl"] = ttl
        if self.can(C.CACHE, C.BLOCK_KEYS) and self.rng.random() < 0.4:
            blocks = [b for b in blocks if b == self.model.null or b in self.model.keys]
            if not self._lease_if_keys_match(at, blocks, options):
                return
        self.blame("GUARD-2")
        is_allowed = self.model.may_hold(at, blocks)
        if is_allowed is False:
            self.blame("GUARD-5")
            self.refused(PinBudgetExceeded, self.views[at], "lease", blocks, **options)
        if not is_allowed:
            return
        lease = self.call(self.views[at], "lease", blocks, **options)
        self.name(lease, f"lease_{self.num_jobs}")
        self.guard_of[id(lease)] = at
        held = self.model.lease(at, blocks, options["job"], ttl)
        self.leases = [*self.leases, (lease, held)][-_MAX_LEASES:]
        real = tuple(block for block in blocks if block != self.model.null)
        self.equal(tuple(self.read(lease, "block_ids")), real, "a lease names each reference")

    def _ttl(self) -> float | None:
        if self.rng.random() < 0.3:
            return None
        known = {lease.deadline for lease in self.model.leases}
        ttl = float(self.rng.choice((1, 2, 5, 9, 100)))
        while self.model.seconds + ttl in known:
            ttl += TICK
        return ttl

    def _lease_if_keys_match(self, at: int, blocks: list[int], options: dict[str, Any]) -> bool:
        """Add the expected keys; if they are refused, compare the refusal and end the operation."""
        keys = [self.rng.choice(self.model.keys.get(block, [b"null\0\0\0\0"])) for block in blocks]
        options["expected_keys"] = keys
        real = [number for number, block in enumerate(blocks) if block != self.model.null]
        if not real or self.rng.random() < 0.6:
            return True
        self.blame("GUARD-1")
        number = self.rng.choice(real)
        own = self.model.keys[blocks[number]]
        stale = [key for key in self.recent_keys if key not in own]
        wrong = self.rng.choice([*stale, b"never\0\0\0\0"])
        cases: list[tuple[type[Exception], list[bytes]]] = [
            (StaleBlockError, [*keys[:number], wrong, *keys[number + 1 :]]),
            (NotAnOffloadKeyError, [*keys[:number], b"k", *keys[number + 1 :]]),
            (ConfigError, keys[1:]),
        ]
        error, expected = self.rng.choice(cases)
        more = {**options, "expected_keys": expected}
        self.refused(error, self.views[at], "lease", blocks, law="GUARD-1", **more)
        return False

    @operation("GUARD-1", weight=2)
    def be_refused_a_lease(self) -> None:
        """Request leases with wrong blocks and wrong times, which must be refused."""
        self.blame("GUARD-1")
        at = self.rng.choice(self.guards())
        good = self.some(self.model.blocks)
        wrong = [*good, self.draw_wrong_id()]
        self.rng.shuffle(wrong)
        self.refused(UnknownBlockError, self.views[at], "lease", wrong, law="GUARD-1")
        for ttl in (0, -1.0):
            self.refused(ConfigError, self.views[at], "lease", good, ttl=ttl, law="GUARD-1")
        found = self.some_lease()
        if found is not None and self.model.is_active(found[1]):
            self.refused(ConfigError, found[0], "renew", 0, law="GUARD-1")

    @operation("GUARD-2", weight=9)
    def end_lease(self) -> None:
        """End a lease, by a release or at the end of a ``with`` block, with or without an error."""
        found = self.some_lease()
        if found is None:
            return
        self.blame("GUARD-2")
        one, lease = found
        for _ in range(self.rng.choice((1, 1, 2))):
            is_active = self.model.is_active(lease)
            if self.rng.random() < 0.5:
                what = "release is True exactly when the lease was active"
                self.equal(self.call(one, "release"), is_active, what, "GUARD-2")
                self.model.end(lease)
            elif is_active:
                entered = self.call(one, "__enter__")
                self.true(entered is one, "with yields the lease", entered, "the lease", "GUARD-2")
                if self.rng.random() < 0.3:
                    self.call(one, "release")
                    self.model.end(lease)
                self._leave(one)
                self.model.end(lease)

    def _leave(self, one: Any) -> None:
        error = self.rng.choice(_RAISED)
        kind = None if error is None else type(error)
        if error is not None:
            name = type(error).__name__
            self.give_name(error, "raised", f"raised = {error!r}")
            self.give_name(kind, name, "")
        swallowed = self.call(one, "__exit__", kind, error, None)
        self.true(not swallowed, "a lease lets exceptions through", swallowed, "None", "GUARD-2")

    @operation("GUARD-3", weight=3)
    def renew(self) -> None:
        """Move the deadline of a lease, later or earlier; an ended lease must refuse this."""
        found = self.some_lease()
        if found is None:
            return
        one, lease = found
        if self.model.is_active(lease):
            self.blame("GUARD-3")
            ttl = self._ttl() or 0.5
            self.call(one, "renew", ttl)
            lease.deadline = self.model.seconds + ttl
            return
        self.blame("GUARD-7")
        self.refused(KVViewError, one, "renew", 5, law="GUARD-7")
        self.refused(KVViewError, one, "__enter__", law="GUARD-7")
