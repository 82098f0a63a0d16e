"""Wrong guards before a tier store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from kvview.testing import GuardedStoreHarness, Mutant
from kvview.tier import GuardedTier, Namespace, TierStore
from kvview_reference.tier import FileStore

from .planting import planter

MUTANTS: list[Mutant] = []


def wrong_guard(law: str, incident: str | None = None) -> Any:
    """A class of guards is wrong."""

    def add(guard: type[GuardedTier]) -> type[GuardedTier]:
        class Harness(GuardedStoreHarness):
            patience = 2.0

            def guard(self, store: TierStore, namespace: Namespace, **options: Any) -> TierStore:
                return guard(store, namespace, **options)

        def factory() -> Any:
            return Harness(FileStore, {"root": "{tmp}", "checksum": "none"})

        factory.__name__ = factory.__qualname__ = guard.__name__
        factory.__doc__ = guard.__doc__
        planter(MUTANTS)(law, incident)(factory)
        return guard

    return add


@wrong_guard("TIER-12")
class LetsExceptionsOut(GuardedTier):
    """What a store raises in ``put`` ends the engine."""

    def put(self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], /) -> None:
        if getattr(self.store, "fault", "") == "put raises":
            raise OSError(28, "no space left")
        super().put(job, keys, pages)


@wrong_guard("TIER-12")
class EndsItsThread(GuardedTier):
    """``SystemExit`` in a store ends the guard's thread, and all jobs after it are late."""

    def _run(self) -> None:
        with suppress(SystemExit):  # or pytest would tell of the thread
            super()._run()

    def _ask_store(self, call: Callable[..., object], *args: object) -> object:
        found = super()._ask_store(call, *args)
        if isinstance(found, SystemExit):
            raise found
        return found


@wrong_guard("TIER-12", "vllm#45704")
class AsksOnTheCallersThread(GuardedTier):
    """A lookup goes to the store at once."""

    def lookup(self, keys: Sequence[bytes], /) -> list[bool | None]:
        found = self._ask_store(self.store.lookup, list(keys))
        if not isinstance(found, list):
            return [False] * len(keys)
        known, _ = self._answers.flags(keys)
        return [flag and was is not False for flag, was in zip(found, known, strict=True)]


@wrong_guard("TIER-12")
class WaitsForEver(GuardedTier):
    """A job that is never reported is never late."""

    def _expire(self) -> None: ...


@wrong_guard("TIER-12")
class GivesTheEnginesPagesAway(GuardedTier):
    """A store loads into the engine's own pages: late bytes land in what is another's by then."""

    def _start(self, entry: Any) -> None:
        if not entry.is_get:
            super()._start(entry)
            return
        pages = list(entry.pages)
        self._in_store[entry.number] = entry
        entry.private = [bytearray(len(page) + 16) for page in pages]
        views = [memoryview(private) for private in entry.private]
        self.store.get(entry.number, entry.keys, views)
        late = getattr(self.store, "_late_pages", None)
        if late:
            late += pages


@wrong_guard("TIER-12")
class TakesAnyNumberOfFlags(GuardedTier):
    """Flags are passed on as they come."""

    def _finish(self, entry: Any, flags: list[bool]) -> None:
        super()._finish(entry, flags)
        if getattr(self.store, "fault", "") == "too few flags":
            job, given = self._done.pop()
            self._done.append((job, given[1:]))


@wrong_guard("TIER-12")
class PassesReportsOn(GuardedTier):
    """A report of a job that nobody gave reaches the engine."""

    def _collect(self) -> None:
        super()._collect()
        if getattr(self.store, "fault", "") == "reports a job of nobody":
            with self._changed:
                self._done.append((987_654_321, [True]))


@wrong_guard("TIER-12")
class LooksAtNoBytes(GuardedTier):
    """Without checksums: what a store says was loaded is taken for it."""

    def __init__(self, store: TierStore, namespace: Namespace, **options: Any) -> None:
        super().__init__(store, namespace, **{**options, "checksum": "none"})


@wrong_guard("TIER-12")
class BelievesLookups(GuardedTier):
    """What failed is found again as soon as the store says so."""

    def __init__(self, store: TierStore, namespace: Namespace, **options: Any) -> None:
        super().__init__(store, namespace, **options)
        answers: Any = self._answers
        answers.failed = lambda key: answers._known.pop(key, None)


@wrong_guard("TIER-12")
class NeverTriesAgain(GuardedTier):
    """A store that was left alone once is left alone for ever."""

    def __init__(self, store: TierStore, namespace: Namespace, **options: Any) -> None:
        super().__init__(store, namespace, **{**options, "retry_after": 1e9})


@wrong_guard("TIER-12")
class ClosesWhenTheStoreDoes(GuardedTier):
    """Close waits for jobs that a store never reports."""

    def close(self) -> None:
        self.drain(60.0)
        super().close()


@wrong_guard("TIER-12")
class ReportsWhatTheStoreStillHas(GuardedTier):
    """At its deadline a job is reported although its pages are the store's."""

    def _expire(self) -> None:
        for entry in self._jobs.values():
            entry.is_copying = False
        super()._expire()
