"""The folder of a check, which contains all its temporary files, and those of its processes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make temporary files in a new folder, which is removed at the end of the block."""
    before = tempfile.tempdir, os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="kvview-check-", ignore_cleanup_errors=True) as new:
        tempfile.tempdir = os.environ["TMPDIR"] = new
        try:
            yield Path(new)
        finally:
            tempfile.tempdir = before[0]
            os.environ.pop("TMPDIR", None)
            if before[1] is not None:
                os.environ["TMPDIR"] = before[1]
