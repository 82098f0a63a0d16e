"""A harness of a class of stores, in a new folder."""

from __future__ import annotations

import inspect
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvview.errors import ConfigError, one_line
from kvview.targets import target_of
from kvview.testing.effort import current_effort
from kvview.testing.harness import Capability
from kvview.testing.placeholders import FOLDER, in_folder
from kvview.testing.tier.file_damage import damage_files
from kvview.testing.tier.io_watch import break_connections, open_sockets
from kvview.testing.tier.writer import Writer
from kvview.tier import Namespace, Threaded, TierStore, is_tier_store
from kvview.tier.store import missing_methods

SMALLEST_ENTRY = 290  # minimum of bytes of an entry; smaller files are the store's own notes

_SLOW_REMOVAL = 0.003  # seconds
_MOST_FILES = 5  # maximum of files that a message lists
_OF_METHODS = (Capability.DELETE, Capability.USAGE, Capability.TOUCH)
_NO_FOLDER = (
    f"no option of the store has {FOLDER}, a new folder name, such as root={FOLDER} or "
    f"url=http://127.0.0.1:8765{FOLDER}"
)
_IN_A_FOLDER = "the place of the store is not a folder of this machine"
_WITHOUT = {
    Capability.REOPEN: _NO_FOLDER,
    Capability.NAMESPACES: _NO_FOLDER,
    Capability.KILL: "another process cannot import the class of the store",
    Capability.DAMAGE: _IN_A_FOLDER,
    Capability.GONE: _IN_A_FOLDER,
    Capability.BUDGET: "the store takes no option max_bytes",
    Capability.VERIFIES: "the store does not set verifies = True, so the guard finds damaged pages",
    Capability.PAUSE: "the store is not derived from Threaded",
}
"""Reasons why a class of stores lacks a capability; by default, that a method is missing."""


def reason_without(missing: Sequence[Capability], declared: Collection[str]) -> str:
    """Return the reason why a check is skipped for a class of stores, as a hint to its author.

    Args:
        missing: Capabilities that the check requires and that the class lacks.
        declared: Capabilities of the class.
    """
    if missing and Capability.REOPEN not in declared and missing[0] not in _OF_METHODS:
        missing = [Capability.REOPEN]
    texts = [_WITHOUT.get(name, f"the store has no method {name.value}") for name in missing]
    return "; ".join(dict.fromkeys(texts))


@dataclass(frozen=True)
class StoreFactory:
    """Makes harnesses of a class of stores.

    Args:
        made_of: The class.
        options: Options of the class.
    """

    made_of: type[TierStore]
    options: Mapping[str, Any]

    @property
    def made_by(self) -> str:
        """Return lines of a script that make the factory from ``factory``, the class."""
        place = "from kvview.testing.tier.store_harness import tier_factory"
        return f"{place}\nfactory = tier_factory(factory, {self.options!r})"

    def __call__(self) -> StoreHarness:
        """Make a harness in a new folder."""
        return StoreHarness(self.made_of, self.options)


def tier_factory(target: Any, options: Mapping[str, Any] | None = None) -> Callable[[], Any]:
    """Return a factory of harnesses: the target itself, or one for a class of stores.

    Args:
        target: A factory, or a class of :class:`~kvview.tier.TierStore`.
        options: Options of the class; None takes the options of the run.

    Raises:
        ConfigError: The class lacks a method, or cannot be made with these options.
    """
    if not is_tier_store(target):
        return target  # type: ignore[no-any-return]
    name = target.__qualname__
    if lacking := ", ".join(missing_methods(target)):
        raise ConfigError(f"{name} is not a tier store, because it lacks {lacking}")
    if inspect.isabstract(target):
        lacking = ", ".join(sorted(vars(target)["__abstractmethods__"]))
        raise ConfigError(f"{name} is abstract, because it lacks {lacking}")
    given = dict(current_effort().options if options is None else options)
    _require_options(target, given)
    return StoreFactory(target, given)


class StoreHarness:
    """A harness of a store, which is made with a namespace and options in its own folder.

    Args:
        make: The class.
        options: Options of the class; ``{tmp}`` in a text is replaced by the folder.
        namespace: Namespace of the store; None for the default of the kit.
        folder: Folder of another harness; None for a new one.
    """

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
        """The threads that were inside a blocking call of the store, if they are known."""
        self._foreign_sockets = open_sockets()
        self.store: TierStore = self._gated(make)(self.namespace, **self._filled_options())

    @property
    def capabilities(self) -> set[str]:
        """The capabilities that follow from the class, its options and its methods."""
        found: set[str] = set()
        places = [str(value) for value in self._options.values() if FOLDER in str(value)]
        if places:  # the place may be on a server
            found |= {Capability.REOPEN, Capability.NAMESPACES}
            found |= {Capability.KILL} if self._target() else set()
        if any(place.partition("://")[0] in (place, "file") for place in places):
            found |= {Capability.DAMAGE, Capability.GONE}
            parameters = inspect.signature(self._make).parameters
            found |= {Capability.BUDGET} if "max_bytes" in parameters else set()
            found |= {Capability.VERIFIES} if getattr(self._make, "verifies", False) else set()
        if self._is_threaded():
            found.add(Capability.PAUSE)
        for name in _OF_METHODS:
            both = (self.store, self._make)  # a guard has methods that its store may lack
            has_it = all(callable(getattr(one, name.value, None)) for one in both)
            found |= {name} if has_it else set()
        return found

    def pause(self) -> None:
        """Make every blocking call of the store wait."""
        self._gate.clear()

    def resume(self) -> None:
        """Let blocking calls continue."""
        self._gate.set()

    def reopen(self) -> StoreHarness:
        """Make another store over the same folder."""
        self.resume()
        self.store.close()
        return type(self)(self._make, self._options, self.namespace, self.folder)

    def with_namespace(self, namespace: Namespace) -> StoreHarness:
        """Make a store for another namespace in the same folder."""
        return type(self)(self._make, self._options, namespace, self.folder)

    def with_budget(self, max_bytes: int) -> StoreHarness:
        """Make a store with a budget."""
        return type(self)(self._make, {**self._options, "max_bytes": max_bytes})

    def occupied_bytes(self) -> int:
        """Return the number of bytes of all files in the folder."""
        total = 0
        for path in self._files():
            with suppress(OSError):  # a file that was being written
                total += path.stat().st_size
        return total

    def files_in_words(self) -> str:
        """List the files in the folder with their sizes, the largest ones first."""
        sizes: dict[str, int] = {}
        for path in self._files():
            with suppress(OSError):  # a file that was being written
                sizes[str(path.relative_to(self.folder))] = path.stat().st_size
        largest = sorted(sizes, key=lambda name: (-sizes[name], name))
        texts = [f"{name} {sizes[name]:,}" for name in largest[:_MOST_FILES]]
        if more := len(sizes) - len(texts):
            rest = sum(sizes[name] for name in largest[_MOST_FILES:])
            texts.append(f"{more} more files {rest:,}")
        return ", ".join(texts)

    def damage(self, how: str) -> int:
        """Damage every large file in the folder; ``"swap"`` exchanges them in pairs."""
        new = self.folder / "damaged"
        number = damage_files(self.entries(), how, self._num_damaged, new)
        self._num_damaged += number
        return number

    def lose_medium(self) -> None:
        """Replace the folder by a file."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # in case a store creates the folder again at once
            self.folder.write_text("no folder", encoding="utf-8")

    def break_connections(self) -> int:
        """Break the connections that were opened after this harness; return their number."""
        return break_connections(self._foreign_sockets)

    def start_writer(self, keys: Mapping[bytes, int]) -> Writer:
        """Start a process that opens the same folder and puts keys."""
        target = self._target()
        assert target is not None, "without a target there is no capability KILL"
        return Writer(target, self._filled_options(), self.namespace, keys)

    def entries(self) -> set[Path]:
        """Return the files in the folder that are large enough for an entry."""
        found = set()
        for path in self._files():
            with suppress(OSError):  # a file that was being written
                found |= {path} if path.stat().st_size >= SMALLEST_ENTRY else set()
        return found

    def end(self) -> None:
        """Close the store and remove the folder."""
        self.resume()
        self.store.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # the folder is a file after lose_medium
            self.folder.unlink()

    def _filled_options(self) -> dict[str, Any]:
        return {key: in_folder(value, str(self.folder)) for key, value in self._options.items()}

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
        """Make a subclass whose blocking calls wait at the gate, if the class is ``Threaded``.

        A removal that waited takes longer than the other calls, which may overtake it.
        """
        if not self._is_threaded():
            return make

        def waiting(name: str) -> Callable[..., bool]:
            def call(store: Any, *args: Any) -> bool:
                self.callers.add(threading.get_ident())
                self._gate.wait()
                return bool(getattr(make, name)(store, *args))

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


def _require_options(make: Any, options: Mapping[str, Any]) -> None:
    name = make.__qualname__
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    try:
        signature.bind(None, **options)
    except TypeError as error:
        hint = f"--option NAME=VALUE, {FOLDER} in a text is a new folder"
        raise ConfigError(
            f"{name}{signature} must accept a namespace and the options {sorted(options)}: "
            f"{one_line(error)}; set options with {hint}"
        ) from None
