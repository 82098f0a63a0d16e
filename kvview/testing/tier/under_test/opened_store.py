"""A store under test in a new folder, with the faults that the kit causes there."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from traceback import walk_tb
from typing import Any

from kvview.connector.hook_errors import places_in
from kvview.errors import one_line
from kvview.targets import target_of
from kvview.testing.placeholders import in_folder
from kvview.testing.supervision import watchdog
from kvview.testing.supervision.source_lines import at_places
from kvview.testing.tier.under_test.io_watch import break_connections, open_sockets
from kvview.testing.tier.under_test.writer import Writer
from kvview.tier import Namespace, Threaded, TierStore
from kvview.tier.bases.threaded import flag_of

_SMALLEST_ENTRY = 290  # minimum of bytes of an entry; smaller files are the store's own notes

_SLOW_REMOVAL = 0.003  # seconds
_CLOSE_SECONDS = 1.0  # of CPU time


class OpenedStore:
    """A store, its folder, and the faults that the kit causes.

    Args:
        make: Makes the store from a class, a namespace and options.
        made_of: The class of the store.
        options: Options of the store; ``{tmp}`` in a text is replaced by the folder.
        namespace: Namespace of the store; None for the default of the kit.
        folder: Folder of an earlier store; None for a new one.
    """

    def __init__(
        self,
        make: Callable[..., TierStore],
        made_of: type[TierStore],
        options: Mapping[str, Any],
        namespace: Namespace | None = None,
        folder: Path | None = None,
    ) -> None:
        self._make, self._made_of, self._options = make, made_of, options
        self.folder = folder or Path(tempfile.mkdtemp(prefix="kvview-tier-"))
        weights = self.folder.name  # new weights, because stores may share a server
        self.namespace = namespace or Namespace("a-kit", weights, kv_dtype="int8", block_size=16)
        self._num_damaged = 0
        self._gate = threading.Event()
        self._gate.set()
        self.callers: set[int] = set()
        """The threads that were inside a blocking call of the store, if they are known."""
        self.first_error = ""
        """The first exception of a blocking call, as the end of a message; empty without one."""
        self._foreign_sockets = open_sockets()
        gated = self._gated(made_of) if issubclass(made_of, Threaded) else made_of
        try:
            self.store = make(gated, self.namespace, **self._filled_options())
        except BaseException:
            if folder is None:
                shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def pause(self) -> None:
        """Make every blocking call of the store wait."""
        self._gate.clear()

    def resume(self) -> None:
        """Let blocking calls continue."""
        self._gate.set()

    def reopen(self) -> OpenedStore:
        """Make another store over the same folder."""
        self.resume()
        self.store.close()
        return self.with_namespace(self.namespace)

    def with_namespace(self, namespace: Namespace) -> OpenedStore:
        """Make a store for another namespace in the same folder."""
        return OpenedStore(self._make, self._made_of, self._options, namespace, self.folder)

    def occupied_bytes(self) -> int:
        """Return the number of bytes of all files in the folder."""
        return sum(self._sizes().values())

    def damage(self, how: str) -> None:
        """Damage every large file in the folder, in its place and without a change of its size.

        A store may have mapped a file, and a shorter file would end the process with SIGBUS.

        Args:
            how: ``"flip"`` changes a bit, ``"lose the start"`` and ``"lose the end"`` write zeros
                as after a power cut, and ``"swap"`` exchanges neighbours as far as they go.
        """
        contents = {}
        for path in self.entries():
            with suppress(OSError):  # the store has just removed the file
                contents[path] = path.read_bytes()
        by_size = sorted(contents, key=lambda path: (len(contents[path]), path))
        for number, path in enumerate(by_size):
            right = contents[path]
            at = len(right) * ((self._num_damaged + number) * 7 % 41 + 1) // 43
            if how == "flip":
                wrong = right[:at] + bytes([right[at] ^ 1 << number % 8]) + right[at + 1 :]
            elif how == "swap":
                other = contents[by_size[min(number ^ 1, len(by_size) - 1)]]
                wrong = other[: len(right)] + right[len(other) :]
            elif how == "lose the start":
                wrong = bytes(at) + right[at:]
            else:
                wrong = right[:at] + bytes(len(right) - at)
            with suppress(OSError):
                times = path.stat()
                with path.open("r+b") as file:
                    file.write(wrong)
                os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a medium that fails
        self._num_damaged += len(contents)

    def lose_medium(self) -> None:
        """Replace the folder by a file."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # in case a store creates the folder again at once
            self.folder.write_text("no folder", encoding="utf-8")

    def break_connections(self) -> int:
        """Break the connections that were opened after this store; return their number."""
        return break_connections(self._foreign_sockets)

    def start_writer(
        self, keys: Mapping[bytes, int], most_growth: int | None = None, run: str = ""
    ) -> Writer:
        """Start a process that opens the same folder and puts keys.

        Args:
            keys: Keys, each with the number of bytes of its page.
            most_growth: Number of bytes more than those of the largest file after which the system
                ends the process in the middle of a write; None for no limit.
            run: Run of the process; empty for the namespace of this store.
        """
        target = importable(self._made_of)
        assert target is not None, "without a target there is no capability KILL"
        limit = None
        if most_growth is not None:
            limit = most_growth + max(self._sizes().values(), default=0)
        namespace = replace(self.namespace, run=run) if run else self.namespace
        return Writer(target, self._filled_options(), namespace, keys, limit)

    def files(self) -> set[Path]:
        """Return the files in the folder, from which the store may just remove a folder."""
        return {Path(at, name) for at, _, names in os.walk(self.folder) for name in names}

    def entries(self) -> set[Path]:
        """Return the files in the folder that are large enough for an entry."""
        return {path for path, size in self._sizes().items() if size >= _SMALLEST_ENTRY}

    def end(self) -> None:
        """Close the store, which the checks do not rely on, and remove the folder."""
        self.resume()
        limit = watchdog.limit(_CLOSE_SECONDS)
        with suppress(watchdog.HookTimeout), limit, watchdog.watching(), watchdog.calling():
            self.store.close()
        self.remove()

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # the folder is a file after lose_medium
            self.folder.unlink()

    def _filled_options(self) -> dict[str, Any]:
        return {key: in_folder(value, str(self.folder)) for key, value in self._options.items()}

    def _sizes(self) -> dict[Path, int]:
        sizes = {}
        for path in sorted(self.files()):
            with suppress(OSError):  # the store has just removed the file
                sizes[path] = path.stat().st_size
        return sizes

    def _gated(self, make: Any) -> Any:
        """Make a subclass of a ``Threaded`` class whose blocking calls wait at the gate.

        A removal that waited takes longer than the other calls, which may overtake it.
        """

        def waiting(name: str) -> Callable[..., bool]:
            def call(store: Any, *args: Any) -> bool:
                self.callers.add(threading.get_ident())
                self._gate.wait()
                try:
                    return flag_of(name, getattr(make, name)(store, *args))
                except Exception as error:
                    places = places_in(walk_tb(error.__traceback__), make.__module__)
                    first = f"; the first exception: {one_line(error)}{at_places(places)}"
                    self.first_error = self.first_error or first
                    raise

            call.__name__ = name
            return call

        def remove_later(store: Any, keys: Any, remove: Callable[[bytes], object]) -> None:
            def waiting_remove(key: bytes) -> None:
                if not self._gate.is_set():
                    self._gate.wait()
                    time.sleep(_SLOW_REMOVAL)
                remove(key)

            make.remove_later(store, keys, waiting_remove)

        calls: dict[str, Any] = {n: waiting(n) for n in ("has", "read_into", "write")}
        calls["remove_later"] = remove_later
        return type(make.__name__, (make,), calls)


def importable(store: type[TierStore]) -> str | None:
    """Return the target by which another process can import a class; None if it cannot."""
    if target := target_of(store):
        return target
    module, name = store.__module__, store.__qualname__
    return None if module == "__main__" or "<" in name else f"{module}:{name}"
