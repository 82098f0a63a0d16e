"""The speed of a tier store by page size, for ``kvview tier bench``."""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from kvview import ConfigError
from kvview.options import make_with_options
from kvview.tier import GuardedTier, Namespace, TierStore

_FOLDER = "{tmp}"
_LARGEST = 2**30  # bytes of a page
_SECONDS = 120.0
_HERE = Namespace("benchmark", weights="1")


@dataclass(frozen=True)
class TierSpeed:
    """Medians over all rounds, in each of which one job of several pages is in flight at a time.

    Args:
        page_bytes: Bytes of each page.
        pages: Pages of a job.
        put: GB/s (10**9 bytes) of a store, from the call to the report.
        get: GB/s (10**9 bytes) of a load, from the call to the report.
        lookup_us: Microseconds per key of a lookup of new keys.
        call_us: Microseconds per page that the caller's thread spent in put, get and poll.
        failed: Pages whose put or get failed.
        wrong: Number of pages that were loaded with other bytes than were stored.
    """

    page_bytes: int
    pages: int
    put: float
    get: float
    lookup_us: float
    call_us: float
    failed: int
    wrong: int


@dataclass(frozen=True)
class StoreBench:
    """The report of ``kvview tier bench --json FILE``.

    Args:
        store: Target of the store.
        guarded: Whether the store was called through the guard.
        sizes: The results for each page size, in the given order.
        schema_version: Version of the JSON format, which grows when a field is removed or changes
            its meaning.
    """

    store: str
    guarded: bool
    sizes: list[TierSpeed]
    schema_version: Literal[1] = 1


def measure(
    make: Callable[..., TierStore],
    options: Mapping[str, Any],
    sizes: Sequence[int],
    *,
    pages: int = 32,
    rounds: int = 5,
    is_guarded: bool = True,
) -> list[TierSpeed]:
    """Measure puts, lookups and gets of new pages in each round.

    Args:
        make: Class of the store.
        options: Options of the class; ``{tmp}`` in a text is a new folder, which is removed at the
            end.
        sizes: Page sizes in bytes.
        pages: Number of pages of one job.
        rounds: Number of rounds for each size.
        is_guarded: Whether to call the store through the guard, as every bridge does.

    Raises:
        ConfigError: A number is not positive, or a job does not end.
    """
    if min([pages, rounds, *sizes]) < 1:
        raise ConfigError("sizes, pages and rounds must be 1 or more")
    if max(sizes) > _LARGEST:
        raise ConfigError(f"a page has at most {_LARGEST:,} bytes, got {max(sizes):,}")
    folder = tempfile.mkdtemp(prefix="kvview-bench-")
    filled = {
        name: value.replace(_FOLDER, folder) if isinstance(value, str) else value
        for name, value in options.items()
    }
    try:
        store = make_with_options(make, filled, _HERE, flag="--option")
        if is_guarded:
            store = GuardedTier(store, _HERE, deadline=_SECONDS, lookup_deadline=_SECONDS)
        try:
            return [_speed(store, size, pages, rounds) for size in sizes]
        finally:
            store.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _speed(store: TierStore, size: int, pages: int, rounds: int) -> TierSpeed:
    dice = random.Random(time.time_ns())  # a bucket keeps the pages of earlier runs
    content = [dice.randbytes(size) for _ in range(pages)]
    back = [memoryview(bytearray(size)) for _ in range(pages)]
    found: dict[str, list[float]] = {"put": [], "get": [], "lookup": [], "call": []}
    failed = wrong = 0
    for _ in range(rounds):
        keys = [dice.randbytes(32) for _ in range(pages)]
        seconds, spent, flags = _timed(store, store.put, keys, [memoryview(c) for c in content])
        found["put"].append(seconds)
        failed += flags.count(False)
        found["lookup"].append(_looked_up(store, [dice.randbytes(32) for _ in keys]))
        for page in back:
            page[:8] = bytes(8)[: len(page)]
        seconds, more, flags = _timed(store, store.get, keys, back)
        found["get"].append(seconds)
        found["call"].append(spent + more)
        failed += flags.count(False)
        pairs = zip(flags, content, back, strict=True)
        wrong += sum(flag and page != right for flag, right, page in pairs)
        delete = getattr(store, "delete", None)
        if delete is not None:
            with suppress(Exception):
                delete(keys)
    middle = {name: statistics.median(values) for name, values in found.items()}
    return TierSpeed(
        size,
        pages,
        put=pages * size / middle["put"] / 1e9,
        get=pages * size / middle["get"] / 1e9,
        lookup_us=middle["lookup"] / pages * 1e6,
        call_us=middle["call"] / (2 * pages) * 1e6,
        failed=failed,
        wrong=wrong,
    )


def _timed(
    store: TierStore, call: Callable[..., None], keys: list[bytes], pages: list[memoryview]
) -> tuple[float, float, list[bool]]:
    """Return the seconds of a job, the CPU seconds of its calls, and its flags."""
    began, spent = time.perf_counter(), time.thread_time()
    call(1, keys, pages)
    spent = time.thread_time() - spent
    if not store.drain(_SECONDS):
        raise ConfigError(f"the store did not report a job within {_SECONDS:.0f} s")
    seconds, before = time.perf_counter() - began, time.thread_time()
    [(_, flags)] = store.poll()
    return seconds, spent + time.thread_time() - before, [bool(flag) for flag in flags]


def _looked_up(store: TierStore, keys: list[bytes]) -> float:
    began = time.perf_counter()
    while None in store.lookup(keys):
        if time.perf_counter() - began > _SECONDS:
            raise ConfigError(f"the store did not complete a lookup within {_SECONDS:.0f} s")
        time.sleep(0.0001)
    return time.perf_counter() - began
