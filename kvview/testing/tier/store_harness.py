"""A harness over a class of stores, in a fresh folder."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvview.errors import ConfigError, one_line
from kvview.targets import target_of
from kvview.testing import watchdog
from kvview.testing.harness import Capability
from kvview.testing.placeholders import FOLDER, in_folder
from kvview.testing.profiles import current_profile
from kvview.tier import GuardedTier, Namespace, Threaded, TierStore, is_tier_store
from kvview.tier.store import missing_methods

_KILL_SECONDS = 300.0
SMALLEST_ENTRY = 290  # bytes; smaller files are the store's own notes


def tier_factory(target: Any, options: Mapping[str, Any] | None = None) -> Callable[[], Any]:
    """A factory of harnesses: the target itself, or one made of a class of stores.

    Args:
        target: A factory, or a class of :class:`~kvview.tier.TierStore`.
        options: Of the class; None for those of the run.

    Raises:
        ConfigError: The class lacks a method, or cannot be made with these options.
    """
    if not is_tier_store(target):
        return target  # type: ignore[no-any-return]
    lacking = ", ".join(missing_methods(target))
    if lacking:
        raise ConfigError(f"{target.__qualname__} is no tier store: it lacks {lacking}")
    if inspect.isabstract(target):
        lacking = ", ".join(sorted(vars(target)["__abstractmethods__"]))
        raise ConfigError(f"{target.__qualname__} is abstract: it lacks {lacking}")
    given = dict(current_profile().options if options is None else options)
    _require_options(target, given)
    return lambda: StoreHarness(target, given)


class StoreHarness:
    """A store of a class, made with a namespace and options, in a folder of its own.

    Args:
        make: The class.
        options: Its options; ``{tmp}`` in a text is replaced by the folder.
        namespace: None for one of the kit's.
        folder: Made by another harness; None for a new one.
    """

    guarded = False
    """Whether the store is put behind a :class:`~kvview.tier.GuardedTier`."""

    def __init__(
        self,
        make: Callable[..., TierStore],
        options: Mapping[str, Any],
        namespace: Namespace | None = None,
        folder: Path | None = None,
    ) -> None:
        self._make, self._options = make, options
        self.namespace = namespace or Namespace("kit", weights="1", kv_dtype="int8", block_size=16)
        self.folder = folder or Path(tempfile.mkdtemp(prefix="kvview-tier-"))
        self._num_damaged = 0
        self._gate = threading.Event()
        self._gate.set()
        self.callers: set[int] = set()
        """Threads that were in a blocking call of the store, where that can be seen."""
        self.store: TierStore = self._gated(make)(self.namespace, **self._filled_options())
        if self.guarded:
            self.store = GuardedTier(self.store, self.namespace)

    @property
    def capabilities(self) -> set[str]:
        """The capabilities that follow from the class, its options and its methods."""
        found: set[str] = set()
        places = [str(value) for value in self._options.values() if FOLDER in str(value)]
        if places:  # which may be one on a server
            found |= {Capability.REOPEN, Capability.NAMESPACES}
            found |= {Capability.KILL} if self._target() and hasattr(os, "fork") else set()
        if any(place.partition("://")[0] in (place, "file") for place in places):
            found |= {Capability.DAMAGE, Capability.GONE}
            parameters = inspect.signature(self._make).parameters
            found |= {Capability.BUDGET} if "max_bytes" in parameters else set()
            is_verified = getattr(self._make, "verifies", False) or self.guarded
            found |= {Capability.VERIFIES} if is_verified else set()
        if self._is_threaded():
            found.add(Capability.PAUSE)
        for name in (Capability.DELETE, Capability.USAGE, Capability.TOUCH):
            both = (self.store, self._make)  # a guard has more methods than it passes on
            has_it = all(callable(getattr(one, name.value, None)) for one in both)
            found |= {name} if has_it else set()
        return found

    def pause(self) -> None:
        """Whatever blocks in the store blocks from now."""
        self._gate.clear()

    def resume(self) -> None:
        """It goes on."""
        self._gate.set()

    def reopen(self) -> StoreHarness:
        """Another store over the same folder."""
        self.resume()
        self.store.close()
        return type(self)(self._make, self._options, self.namespace, self.folder)

    def with_namespace(self, namespace: Namespace) -> StoreHarness:
        """Make a store for another namespace in the same folder."""
        return type(self)(self._make, self._options, namespace, self.folder)

    def with_budget(self, max_bytes: int) -> StoreHarness:
        """A store with a budget."""
        return type(self)(self._make, {**self._options, "max_bytes": max_bytes})

    def occupied_bytes(self) -> int:
        """Of all files in the folder now."""
        total = 0
        for path in self._files():
            with suppress(OSError):  # a file that was being written
                total += path.stat().st_size
        return total

    def damage(self, how: str) -> int:
        """Damage every large file in the folder; ``"swap"`` exchanges them in pairs."""
        contents = {}
        for path in self._files():
            with suppress(FileNotFoundError):  # removed on a thread just now
                contents[path] = path.read_bytes()
        large = {path: found for path, found in contents.items() if len(found) >= SMALLEST_ENTRY}
        number, self._num_damaged = self._num_damaged, self._num_damaged + len(large)
        spoilt = {
            path: _spoil(how, number + at, found) for at, (path, found) in enumerate(large.items())
        }
        if how == "swap":
            alike = sorted(large, key=lambda path: len(large[path]))
            pairs = list(zip(alike[::2], alike[1::2], strict=False))
            spoilt = {a: large[b] for one, other in pairs for a, b in ((one, other), (other, one))}
        for path, content in spoilt.items():  # a store may have mapped the old file
            new = self.folder / "damaged"
            new.write_bytes(content)
            if path.exists():  # else it was removed meanwhile
                new.replace(path)
        self.folder.joinpath("damaged").unlink(missing_ok=True)
        return len(spoilt)

    def lose_medium(self) -> None:
        """A file is where the folder was."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # a store that made it again at once
            self.folder.write_text("no folder", encoding="utf-8")

    def killed_runs(self, num: int, seed: int) -> list[dict[str, Any]]:
        """Kill a process that writes, again and again; see :mod:`.processes`."""
        runs: list[dict[str, Any]] = self._played("killed", num, seed)
        return runs

    def written_at_once(self, num: int, seed: int) -> dict[str, Any]:
        """Let so many processes write into the place at once; see :mod:`.processes`."""
        found: dict[str, Any] = self._played("at_once", num, seed)
        return found

    def entries(self) -> set[Path]:
        """Files in the folder that are large enough for an entry."""
        found = set()
        for path in self._files():
            with suppress(OSError):  # a file that was being written
                found |= {path} if path.stat().st_size >= SMALLEST_ENTRY else set()
        return found

    def end(self) -> None:
        """Close the store and remove the folder."""
        self.resume()
        self.store.close()
        if self.folder.is_dir():
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            self.folder.unlink(missing_ok=True)

    def _filled_options(self) -> dict[str, Any]:
        return {key: in_folder(value, str(self.folder)) for key, value in self._options.items()}

    def _played(self, program: str, num: int, seed: int) -> Any:
        """Return the findings of a program of the kit, which is a process because it forks."""
        job = {
            "target": self._target(),
            "options": self._filled_options(),
            "namespace": self.namespace.to_json(),
            "num": num,
            "seed": seed,
        }
        command = [sys.executable, "-m", "kvview.testing.tier.processes", program, json.dumps(job)]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        pipe, env = subprocess.PIPE, {**os.environ, "PYTHONPATH": path}
        with subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe) as ran:
            end = time.monotonic() + _KILL_SECONDS
            while True:
                try:
                    said, error = ran.communicate(timeout=1.0)
                    break
                except subprocess.TimeoutExpired:
                    watchdog.next_call()  # this one has a limit of its own
                    if time.monotonic() > end:
                        ran.kill()
                        raise
        if ran.returncode:
            raise RuntimeError(f"{program} ended with {error.decode()[-2000:]}")
        return json.loads(said)

    def _files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())

    def _target(self) -> str | None:
        module, name = getattr(self._make, "__module__", ""), self._make.__qualname__
        if target := target_of(self._make):
            return target
        return None if module == "__main__" or "<" in name else f"{module}:{name}"

    def _is_threaded(self) -> bool:
        return isinstance(self._make, type) and issubclass(self._make, Threaded)

    def _gated(self, make: Any) -> Any:
        """Of a class over ``Threaded``, one whose blocking calls wait at the gate."""
        if not self._is_threaded():
            return make
        gate, callers = self._gate, self.callers

        class Gated(make):  # type: ignore[misc]
            def has(self, key: bytes, /) -> bool:
                callers.add(threading.get_ident())
                gate.wait()
                return bool(super().has(key))

            def read_into(self, key: bytes, page: memoryview, /) -> bool:
                callers.add(threading.get_ident())
                gate.wait()
                return bool(super().read_into(key, page))

            def write(self, key: bytes, page: memoryview, /) -> bool:
                callers.add(threading.get_ident())
                gate.wait()
                return bool(super().write(key, page))

        Gated.__name__ = Gated.__qualname__ = make.__name__
        return Gated


class GuardedStoreHarness(StoreHarness):
    """The same, with a :class:`~kvview.tier.GuardedTier` in front, which is under test too."""

    guarded = True

    @property
    def capabilities(self) -> set[str]:
        """Those of the store, and the guard's."""
        # Entries that a killed process wrote without a guard have no seal.
        return {*super().capabilities, Capability.TIER_GUARD} - {Capability.KILL}

    def guard(self, store: TierStore, namespace: Namespace, **options: Any) -> TierStore:
        """The guard over any store."""
        return GuardedTier(store, namespace, **options)


def _spoil(how: str, number: int, content: bytes) -> bytes:
    at = len(content) * (number * 7 % 41 + 1) // 43
    if how == "flip":
        return content[:at] + bytes([content[at] ^ 1 << number % 8]) + content[at + 1 :]
    return content[:at] if how == "cut" else content + bytes(number + 1)


def _require_options(make: Any, options: Mapping[str, Any]) -> None:
    name = make.__qualname__
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # built in, without a signature
        return
    try:
        signature.bind(None, **options)
    except TypeError as error:
        hint = f"--option NAME=VALUE, {FOLDER} in a text is a fresh folder"
        raise ConfigError(
            f"{name}{signature} must take a namespace and the options {sorted(options)}: "
            f"{one_line(error)}; give options by {hint}"
        ) from None
