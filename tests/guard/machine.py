"""Guards over one pool, played on the guards and on their model (GUARD-1 to GUARD-7).

The rules are the calls of connectors and of the engine, and the invariants compare all that can be
observed. A call that the model refuses must raise, and every other call must not. Each assertion
starts with the law that is broken.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from typing_extensions import override

from kvview import (
    BlockNotHeldError,
    GuardedView,
    KVViewError,
    PinBudgetExceeded,
    SupportsGiveBack,
    SupportsPinBudget,
    UnknownBlockError,
    ViewClosedError,
    WrongThreadError,
    make_offload_key,
)
from kvview.testing.pool.draws import wrong_ids
from kvview_reference.harness import ReferenceEnginePool
from tests.guard.model import GuardModel
from tests.guard.pools import UncheckedView

NUM_BLOCKS = 12
MOST_VIEWS = 6
LOGGER = logging.getLogger("kvview.guard.view")
# The view of an engine that does not check knows no number of blocks, so no id is too large for it.
WRONG_IDS = [value for name, value in wrong_ids().items() if name != str(10**12)]
MISSING_KEY = make_offload_key(b"never cached", 0)

some_blocks = st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=6)


class GuardMachine(RuleBasedStateMachine):
    """Opens guards over a pool and over guards, while time passes and the engine may fail."""

    Pool: ClassVar[type[Any]] = ReferenceEnginePool

    guards = Bundle("guards")

    @initialize(target=guards, below=st.sampled_from(("pool", "unchecked", "unchecked, no size")))
    def start(self, below: str) -> MultipleResults[int]:
        self.model = GuardModel(NUM_BLOCKS, 0)
        self.is_checked = below == "pool"
        self.has_size = below != "unchecked, no size"
        self.views: list[Any]
        if self.is_checked:
            self.pool = self.Pool(NUM_BLOCKS)
            self.observer = self.pool.another_view()
            self.views = [self.pool.another_view(), self.pool.another_view()]
        else:
            self.observer = UncheckedView(NUM_BLOCKS, has_size=self.has_size)
            self.views = [self.observer]
        for _ in self.views:
            self.model.add_view()
        self.num_requests = 0
        self.logged: list[logging.LogRecord] = []
        LOGGER.addFilter(self.keep)
        return multiple(*(self.make_guard(at, None) for at in range(len(self.views))))

    def keep(self, record: logging.LogRecord) -> bool:
        """Keep a message instead of printing it."""
        self.logged.append(record)
        return False

    @override
    def teardown(self) -> None:
        for at in self.model.guards():
            self.views[at].close()  # because a dropped guard with blocks is logged
        LOGGER.filters.clear()

    def make_guard(self, below: int, budget: int | None) -> int:
        at = self.model.add_guard(below, budget)
        guard = GuardedView(
            self.views[below],
            owner=f"guard {at}",
            pin_budget=None if budget is None else budget / NUM_BLOCKS,
            clock=lambda: self.model.seconds,
        )
        self.views.append(guard)
        return at

    # --- calls ---

    def call(
        self,
        law: str,
        at: int,
        call: Callable[..., Any],
        *args: Any,
        error: type[Exception] | None = None,
        **options: Any,
    ) -> Any:
        """Call a view: it must raise ``error``, or return if that is None."""
        if at in self.model.closed:
            law, error = "POOL-10", ViewClosedError
        name = f"{getattr(call, '__name__', call)}{args} of view {at}"
        try:
            result = call(*args, **options)
        except Exception as caught:
            result = caught
        is_raised = isinstance(result, error or Exception)
        assert is_raised == (error is not None), f"{law}: {name}: {result!r}, expected {error}"
        if isinstance(result, KVViewError) and at in self.model.stats:
            self.model.stats[at]["refused"] += 1
        return result

    def queries(self, at: int) -> dict[str, Callable[[], object]]:
        """Return calls of a guard that change nothing, by name."""
        view = self.views[at]
        calls: dict[str, Callable[[], object]] = {
            "touch": lambda: view.touch_blocks([]),
            "free": lambda: view.free_blocks([]),
            "holds": view.held_blocks,
            "is free": lambda: view.is_free(3),
            "keys": lambda: view.block_keys([3]),
            "primary keys": lambda: view.primary_keys([3]),
            "walk": lambda: list(view.iter_free_block_ids_with_hash()),
        }
        if isinstance(view, SupportsGiveBack):  # some releases of vLLM lack it
            calls["give back"] = lambda: view.give_back_blocks([])
        if self.is_checked:
            calls["count"] = view.num_free_blocks
            calls["find"] = lambda: view.find_cached_block(MISSING_KEY)
            calls["queue"] = lambda: list(view.iter_free_block_ids())
        return calls

    def held_by(self, at: int, data: st.DataObject) -> list[int]:
        """Draw some of the references of a view, and sometimes the null block."""
        held = data.draw(st.permutations(sorted(self.model.held[at].elements())))
        number = data.draw(st.integers(min(1, len(held)), len(held)))
        return held[:number] + [0] * data.draw(st.integers(0, 1))

    # --- the engine ---

    @precondition(lambda self: self.is_checked and self.model.joined)
    @rule(number=st.integers(1, 6), is_short=st.booleans())
    def run_request(self, number: int, is_short: bool) -> None:
        number = min(number, len(self.model.joined))
        blocks = list(self.pool.allocate(number))
        for law, promise, is_kept in self.model.allocated(blocks):
            assert is_kept, f"{law}: {promise}, got {blocks}"
        hashes = [b"hash %d %d" % (self.num_requests, block) for block in blocks]
        self.num_requests += 1
        self.pool.cache(blocks, hashes, 0)
        for block, block_hash in zip(blocks, hashes, strict=True):
            self.model.cache(block, make_offload_key(block_hash, 0))
        if is_short:
            self.end_requests()

    @precondition(lambda self: self.is_checked and self.model.engine)
    @rule()
    def end_requests(self) -> None:
        blocks = list(self.model.engine.elements())
        self.pool.release(blocks)
        self.model.give(blocks, self.model.engine)

    @rule(at=guards, request=st.sampled_from((None, "r1", "r2")))
    def speak_of(self, at: int, request: str | None) -> None:
        self.model.request = request
        self.views[at].speak_of(request)

    # --- views and guards ---

    @precondition(lambda self: len(self.views) < MOST_VIEWS)
    @rule(target=guards, below=guards, budget=st.none() | st.integers(1, NUM_BLOCKS))
    def open_guard(self, below: int, budget: int | None) -> int | MultipleResults[int]:
        if below in self.model.closed:
            self.call("POOL-10", below, GuardedView, self.views[below])
            return multiple()
        return self.make_guard(below, budget if self.has_size else None)

    @rule(at=guards | st.just(0), blocks=some_blocks)
    def touch(self, at: int, blocks: list[int]) -> None:
        if at or self.is_checked:
            is_allowed = self.model.may_hold(at, blocks)
            if is_allowed is None and at not in self.model.closed:
                return  # GUARD-3 leaves this open
            law, error = ("GUARD-1", None) if is_allowed else ("GUARD-3", PinBudgetExceeded)
            self.call(law, at, self.views[at].touch_blocks, blocks, error=error)
            if not error and at not in self.model.closed:
                self.model.take(blocks, self.model.held[at])

    @rule(at=guards | st.just(0), to_head=st.booleans(), data=st.data())
    def free(self, at: int, to_head: bool, data: st.DataObject) -> None:
        blocks = self.held_by(at, data)
        if at or self.is_checked:
            to_head = to_head and isinstance(self.views[at], SupportsGiveBack)
            method = "give_back_blocks" if to_head else "free_blocks"
            self.call("POOL-2", at, getattr(self.views[at], method), blocks)
            if at not in self.model.closed:
                self.model.give(blocks, self.model.held[at], to_head=to_head)

    @rule(at=guards, block=st.integers(1, NUM_BLOCKS - 1), data=st.data())
    def free_too_much(self, at: int, block: int, data: st.DataObject) -> None:
        """Free more than the guard itself holds, although others may hold the block."""
        blocks = [*self.held_by(at, data), *[block] * (self.model.held[at][block] + 1)]
        blocks = data.draw(st.permutations(blocks))
        self.call("GUARD-6", at, self.views[at].free_blocks, blocks, error=BlockNotHeldError)

    @rule(
        at=guards,
        method=st.sampled_from(("touch_blocks", "free_blocks")),
        blocks=st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=3),
        wrong=st.sampled_from(WRONG_IDS),
    )
    def name_no_block(self, at: int, method: str, blocks: list[int], wrong: Any) -> None:
        if method == "free_blocks":
            blocks = [block for block in {*blocks} if self.model.held[at][block]]
        call = getattr(self.views[at], method)
        self.call("GUARD-1", at, call, [*blocks, wrong], error=UnknownBlockError)
        if self.has_size:
            self.call("GUARD-1", at, call, [*blocks, NUM_BLOCKS], error=UnknownBlockError)
        view = self.views[at]
        for query, arg in ((view.is_free, wrong), (view.block_keys, [wrong])):
            self.call("POOL-4", at, query, arg, error=UnknownBlockError)

    @rule(at=guards, data=st.data())
    def call_on_a_thread(self, at: int, data: st.DataObject) -> None:
        calls = self.queries(at)
        call = calls[data.draw(st.sampled_from(sorted(calls)))]
        if at not in self.model.closed:
            with ThreadPoolExecutor(1) as threads:
                done = threads.submit(call)
                error = self.call("GUARD-2", at, done.result, error=WrongThreadError)
            assert str(error).startswith("GUARD-2: "), f"GUARD-2: the error names its law: {error}"

    # --- time ---

    @rule(step=st.sampled_from((0.5, 3.0, 100.0)))
    def advance(self, step: float) -> None:
        """Let time pass."""
        self.model.seconds += step

    # --- an engine that fails ---

    @precondition(lambda self: not self.is_checked)
    @rule(
        at=guards,
        method=st.sampled_from(("touch_blocks", "free_blocks", "give_back_blocks")),
        blocks=some_blocks,
        data=st.data(),
    )
    def engine_fails(self, at: int, method: str, blocks: list[int], data: st.DataObject) -> None:
        is_taken = method == "touch_blocks"
        blocks = blocks if is_taken else self.held_by(at, data)
        if any(blocks) and not (is_taken and not self.model.may_hold(at, blocks)):
            self.observer.fails_at = method
            self.call("GUARD-1", at, getattr(self.views[at], method), blocks, error=RuntimeError)
            self.observer.fails_at = ""

    # --- the end of guards ---

    def leaves_a_guard(self, at: int) -> bool:
        return bool({*self.model.guards()} - self.model.closing(at))

    @rule(at=guards, frees=st.booleans())
    def close(self, at: int, frees: bool) -> None:
        if at in self.model.closed or not self.leaves_a_guard(at):
            return
        if frees:
            self.views[at].free_all()
            free = [b for b, _ in self.observer.iter_free_block_ids_with_hash()]
            self.model.free_all(at, free)
            self.views[at].free_all()
        else:
            got, held = self.views[at].close(), self.model.held_through(at)
            assert got == held, f"POOL-10: close reported {got}, not {held}"
            self.model.closed |= self.model.closing(at)
        assert self.views[at].close() == {}, "POOL-10: a second close reports nothing"

    # --- observables ---

    @invariant()
    def compare(self) -> None:
        """Compare everything that can be read, in the present state."""
        self.compare_pool()
        for at in self.model.stats:
            self.compare_reports(at)
        for at in self.model.guards():
            self.compare_guard(at)
        assert not self.logged, f"GUARD-5: {self.logged} were logged"

    def compare_pool(self) -> None:
        free = {block for block in range(NUM_BLOCKS) if self.observer.is_free(block)}
        assert free == {*self.model.joined}, f"POOL-1: {free} are free, not {[*self.model.joined]}"
        if not self.is_checked:
            queue = sorted(self.observer.queue)
            assert queue == sorted(free), f"POOL-2: {queue} are queued, not {free}"
        order, expected = self.order(), self.model.order()
        assert order == expected, f"POOL-11: the next victims are {order}, not {expected}"

    def order(self) -> list[int]:
        return [block for block, _ in self.observer.iter_free_block_ids_with_hash()]

    def compare_guard(self, at: int) -> None:
        view, held = self.views[at], self.model.held_through(at)
        assert view.held_blocks() == held, f"GUARD-6: {at} holds {view.held_blocks()}, not {held}"
        left = self.model.num_pinnable(at)
        has_query = isinstance(view, SupportsPinBudget)
        assert has_query is (left is not None), f"GUARD-3: num_pinnable_blocks of {at}: {has_query}"
        if has_query:
            got = view.num_pinnable_blocks()
            assert got == left, f"GUARD-3: {at} may hold {got} more blocks, not {left}"
        tree = [self.views[guard] for guard in self.model.tree(at)]
        assert {*map(id, view.guards())} == {*map(id, tree)}, f"GUARD-7: the guards over {at}"
        counters = [one for some in view.accounts().values() for one in some]
        assert counters[0] is view.stats, f"GUARD-7: the counters of {at} come first"
        assert {*map(id, counters)} == {id(one.stats) for one in tree}, "GUARD-7: all counters"

    def compare_reports(self, at: int) -> None:
        view, stats = self.views[at], self.model.stats[at]
        names = ("touched", "freed", "refused", "peak_held")
        got = {name: getattr(view.stats, name) for name in names}
        assert got == {n: stats[n] for n in names}, f"GUARD-7: stats of {at}: {got}, not {stats}"
        assert view.stats.held == stats["touched"] - stats["freed"], "GUARD-7: stats.held"
        leaks = view.leaks()
        found = Counter(
            (leak.owner, block, leak.age, leak.request_id)
            for leak in leaks
            for block in leak.block_ids
        )
        now = self.model.seconds
        expected = Counter(
            (f"guard {guard}", block, now - since, request)
            for guard, block, (since, request) in self.model.rows(at)
        )
        assert found == expected, f"GUARD-7: leaks of {at} are {found}, not {expected}"
        ages = [leak.age for leak in leaks]
        assert ages == sorted(ages, reverse=True), f"GUARD-7: the oldest leak comes first: {ages}"
        if ages:
            old = [leak.age for leak in view.leaks(older_than=max(ages))]
            assert old == [age for age in ages if age == max(ages)], f"GUARD-7: older_than: {old}"
