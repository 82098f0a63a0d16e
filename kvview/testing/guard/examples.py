"""Checks of the guard contract that the model cannot state, such as growth and processes."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

from kvview.errors import NotCopyableError, WrongThreadError
from kvview.testing.cost import cost_of, growth_of
from kvview.testing.guard.logs import logged
from kvview.testing.guard.player import GuardPlayer
from kvview.testing.harness import Capability as C
from kvview.testing.search import example

_TOLERATED_GROWTH = 200_000  # bytes; a leak of one entry per lease would be more than 300,000 bytes


@example(GuardPlayer, "GUARD-3", C.LEASES)
def check_guard_3_growth_of_deadlines(guard: GuardPlayer) -> None:
    """Growth and cost: after thousands of leases that ended early, no deadline is left."""
    view = guard.views[0]
    block, other = guard.model.blocks[1:3]
    keep: list[Any] = []

    def repeat(way: str, times: int) -> None:
        for _ in range(times):
            if way == "release":
                view.lease([block], ttl=1e6).release()
            else:
                keep[0].renew(1e6)

    for way in ("release", "renew"):
        costs, sizes = [], []
        for num_others in (1, 1000):  # leases that stay active
            keep += [view.lease([other], ttl=1e6) for _ in range(num_others)]
            guard.line(f"{num_others} leases stay; 6,000 times {way}")
            many = partial(repeat, way, 3000)
            sizes.append(growth_of(many, many))
            costs.append(cost_of(partial(repeat, way, 50)))
        limit = f"at most {_TOLERATED_GROWTH} bytes more"
        guard.true(max(sizes) <= _TOLERATED_GROWTH, "ended leases leave nothing", sizes, limit)
        most, lines = costs[0].times(4).lines, costs[1].lines
        what = "a lease costs the same next to 1,000 others"
        guard.true(lines <= most, what, lines, f"at most {most} lines")


@example(GuardPlayer, "GUARD-6", C.LEASES)
def check_guard_6_copies_are_refused(guard: GuardPlayer) -> None:
    """Copies are refused, because a second object would release the same references again."""
    lease = guard.call(guard.views[0], "lease", guard.model.blocks[:1])
    guard.name(lease, "lease")
    ways: tuple[Callable[[Any], object], ...] = (copy.copy, copy.deepcopy, pickle.dumps)
    for subject, name in ((guard.views[0], "view"), (lease, "lease")):
        for way in ways:
            code = f"__import__({way.__module__!r}).{way.__name__}({name})"
            guard.refuses(NotCopyableError, code, partial(way, subject))
    guard.equal(guard.call(lease, "release"), True, "the original is still active")


@example(GuardPlayer, "GUARD-6", C.LEASES, C.ONE_THREAD)
def check_guard_6_forked_process_is_refused(guard: GuardPlayer) -> None:
    """Processes: a guard refuses every call in a forked child, and works in its own process."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return
    first, second = guard.model.blocks[1:3]
    view = guard.views[0]
    guard.call(view, "touch_blocks", [first])
    lease = guard.call(view, "lease", [second])
    guard.name(lease, "lease")
    calls: list[tuple[str, Callable[[], object]]] = [
        (f"view.touch_blocks([{second}])", partial(view.touch_blocks, [second])),
        (f"view.free_blocks([{first}])", partial(view.free_blocks, [first])),
        ("lease.release()", lease.release),
    ]
    for code, call in calls:
        code = f"__import__({__name__!r}, fromlist=['x']).in_a_fork(lambda: {code})"
        error = guard.refuses(WrongThreadError, code, partial(in_a_fork, call))
        guard.true(str(error).startswith("GUARD-6: "), "the error names its law", error, "GUARD-6")
    guard.equal(guard.call(lease, "release"), True, "the lease is the first process's")
    guard.call(view, "free_blocks", [first])


def in_a_fork(call: Callable[[], object]) -> None:
    """Run a call in a forked process, and re-raise its exception in this process."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def run() -> None:
        try:
            call()
        except Exception as error:
            theirs.send(error)
        else:
            theirs.send(None)

    process = context.Process(target=run)
    process.start()
    raised = ours.recv()
    process.join()
    if raised is not None:
        raise raised


@example(GuardPlayer, "GUARD-9", C.LEASES, C.GUARDS)
def check_guard_9_dropped_holds_are_logged(guard: GuardPlayer) -> None:
    """Garbage: a guard with blocks, or a lease without a deadline, is logged when collected."""
    view, make = guard.views[0], partial(guard.harness.guard_over, guard.views[0], None)
    first, second, third = guard.model.blocks[1:4]
    guard.line("# leases and guards are made and dropped")
    with logged() as messages:
        view.lease([second], ttl=5)
        gc.collect()
        guard.equal(messages, [], "a lease with a deadline ends by itself")
        view.lease([first])
        gc.collect()
        guard.equal(len(messages), 1, "a dropped lease is logged")
        dropped = make()
        dropped.touch_blocks([third])
        dropped.free_blocks([third])
        del dropped
        gc.collect()
        guard.equal(len(messages), 1, "a guard without holds is dropped silently")
        dropped = make()
        dropped.touch_blocks([third])
        del dropped
        gc.collect()
        guard.equal(len(messages), 2, "a dropped guard that holds blocks is logged")


@example(GuardPlayer, "GUARD-9", C.LEASES, C.SIZED)
def check_guard_9_guard_that_goes_with_its_pool_is_silent(guard: GuardPlayer) -> None:
    """Garbage: a guard that is collected together with its pool logs nothing."""
    guard.line(f"ring = [h.sized({guard.num_blocks})]; ring.append(ring)")
    guard.line(f"ring[0].view.touch_blocks([{guard.model.blocks[1]}]); del ring")
    with logged() as messages:
        # The collector frees a cycle in one pass, and may free the guard before its pool.
        ring = [guard.harness.sized(guard.num_blocks)]
        ring.append(ring)
        ring[0].view.touch_blocks([guard.model.blocks[1]])
        del ring
        gc.collect()
        guard.equal(messages, [], "a guard that goes with its pool logs nothing")


@example(GuardPlayer, "GUARD-11", C.TRACE, C.LEAKS, C.LEASES)
def check_guard_11_traced_leak_names_the_line(guard: GuardPlayer) -> None:
    """Lines of source: with a trace each leak names file, line and function of its caller."""
    guard.use(guard.call(guard.harness, "traced"), "view")
    view = guard.subject
    first, second, third = guard.model.blocks[:3]

    def take_plain() -> None:
        view.touch_blocks([first])

    def take_lease() -> Any:
        return view.lease([second], job="job")

    take_plain()
    lease = take_lease()
    guard.call(view, "touch_blocks", [third])  # the recorder makes the call
    guard.line(f"view.touch_blocks([{first}]); lease = view.lease([{second}])")
    found = {leak.block_ids: leak.taken_at or "" for leak in guard.call(view, "leaks")}
    for block, function in ((first, take_plain), (second, take_lease)):
        code = function.__code__
        line = f"{code.co_filename}:{code.co_firstlineno + 1}"
        where = found.get((block,), "")
        is_named = line in where and function.__name__ in where
        guard.true(is_named, "a leak names the line that took it", where, line)
    is_near = __file__ not in found.get((third,), __file__)
    guard.true(is_near, "a leak names the line next to the guard", found, "the recorder's")
    lease.release()
