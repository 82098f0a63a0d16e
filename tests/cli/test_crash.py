"""A crash of the author's code is reported with the author's line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
STORE = """
import ctypes

from examples.folder_store import FolderStore


class Crashes(FolderStore):
    def write(self, key, page, /):
        return bool(ctypes.string_at(0))
"""


def test_a_crash_shows_the_line_of_the_author(tmp_path: Path) -> None:
    (tmp_path / "crashes.py").write_text(STORE)
    target = f"{tmp_path / 'crashes.py'}:Crashes"
    command = [sys.executable, "-m", "kvview", "check", target, "--option", "root={tmp}"]
    done = subprocess.run([*command, "--select", "TIER-7"], cwd=ROOT, capture_output=True)
    assert done.returncode < 0
    assert b'crashes.py", line 9 in write' in done.stderr


THREAD = """
import threading

from examples.folder_store import FolderStore

threading.Thread(target=threading.Event().wait, name="keeps the process").start()
"""


def test_a_thread_that_never_ends_is_named_and_ended(tmp_path: Path) -> None:
    (tmp_path / "keeps.py").write_text(THREAD)
    script = "from kvview.cli import ending, main; ending._SECONDS = 0.1; main()"
    target = f"{tmp_path / 'keeps.py'}:FolderStore"
    command = [sys.executable, "-c", script, "check", target, "--option", "root={tmp}"]
    done = subprocess.run(
        [*command, "--select", "TIER-7"], cwd=ROOT, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert b"'keeps the process' at " in done.stderr
