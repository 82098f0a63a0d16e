"""Wrong tier stores."""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from kvview.testing import Mutant, StoreHarness
from kvview.tier import Namespace, Threaded, TierUsage
from kvview_reference.tier import FileStore
from kvview_reference.tier.entry import EntryFormat

MUTANTS: list[Mutant] = []
StoreT = TypeVar("StoreT", bound=type[Any])

_OPTIONS = {"root": "{tmp}"}
_LOCK_OF_THE_PROCESS = threading.Lock()


def later(seconds: float, call: Callable[..., object], *args: object) -> None:
    """Call it on a thread, if the folder and the pages are there by then."""

    def run() -> None:
        with suppress(Exception):
            call(*args)

    threading.Timer(seconds, run).start()


def wrong(law: str, incident: str | None = None) -> Callable[[StoreT], StoreT]:
    """A class of stores is wrong; its docstring says how."""

    def add(store: StoreT) -> StoreT:
        class Harness(StoreHarness):
            patience = 2.0

            def _target(self) -> str:
                return f"{__file__}:{store.__qualname__}"

        def factory() -> Any:
            return Harness(store, _OPTIONS)

        _plant(factory, store, law, incident)
        return store

    return add


def _plant(factory: Any, kind: type, law: str, incident: str | None) -> None:
    factory.__name__ = factory.__qualname__ = kind.__name__
    what = (kind.__doc__ or "").strip().partition("\n")[0]
    MUTANTS.append(Mutant(factory, law, what, incident))


@wrong("TIER-1")
class TrustsTheMedium(FileStore):
    """Bytes are read and not compared: a damaged sector answers wrong tokens."""

    def __init__(self, namespace: Namespace, root: str) -> None:
        super().__init__(namespace, root=root, checksum="none")


@wrong("TIER-1")
class SealsWithoutTheKey(FileStore):
    """The checksum is of the page alone: two files that are swapped both look right."""

    def __init__(self, namespace: Namespace, root: str) -> None:
        super().__init__(namespace, root=root)
        head = self._format.head
        self._format.head = (  # type: ignore[method-assign]
            lambda key, page: head(b"k", page)[:-1] + bytes(len(key))
        )


@wrong("TIER-1")
class SealsTheEnds(FileStore):
    """Of a large page the first and the last bytes are sealed, and those between are believed."""

    def __init__(self, namespace: Namespace, root: str) -> None:
        super().__init__(namespace, root=root)
        head, end = self._format.head, 65_536

        def of_ends(key: bytes, page: memoryview) -> bytes:
            both = bytes(page[:end]) + bytes(page[-end:])
            return head(key, page if len(page) <= 2 * end else memoryview(both))

        self._format.head = of_ends  # type: ignore[method-assign]


@wrong("TIER-1")
class FillsAPartOfThePage(FileStore):
    """A page that is longer or shorter than the file is filled as far as it goes."""

    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        content = (self._folder / self._path(key)).read_bytes()[-len(page) :]
        page[: len(content)] = content
        return True


@wrong("TIER-1")
class NamesFilesByText(FileStore):
    """Keys are decoded for the names of files: those that are no text share one."""

    def _path(self, key: bytes) -> str:
        name = key.decode("ascii", "ignore").strip().replace("/", "-")
        return f"00/f{name}".rstrip("\0").replace("\0", "")


@wrong("TIER-1")
class CutsKeys(FileStore):
    """The first bytes of a key are its name: keys with one beginning are one."""

    def _path(self, key: bytes) -> str:
        return super()._path(key[:64])


@wrong("TIER-1")
class LoadsInItsOwnOrder(FileStore):
    """Keys of a job are sorted for the disk, and their pages are not."""

    def _submit(
        self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], is_get: bool
    ) -> None:
        super()._submit(job, sorted(keys) if is_get and len(keys) > 9 else keys, pages, is_get)


@wrong("TIER-1")
class WritesAtMostAMegabyte(FileStore):
    """What one write does not take is lost."""

    def write(self, key: bytes, page: memoryview, /) -> bool:
        return super().write(key, page[:1_000_000])


class ChangesReports(FileStore):
    """Its poll is changed by ``change``."""

    def poll(self) -> Any:  # type: ignore[misc]
        return self.change(super().poll())

    def change(self, done: list[tuple[int, list[bool]]]) -> Any:
        """Make the reports wrong."""
        return done


@wrong("TIER-2")
class ReportsTwice(ChangesReports):
    """A report comes again with the next poll."""

    _last: Sequence[tuple[int, list[bool]]] = ()

    def change(self, done: list[tuple[int, list[bool]]]) -> Any:
        again, self._last = self._last, done
        return [*again, *done]


@wrong("TIER-2")
class ReportsTheJob(ChangesReports):
    """One flag for all keys of a job."""

    def change(self, done: list[tuple[int, list[bool]]]) -> Any:
        return [(job, [all(flags)]) for job, flags in done]


@wrong("TIER-2")
class ReportsInReverse(ChangesReports):
    """The flags of a job are those of the keys from the last to the first."""

    def change(self, done: list[tuple[int, list[bool]]]) -> Any:
        return [(job, flags[1:] + flags[:1]) for job, flags in done]


@wrong("TIER-2")
class FailsTheWholeJob(ChangesReports):
    """One key that is missing fails its neighbours."""

    def change(self, done: list[tuple[int, list[bool]]]) -> Any:
        return [(job, [all(flags)] * len(flags)) for job, flags in done]


@wrong("TIER-2")
class EndsAJobAtAFailure(ChangesReports):
    """What comes behind a key that failed fails too."""

    def change(self, done: list[tuple[int, list[bool]]]) -> Any:
        return [(job, [all(flags[: n + 1]) for n in range(len(flags))]) for job, flags in done]


@wrong("TIER-2", "vllm#39732")
class ForgetsEmptyJobs(ChangesReports):
    """A job without keys is never reported: whoever waits for it waits for ever."""

    def change(self, done: list[tuple[int, list[bool]]]) -> Any:
        return [(job, flags) for job, flags in done if flags]


@wrong("TIER-2")
class ReportsANumberOnce(ChangesReports):
    """A number that was reported is not reported again."""

    def change(self, done: list[tuple[int, list[bool]]]) -> Any:
        seen = self.__dict__.setdefault("seen", set())
        new = [(job, flags) for job, flags in done if job not in seen]
        seen.update(job for job, _ in new)
        return new


@wrong("TIER-3")
class WritesBehind(FileStore):
    """A put is reported when it is queued, and written when there is time."""

    def write(self, key: bytes, page: memoryview, /) -> bool:
        later(0.02, super().write, key, page)
        return True


@wrong("TIER-3")
class FillsAgain(FileStore):
    """A page is filled a second time after its job was reported: a retry that nobody stopped."""

    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        later(0.01, super().read_into, key, page)
        return super().read_into(key, page)


@wrong("TIER-4")
class ForgetsFailures(FileStore):
    """A key that failed is still found: requests ask and load for ever."""

    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        size = os.path.getsize(self._folder / self._path(key))
        return size == self._format.head_bytes(key) + len(page) and super().read_into(key, page)

    def lookup(self, keys: Sequence[bytes], /) -> list[bool | None]:
        return [(self._folder / self._path(key)).exists() for key in keys]


@wrong("TIER-4")
class KeepsDamagedFiles(FileStore):
    """What fails its checksum stays, and a put keeps what is there."""

    def __init__(self, namespace: Namespace, root: str) -> None:
        super().__init__(namespace, root=root)
        self._budget.remove = lambda path: None  # type: ignore[method-assign]


@wrong("TIER-4")
class FailsForEver(FileStore):
    """A key that failed once is not stored any more."""

    def __init__(self, namespace: Namespace, root: str) -> None:
        super().__init__(namespace, root=root)
        self._answers.stored = lambda key: None  # type: ignore[method-assign]


@wrong("TIER-5")
class LooksUpOnTheCallersThread(FileStore):
    """A lookup asks the medium while the scheduler waits."""

    def lookup(self, keys: Sequence[bytes], /) -> list[bool | None]:
        return [self.has(key) for key in keys]


@wrong("TIER-5")
class PutsOnTheCallersThread(FileStore):
    """A put returns when it is done."""

    def _submit(
        self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], is_get: bool
    ) -> None:
        super()._submit(job, keys, pages, is_get)
        if not is_get:
            with self._changed:
                self._changed.wait_for(lambda: job not in self._jobs)


@wrong("TIER-5")
class NeverKnows(FileStore):
    """What a lookup did not know it never learns."""

    def _ask(self, keys: list[bytes]) -> None: ...


@wrong("TIER-5")
class WakesUpTooSoon(FileStore):
    """The engine is woken up when a job begins: what ends later it never hears of."""

    def on_wake_up(self, wake_up: Callable[[], None], /) -> None:  # type: ignore[misc]
        self._wake_up_soon = wake_up

    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        self._wake_up_soon()
        return super().read_into(key, page)

    def write(self, key: bytes, page: memoryview, /) -> bool:
        self._wake_up_soon()
        return super().write(key, page)


@wrong("TIER-6")
class TakesAnyJob(FileStore):
    """Keys that are named twice, and pages of any shape, are taken."""

    def _submit(
        self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], is_get: bool
    ) -> None:
        num = min(len(keys), len(pages))
        flat = [memoryview(bytearray(page.nbytes + 1)) for page in pages[:num]]
        known = [key[:100] or b"-" for key in dict.fromkeys(keys[:num])]
        super()._submit(job, known, (flat if num and job == 900 else pages)[: len(known)], is_get)


@wrong("TIER-6")
class TakesANumberTwice(FileStore):
    """A second job of one number takes the place of the first."""

    def _submit(
        self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], is_get: bool
    ) -> None:
        with self._changed:
            self._jobs.pop(job, None)
        super()._submit(job, keys, pages, is_get)


@wrong("TIER-6")
class RaisesForTheMedium(FileStore):
    """A put into a folder that is gone raises on the scheduler's thread."""

    def _submit(
        self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], is_get: bool
    ) -> None:
        os.stat(self._folder / "lock")
        super()._submit(job, keys, pages, is_get)


@wrong("TIER-7")
class SaysYesToHalfAKey(FileStore):
    """A lookup compares the beginning of names."""

    def has(self, key: bytes, /) -> bool:
        return any(self._folder.glob(f"*/{key.hex()[:-2]}*"))


@wrong("TIER-7")
class FindsNothing(FileStore):
    """Every lookup is a miss: stored for nothing."""

    def lookup(self, keys: Sequence[bytes], /) -> list[bool | None]:
        return [False] * len(keys)


@wrong("TIER-7")
class DeletesNothing(FileStore):
    """What is deleted is still there."""

    def delete(self, keys: Sequence[bytes], /) -> None: ...


@wrong("TIER-7")
class FindsWhatWasDeletedUnderAPut(FileStore):
    """A put that ends after the delete of its key makes it found, and its bytes are removed."""

    def lookup(self, keys: Sequence[bytes], /) -> list[bool | None]:
        return Threaded.lookup(self, keys)

    def write(self, key: bytes, page: memoryview, /) -> bool:
        return self.store(key, page, is_replaced=False)

    def _remove_hidden(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._hidden.discard(key)
            self.remove(key)


class WrongBudget(FileStore):
    """Its budget is changed by ``spoil``."""

    def __init__(self, namespace: Namespace, root: str, max_bytes: int | None = None) -> None:
        super().__init__(namespace, root=root, max_bytes=max_bytes)
        if max_bytes is not None:
            self.spoil(self._budget)

    def spoil(self, budget: Any) -> None:
        """Make it wrong."""


@wrong("TIER-8")
class CountsAfterWriting(WrongBudget):
    """Room is made when a file has its name: what is being written does not count."""

    def spoil(self, budget: Any) -> None:
        budget.max_bytes += 60_000


@wrong("TIER-8")
class NeverEvicts(WrongBudget):
    """A store that is full stays full: nothing new is stored any more."""

    def spoil(self, budget: Any) -> None:
        budget._evict = lambda used, num_bytes: used


@wrong("TIER-8")
class WritesWhatCannotFit(WrongBudget):
    """A page that is larger than all of it is written all the same."""

    def spoil(self, budget: Any) -> None:
        reserve = budget.reserve
        budget.reserve = lambda size: size > budget.max_bytes or reserve(size)


@wrong("TIER-8")
class SaysAnotherBudget(WrongBudget):
    """What it says of itself is not what it does."""

    def usage(self) -> TierUsage:
        return TierUsage(0, None)


@wrong("TIER-9")
class BeginsAgain(FileStore):
    """A store that is opened forgets what was there."""

    def __init__(self, namespace: Namespace, root: str) -> None:
        super().__init__(namespace, root=f"{root}/{time.monotonic_ns()}")


@wrong("TIER-9")
class KeepsItsIndexInMemory(FileStore):
    """Entries count when the store is closed: a process that is killed loses them."""

    def __init__(self, namespace: Namespace, root: str) -> None:
        super().__init__(namespace, root=root)
        if not (self._folder / "closed").exists():
            for path in self._folder.glob("??/*"):
                path.unlink()
        (self._folder / "closed").unlink(missing_ok=True)

    def close(self) -> None:
        super().close()
        (self._folder / "closed").touch()


@wrong("TIER-9")
class WritesIntoOneFile(FileStore):
    """What is half-written has one name for all processes: one writes into another's file."""

    def store(self, key: bytes, page: memoryview, *, is_replaced: bool) -> bool:
        half, path = self._folder / "half" / "half", self._folder / self._path(key)
        content = self._format.head(key, page) + bytes(page)
        with _LOCK_OF_THE_PROCESS:
            half.write_bytes(content)
            path.parent.mkdir(exist_ok=True)
            half.rename(path)
        return True


@wrong("TIER-10")
class SealsWithoutTheNamespace(FileStore):
    """The checksum is of key and page: a file that a restore put in a wrong place looks right."""

    def __init__(self, namespace: Namespace, root: str) -> None:
        super().__init__(namespace, root=root)
        self._format = EntryFormat(Namespace("any", "any"), "xxh3")


@wrong("TIER-10")
class OneFolderForAll(FileStore):
    """Other weights find the KV of these."""

    def __init__(self, namespace: Namespace, root: str) -> None:
        super().__init__(Namespace("any", "any"), root=root)


@wrong("TIER-10", "vllm#46014")
class ForgetsTheRank(FileStore):
    """Ranks share a folder: each has other heads of the same tokens."""

    def __init__(self, namespace: Namespace, root: str) -> None:
        text = namespace.to_json().replace('"rank": 1', '"rank": 0')
        super().__init__(Namespace.from_json(text), root=root)


@wrong("TIER-11")
class ForgetsJobsAtClose(FileStore):
    """Jobs in flight when it is closed are not heard of again."""

    def close(self) -> None:
        super().close()
        self._done.clear()


@wrong("TIER-11")
class ClosesOnce(FileStore):
    """A second close raises."""

    def close(self) -> None:
        if self._is_closed:
            raise ValueError("it is closed")
        super().close()


@wrong("TIER-11")
class ReportsAFewAtATime(ChangesReports):
    """A poll brings at most 64 reports, the rest comes with later ones."""

    _waiting: Sequence[tuple[int, list[bool]]] = ()

    def change(self, done: list[tuple[int, list[bool]]]) -> Any:
        waiting = [*self._waiting, *done]
        self._waiting = waiting[64:]
        return waiting[:64]


@wrong("TIER-11")
class DrainsNothing(FileStore):
    """Drain says True at once."""

    def drain(self, timeout: float, /) -> bool:  # type: ignore[misc]
        return True


@wrong("TIER-8")
class NeverGivesRoomBack(FileStore):
    """Room that was reserved for a page that could not be written stays reserved."""

    def __init__(self, namespace: Namespace, root: str, max_bytes: int | None = None) -> None:
        super().__init__(namespace, root=root, max_bytes=max_bytes)
        unlink = self._files.unlink
        self._budget.give_up = lambda half, _: unlink(half)  # type: ignore


@wrong("TIER-8")
class EvictsByAge(FileStore):
    """What was stored first goes first, used or not."""

    def __init__(self, namespace: Namespace, root: str, max_bytes: int | None = None) -> None:
        super().__init__(namespace, root=root, max_bytes=max_bytes)
        self._budget.used = lambda path: None  # type: ignore[method-assign]


@wrong("TIER-8")
class NamesFilesOfEvictions(FileStore):
    """Listeners are told of the keys as they are spelled on the medium."""

    def __init__(self, namespace: Namespace, root: str, max_bytes: int | None = None) -> None:
        super().__init__(namespace, root=root, max_bytes=max_bytes)

    def on_evicted(self, evicted: Callable[[Sequence[bytes]], None], /) -> None:
        super().on_evicted(lambda keys: evicted([key.hex().encode() for key in keys]))


@wrong("TIER-8")
class BelievesAnyCount(FileStore):
    """A count that is damaged is taken for none."""

    def __init__(self, namespace: Namespace, root: str, max_bytes: int | None = None) -> None:
        path = Path(root, namespace.digest.hex(), "budget")
        found = path.read_bytes() if path.exists() else b""
        is_damaged = path.exists() and int.from_bytes(found[32:], "little") != zlib.crc32(
            found[:32]
        )
        super().__init__(namespace, root=root, max_bytes=max_bytes)
        with self._budget._counted() as count:
            count.stored = 0 if is_damaged else count.stored


@wrong("TIER-9")
class SweepsWhenOpened(FileStore):
    """What is half-written is removed by whoever opens, also what others are writing."""

    def __init__(self, namespace: Namespace, root: str) -> None:
        super().__init__(namespace, root=root)
        for half in (self._folder / "half").iterdir():
            half.unlink(missing_ok=True)


@wrong("TIER-7")
class DeletesWhatWasStoredSince(FileStore):
    """A delete that is under way removes what a later put has stored."""

    def __init__(self, namespace: Namespace, root: str) -> None:
        super().__init__(namespace, root=root)
        self._under_way = set[bytes]()

    def delete(self, keys: Sequence[bytes], /) -> None:
        super().delete(keys)
        self._under_way.update(keys)

    def write(self, key: bytes, page: memoryview, /) -> bool:
        is_stored = super().write(key, page)
        if key in self._under_way:
            self._under_way.discard(key)
            self.remove(key)
        return is_stored
