"""A store in memory with injected faults, one at a time."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence

from kvview.tier import Namespace

BLOCKED_SECONDS = 1.0
"""Seconds after which a blocked call returns, so that a guard that waits for it is detected."""

RAISING = ("lookup raises", "put raises", "get raises", "poll raises", "put exits")
BLOCKING = ("lookup blocks", "put blocks", "get blocks", "poll blocks")
LATE = ("never reports", "reports late", "writes late")
MALFORMED = (
    "reports twice",
    "reports an unknown job",
    "too few flags",
    "too many flags",
    "flags are None",
    "poll is None",
    "lookup has too few flags",
    "lookup is None",
    "lookup never knows",
)
LYING = (
    "lookup lies",
    "put lies",
    "flips a bit",
    "fills a part",
    "swaps keys",
    "keeps the pages",
    "is full",
)

FAULTS = (*RAISING, *BLOCKING, *LATE, *MALFORMED, *LYING)


class FaultyStore:
    """A store that is correct while ``fault`` is empty.

    Args:
        namespace: Namespace of the store; not used, because this store shares no bytes.
    """

    def __init__(self, namespace: Namespace | None = None) -> None:
        self.fault = ""
        self.callers: set[int] = set()
        """The threads that were inside a blocked call of the store."""
        self.num_jobs = 0
        """Number of puts and gets so far."""
        self.touched: list[bytes] = []
        self.held: dict[bytes, bytes | memoryview] = {}
        self._done: list[tuple[int, list[bool]]] = []
        self._late: list[tuple[int, list[bool]]] = []
        self.late_pages: list[memoryview] = []
        self._healed = threading.Event()

    def heal(self) -> None:
        """End the fault, and report the jobs that are late."""
        self.fault = ""
        for page in self.late_pages:
            page[:] = b"\xee" * len(page)
        self.late_pages.clear()
        self._healed.set()
        self._done += self._late
        self._late.clear()

    def lookup(self, keys: Sequence[bytes], /) -> Sequence[bool | None]:
        """Return for each key whether it is held."""
        self._misbehave("lookup")
        if self.fault == "lookup is None":
            return None  # type: ignore[return-value]
        flags: list[bool | None] = [key in self.held for key in keys]
        if self.fault == "lookup has too few flags":
            return flags[1:]
        if self.fault == "lookup never knows":
            return [None] * len(keys)
        return [True] * len(keys) if self.fault == "lookup lies" else flags

    def put(self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], /) -> None:
        """Keep pages."""
        self.num_jobs += 1
        self._misbehave("put")
        is_kept = self.fault not in ("put lies", "is full")
        for key, page in zip(keys, pages, strict=True):
            if is_kept:
                self.held[key] = page if self.fault == "keeps the pages" else bytes(page)
        self._report(job, [self.fault != "is full"] * len(keys))

    def get(self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], /) -> None:
        """Fill pages."""
        self.num_jobs += 1
        self._misbehave("get")
        flags = []
        for key, page in zip(keys, pages, strict=True):
            found = self.held.get(key)
            if self.fault == "swaps keys" and found is not None:
                found = next((kept for other, kept in self.held.items() if other != key), found)
            flags.append(found is not None and len(found) == len(page))
            if found is not None and flags[-1]:
                half = len(page) // 2
                whole = self.fault != "fills a part"
                page[: None if whole else half] = found[: None if whole else half]
                if self.fault == "flips a bit":
                    page[half] ^= 1
            if self.fault in ("writes late", "reports late"):
                self.late_pages.append(page)
        self._report(job, flags)

    def poll(self) -> Sequence[tuple[int, Sequence[bool]]]:
        """Return the jobs that ended."""
        self._misbehave("poll")
        if self.fault == "poll is None":
            return None  # type: ignore[return-value]
        done, self._done = self._done, []
        if self.fault == "reports twice":
            self._late += done
            return done + done
        return [*done, (987_654_321, [True])] if self.fault == "reports an unknown job" else done

    def delete(self, keys: Sequence[bytes], /) -> None:
        """Forget keys."""
        for key in keys:
            self.held.pop(key, None)

    def touch(self, keys: Sequence[bytes], /) -> None:
        """Record keys."""
        self.touched += keys

    def drain(self, timeout: float, /) -> bool:
        """Return at once, because every job has ended."""
        return True

    def close(self) -> None:
        """Do nothing, because the store has no resources."""

    def _misbehave(self, call: str) -> None:
        if self.fault == f"{call} raises":
            raise OSError(errno.EIO, "simulated: the medium was removed")
        if self.fault == f"{call} exits":
            raise SystemExit(1)
        if self.fault == f"{call} blocks":
            self.callers.add(threading.get_ident())
            self._healed.wait(BLOCKED_SECONDS)

    def _report(self, job: int, flags: list[bool]) -> None:
        if self.fault == "reports late":
            self._late.append((job, flags))
        elif self.fault == "too few flags":
            self._done.append((job, flags[1:]))
        elif self.fault == "too many flags":
            self._done.append((job, [*flags, True]))
        elif self.fault == "flags are None":
            self._done.append((job, None))  # type: ignore[arg-type]
        elif self.fault != "never reports":
            self._done.append((job, flags))
