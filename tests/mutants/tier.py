"""Wrong tier stores."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from kvview.testing import Mutant, StoreHarness
from kvview.tier import Namespace
from kvview_reference.tier import FileStore

MUTANTS: list[Mutant] = []
StoreT = TypeVar("StoreT", bound=type[Any])

_OPTIONS = {"root": "{tmp}"}


def later(seconds: float, call: Callable[..., object], *args: object) -> None:
    """Call a function on a thread, after which the folder and the pages may be gone."""

    def run() -> None:
        with suppress(Exception):
            call(*args)

    threading.Timer(seconds, run).start()


def wrong(law: str, incident: str | None = None) -> Callable[[StoreT], StoreT]:
    """Plant a wrong class of stores, whose docstring names the fault."""

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
    """Bytes are read and not verified, so a damaged sector gives wrong tokens."""

    def __init__(self, namespace: Namespace, root: str) -> None:
        super().__init__(namespace, root=root, checksum="none")


class ChangesReports(FileStore):
    """Its poll is changed by ``change``."""

    def poll(self) -> Any:  # type: ignore[misc]
        return self.change(super().poll())

    def change(self, done: list[tuple[int, list[bool]]]) -> Any:
        """Make the reports wrong."""
        return done


@wrong("TIER-2", "vllm#39732")
class ForgetsEmptyJobs(ChangesReports):
    """A job without keys is never reported, so its caller waits forever."""

    def change(self, done: list[tuple[int, list[bool]]]) -> Any:
        return [(job, flags) for job, flags in done if flags]


@wrong("TIER-3")
class FillsAgain(FileStore):
    """A page is filled again after its job was reported, by a retry that was not stopped."""

    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        later(0.01, super().read_into, key, page)
        return super().read_into(key, page)


@wrong("TIER-4")
class FailsForever(FileStore):
    """A key that failed once is never stored again."""

    def __init__(self, namespace: Namespace, root: str) -> None:
        super().__init__(namespace, root=root)
        self._answers.stored = lambda key: None  # type: ignore[method-assign]


@wrong("TIER-5")
class LooksUpOnTheCallersThread(FileStore):
    """A lookup reads the medium while the scheduler waits."""

    def lookup(self, keys: Sequence[bytes], /) -> list[bool | None]:
        return [self.has(key) for key in keys]


@wrong("TIER-6")
class TakesANumberTwice(FileStore):
    """A second job of one number takes the place of the first."""

    def _submit(
        self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], is_get: bool
    ) -> None:
        with self._changed:
            self._jobs.pop(job, None)
        super()._submit(job, keys, pages, is_get)


@wrong("TIER-7")
class DeletesNothing(FileStore):
    """A deleted key is still found."""

    def delete(self, keys: Sequence[bytes], /) -> None: ...


class WrongBudget(FileStore):
    """Its budget is changed by ``change_budget``."""

    def __init__(self, namespace: Namespace, root: str, max_bytes: int | None = None) -> None:
        super().__init__(namespace, root=root, max_bytes=max_bytes)
        if max_bytes is not None:
            self.change_budget(self._budget)

    def change_budget(self, budget: Any) -> None:
        """Make it wrong."""


@wrong("TIER-8")
class NeverEvicts(WrongBudget):
    """A store that is full stays full, so no new page is stored."""

    def change_budget(self, budget: Any) -> None:
        budget._evict = lambda used, num_bytes: used


@wrong("TIER-9")
class StartsAgain(FileStore):
    """A store that is opened forgets the pages of the earlier one."""

    def __init__(self, namespace: Namespace, root: str) -> None:
        super().__init__(namespace, root=f"{root}/{time.monotonic_ns()}")


@wrong("TIER-10", "vllm#46014")
class ForgetsTheRank(FileStore):
    """Ranks share a folder: each has other heads of the same tokens."""

    def __init__(self, namespace: Namespace, root: str) -> None:
        text = namespace.to_json().replace('"rank": 1', '"rank": 0')
        super().__init__(Namespace.from_json(text), root=root)


@wrong("TIER-11")
class ClosesOnce(FileStore):
    """A second close raises."""

    def close(self) -> None:
        if self._is_closed:
            raise ValueError("it is closed")
        super().close()
