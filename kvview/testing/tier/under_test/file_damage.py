"""Damage of files that a store may be removing at the same time."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


def damage_files(paths: Collection[Path], how: str, num_before: int, new: Path) -> int:
    """Damage files, and return their number; ``"swap"`` exchanges them in pairs.

    A damaged copy replaces each file, because a store may have mapped the file, and cutting a
    mapped file would end the process with SIGBUS.

    Args:
        paths: The files; a file that is removed meanwhile stays removed.
        how: ``"flip"``, ``"cut"``, ``"grow"`` or ``"swap"``.
        num_before: Number of files that were damaged before, which sets the place of the damage.
        new: Path for a new file in the same file system.
    """
    contents = {}
    for path in paths:
        with suppress(FileNotFoundError):  # a thread has just removed the file
            contents[path] = path.read_bytes()
    if how == "swap":
        alike = sorted(contents, key=lambda path: (len(contents[path]), path))
        pairs = [*zip(alike[::2], alike[1::2], strict=False)]
        damaged = {a: contents[b] for pair in pairs for a, b in (pair, pair[::-1])}
    else:
        damaged = {
            path: _damaged(how, num_before + at, contents[path])
            for at, path in enumerate(sorted(contents))
        }
    for path, content in damaged.items():
        new.write_bytes(content)
        _replace(path, new)
        new.unlink(missing_ok=True)  # it is the old file now, which a store may have mapped
    return len(damaged)


def _damaged(how: str, number: int, content: bytes) -> bytes:
    at = len(content) * (number * 7 % 41 + 1) // 43
    if how == "flip":
        return content[:at] + bytes([content[at] ^ 1 << number % 8]) + content[at + 1 :]
    return content[:at] if how == "cut" else content + bytes(number + 1)


def _replace(path: Path, new: Path) -> None:
    """Replace a file by a new file, unless the file is missing.

    The two files are exchanged, because a rename would bring back a file that a store removes at
    the same time, whose bytes the store no longer counts.
    """
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if exchange is not None:
        failed = exchange(_HERE, os.fsencode(new), _HERE, os.fsencode(path), _EXCHANGE)
        if not failed or ctypes.get_errno() == errno.ENOENT:
            return
    if path.exists():  # a system, or a file system, that cannot exchange files
        new.replace(path)
