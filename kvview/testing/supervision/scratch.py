"""The folder of a check, which contains all its temporary files, and those of its processes."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "kvview-check-"
_YOUNG = 60.0  # seconds; the process of a younger folder may not have locked it yet


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make temporary files in a new folder, which is removed at the end of the block.

    A process holds a lock on its folder, so the folders of killed processes are known, and removed
    first.
    """
    before = tempfile.tempdir, os.environ.get("TMPDIR")
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            _remove_if_dead(folder)
    new = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = os.open(new, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        tempfile.tempdir = os.environ["TMPDIR"] = str(new)
        yield new
    finally:
        tempfile.tempdir = before[0]
        os.environ.pop("TMPDIR", None)
        if before[1] is not None:
            os.environ["TMPDIR"] = before[1]
        shutil.rmtree(new, ignore_errors=True)
        os.close(lock)


def _remove_if_dead(folder: Path) -> None:
    if time.time() - folder.stat().st_mtime < _YOUNG:
        return
    lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
