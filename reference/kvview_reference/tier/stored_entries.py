"""What lies in a store, looked at without it: what ``kvview tier fsck`` tells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvview.tier import Namespace
from kvview.tier.checksum import PageSeal
from kvview_reference.tier.entry import HEAD, MAGIC, NO_SEAL


@dataclass(frozen=True)
class StoredEntry:
    """What stands in one entry of a store.

    Args:
        key: Of the page.
        problem: Why it cannot be loaded, empty if it can.
    """

    key: bytes
    problem: str


def read_entry(namespace: Namespace, content: bytes) -> StoredEntry:
    """Look at one entry as a load would."""
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


def entries_of_folder(
    root: str,
) -> Iterator[tuple[str, str | OSError, Iterator[tuple[str, bytes | OSError]]]]:
    """Every namespace below a store's folder: its name, what it says, path and bytes of each entry.

    Instead of what cannot be read comes the reason.
    """
    for path in sorted(Path(root).glob("*/namespace.json")):
        said = _content(path)
        text = said if isinstance(said, OSError) else said.decode("utf-8", "replace")
        files = sorted(path.parent.glob("??/*"))
        yield path.parent.name, text, ((str(file), _content(file)) for file in files)


def _content(path: Path) -> bytes | OSError:
    try:
        return path.read_bytes()
    except OSError as error:
        return error
