"""The entries of a file store, read without the store, for ``kvview tier fsck``.

Only files that a store may have written are read: one folder per namespace, and entries that are
named after their keys. All other files, including links, are ignored.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from kvview import ConfigError
from kvview.tier import Namespace
from kvview.tier.guard.checksum import PageSeal
from kvview_reference.tier.entry import HEAD, MAGIC, MOST_BYTES, NO_SEAL
from kvview_reference.tier.folder.store_folder import NOTE, SHARDS, StoreFolder

Content: TypeAlias = bytes | OSError
"""Reads bytes, or returns the error."""

_NAMESPACE = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class StoredEntry:
    """The content of one entry of a store.

    Args:
        key: Key of the page.
        problem: Reason why the entry cannot be loaded; empty if it can.
    """

    key: bytes
    problem: str


@dataclass(frozen=True)
class StoredNamespace:
    """The entries of one namespace.

    Args:
        name: Name of the folder or prefix.
        note: Content of the ``namespace.json``.
        entries: Path and content of each entry.
    """

    name: str
    note: Content
    entries: Iterator[tuple[str, Content]]


def read_entry(namespace: Namespace, content: bytes) -> StoredEntry:
    """Verify one entry, as a load does."""
    view = memoryview(content)
    if len(view) < HEAD.size or view[:8] != MAGIC:
        return StoredEntry(b"", "it has no header")
    _, num_bytes, seal, key_bytes = HEAD.unpack(view[: HEAD.size])
    key, page = bytes(view[HEAD.size :][:key_bytes]), view[HEAD.size + key_bytes :]
    if len(page) != num_bytes:
        return StoredEntry(key, f"it has {len(page)} bytes of a page of {num_bytes}")
    if seal != NO_SEAL:
        checksum = PageSeal.name_of(seal)
        if not checksum or PageSeal(namespace, checksum).of(key, page) != seal:
            return StoredEntry(key, "its seal is not that of its bytes")
    return StoredEntry(key, "")


def entries_of_folder(root: str) -> Iterator[StoredNamespace]:
    """Yield every namespace below the folder of a file store.

    Raises:
        ConfigError: The folder cannot be listed.
    """
    try:
        names = sorted(filter(_is_namespace, os.listdir(root)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the folder {root!r} cannot be read: {error}") from None
    for name in names:
        path = Path(root, name)
        if path.is_symlink() or not path.is_dir():
            continue
        try:
            folder = StoreFolder(path)
        except OSError as error:
            yield StoredNamespace(name, error, iter(()))
            continue
        with closing(folder), suppress(FileNotFoundError):
            note = _outcome(folder.read_note, NOTE)
            yield StoredNamespace(name, note, _files(folder, path))


def _files(folder: StoreFolder, path: Path) -> Iterator[tuple[str, Content]]:
    for shard in SHARDS:
        try:
            files = sorted(folder.entries(shard))
        except OSError as error:
            yield str(path / shard), error
            continue
        for file, state in files:
            with suppress(FileNotFoundError):  # evicted just now
                yield str(path / file), _outcome(_content, folder, file, state.st_size)


def _content(folder: StoreFolder, path: str, size: int) -> bytes:
    if size > MOST_BYTES:
        raise OSError(
            errno.EFBIG, f"the file has {size} bytes, but an entry has at most {MOST_BYTES}"
        )
    file = folder.open(path)
    try:
        return os.read(file, size)
    finally:
        os.close(file)


def _is_namespace(name: str) -> bool:
    return bool(_NAMESPACE.fullmatch(name))


def _outcome(read: Callable[..., bytes], *args: Any) -> Content:
    """Return the bytes of a file, or the reason why they cannot be read.

    Raises:
        FileNotFoundError: The file does not exist.
    """
    try:
        return read(*args)
    except FileNotFoundError:
        raise
    except OSError as error:
        return error
