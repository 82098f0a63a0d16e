"""Stores of files with one fault, drawn at random: what, where, and how seldom.

kvview check tests/tier/drawn_store.py:DrawnStore --option root={tmp} --option fault=17
python benchmarks/tier.py faults --stores 200
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvview.tier import Namespace
from kvview_reference.tier import FileStore

KINDS = {
    "raises": ("put", "get", "lookup", "poll"),
    "never": ("put", "get"),
    "late": ("put", "get"),
    "twice": ("at once", "with the next"),
    "short": ("page of a put", "page of a get", "flags"),
    "lies": ("lookup yes", "lookup no", "put", "get", "order of flags", "one flag for all"),
    "blocks": ("put", "get", "lookup"),
    "damaged": ("flip", "zero", "other key", "other size"),
    "full disk": ("says yes", "keeps half", "raises"),
    "killed": ("no temporary", "says yes early", "keeps temporaries", "index at close"),
}
"""What goes wrong, and where."""

SELDOM = ("always", "each second", "each seventh", "from the tenth on", "large pages", "some keys")
"""When it does; the last two where a key is at hand."""

_WITHOUT_KEYS = {"poll", "at once", "with the next", "flags", "order of flags", "one flag for all"}


@dataclass(frozen=True)
class DrawnFault:
    """A fault.

    Args:
        kind: Of :data:`KINDS`.
        where: One of its places.
        when: Of :data:`SELDOM`.
    """

    kind: str
    where: str
    when: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.where}), {self.when}"


def draw_fault(seed: int) -> DrawnFault:
    """The fault of a seed; kinds take turns."""
    dice = random.Random(seed)
    kind = [*KINDS][seed % len(KINDS)]
    where = dice.choice(KINDS[kind])
    has_key = where not in _WITHOUT_KEYS and kind != "never"
    times: Sequence[str] = SELDOM if has_key else SELDOM[:4]
    if where == "index at close":
        times = ("always",)
    if where.startswith("lookup"):
        times = (*SELDOM[:4], SELDOM[5])
    return DrawnFault(kind, where, dice.choice(times))


class DrawnStore(FileStore):
    """A store of files with one fault.

    Args:
        namespace: Whose bytes.
        root: Folder.
        fault: Seed of :func:`draw_fault`.
        max_bytes: As of a ``FileStore``.
    """

    def __init__(
        self, namespace: Namespace, root: str, fault: int, max_bytes: int | None = None
    ) -> None:
        self._fault = draw_fault(fault)
        is_blind = self._fault.kind == "damaged"
        super().__init__(
            namespace, root=root, max_bytes=max_bytes, checksum="none" if is_blind else "xxh3"
        )
        self._calls = 0
        self._counting = threading.Lock()
        self._again: list[tuple[int, list[bool]]] = []
        self._is_get: dict[int, bool] = {}
        self._index = self._folder / "index"
        if self._fault.where == "index at close" and not self._index.exists():
            for path in self._folder.glob("??/*"):
                path.unlink()
        self._index.unlink(missing_ok=True)

    def _is(self, kind: str, where: str, *, key: bytes = b"", num_bytes: int = 0) -> bool:
        """Whether it goes wrong here and now."""
        fault = self._fault
        if (kind, where) != (fault.kind, fault.where):
            return False
        with self._counting:
            self._calls += 1
            calls = self._calls
        return {
            "always": True,
            "each second": calls % 2 == 0,
            "each seventh": calls % 7 == 0,
            "from the tenth on": calls >= 10,
            "large pages": num_bytes > 20_000,
            "some keys": sum(key) % 5 == 0,
        }[fault.when]

    # --- calls of the scheduler's thread ---

    def _submit(
        self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], is_get: bool
    ) -> None:
        method = "get" if is_get else "put"
        met: Any = {"key": keys[0] if keys else b"", "num_bytes": max(map(len, pages), default=0)}
        if self._is("raises", method, **met) or (
            not is_get and self._is("full disk", "raises", **met)
        ):
            raise OSError(28, "no space left on device")
        if keys and self._is("blocks", method, **met):
            self.has(keys[0])
        super()._submit(job, keys, pages, is_get)
        self._is_get[job] = is_get

    def lookup(self, keys: Sequence[bytes], /) -> list[bool | None]:
        first = keys[0] if keys else b""
        if self._is("raises", "lookup", key=first):
            raise ConnectionError("the server is gone")
        if self._is("blocks", "lookup", key=first):
            return [self.has(key) for key in keys]
        flags = super().lookup(keys)
        for number, key in enumerate(keys):
            if flags[number] is not None:
                if self._is("lies", "lookup yes", key=key):
                    flags[number] = True
                if self._is("lies", "lookup no", key=key):
                    flags[number] = False
        return flags

    def poll(self) -> Any:  # type: ignore[misc]
        if self._is("raises", "poll"):
            raise TimeoutError("nobody answers")
        done, again = super().poll(), self._again
        self._again = []
        reported = [*again]
        for job, flags in done:
            if self._is("never", "get" if self._is_get.pop(job, False) else "put"):
                continue
            changed = self._changed_flags(flags)
            reported.append((job, changed))
            if self._is("twice", "at once"):
                reported.append((job, changed))
            if self._is("twice", "with the next"):
                self._again.append((job, changed))
        return reported

    def _changed_flags(self, flags: list[bool]) -> list[bool]:
        if flags and self._is("short", "flags"):
            return flags[:-1]
        if self._is("lies", "order of flags"):
            return flags[::-1]
        if self._is("lies", "one flag for all"):
            return [any(flags)] * len(flags)
        return flags

    def close(self) -> None:
        super().close()
        with suppress(OSError):
            self._index.touch()

    # --- calls of its threads ---

    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        met: Any = {"key": key, "num_bytes": len(page)}
        if self._is("late", "get", **met):
            _later(super().read_into, key, page)
        if self._is("lies", "get", **met):
            return self.holds(key)
        if self._is("short", "page of a get", **met):
            whole = memoryview(bytearray(len(page)))
            is_good = super().read_into(key, whole)
            page[: len(page) * 7 // 8] = whole[: len(page) * 7 // 8]
            return is_good
        is_good = super().read_into(key, page)
        if is_good and self._is("damaged", "flip", **met):
            page[len(page) // 2] ^= 16
        if is_good and self._is("damaged", "zero", **met):
            page[-512:] = bytes(len(page[-512:]))
        return is_good

    def load(self, key: bytes, page: memoryview, /) -> bool:
        if self._is("damaged", "other size", key=key, num_bytes=len(page)):
            with open(self._folder / self._path(key), "rb") as file:
                found = file.read()[self._format.head_bytes(key) :][: len(page)]
            page[: len(found)] = found
            return True
        return super().load(key, page)

    def write(self, key: bytes, page: memoryview, /) -> bool:
        met: Any = {"key": key, "num_bytes": len(page)}
        write: Callable[[bytes, memoryview], bool] = super().write
        if self._is("late", "put", **met) or self._is("killed", "says yes early", **met):
            _later(write, key, page)
            return True
        if self._is("lies", "put", **met) or self._is("full disk", "says yes", **met):
            return True
        if self._is("short", "page of a put", **met):
            return write(key, page[: max(1, len(page) - 1)])
        if self._is("killed", "keeps temporaries", **met):
            (self._folder / "half" / f"kept-{key.hex()[:40]}").write_bytes(page)
        is_half = self._is("full disk", "keeps half", **met)
        if is_half or self._is("killed", "no temporary", **met):
            self._write_in_place(key, page, len(page) // 2 if is_half else len(page))
            return True
        if self._is("damaged", "other key", **met):
            write(key + b"\0", page)
            path = self._folder / self._path(key)
            path.parent.mkdir(exist_ok=True)
            content = self._format.head(key, page) + bytes(page)[::-1]
            with open(path, "wb") as file:
                file.write(content)
            return True
        return write(key, page)

    def _write_in_place(self, key: bytes, page: memoryview, num_bytes: int) -> None:
        path = self._folder / self._path(key)
        path.parent.mkdir(exist_ok=True)
        with open(path, "wb", buffering=0) as file:
            file.write(self._format.head(key, page))
            for at in range(0, num_bytes, 4096):
                file.write(page[at : min(at + 4096, num_bytes)])


def _later(call: Callable[..., object], *args: object) -> None:
    def run() -> None:
        time.sleep(0.02)
        with suppress(Exception):
            call(*args)

    threading.Thread(target=run, daemon=True).start()
