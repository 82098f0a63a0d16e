"""The temporary files of a check, which the next check removes if the check was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvview.testing.supervision.scratch import scratch_folder

_WAITS = """
import tempfile
from kvview.testing.supervision.scratch import scratch_folder
with scratch_folder() as folder:
    tempfile.mkdtemp()
    print(folder, flush=True)
    input()
"""


def test_a_killed_check_leaves_nothing_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    path = os.pathsep.join(sys.path)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _WAITS],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.stdout for process in processes]
    living, dead = (Path(output.readline().strip()) for output in outputs if output)
    processes[1].kill()
    processes[1].communicate()
    for folder in (living, dead):
        assert folder.parent == tmp_path
        os.utime(folder, (0, 0))
    with scratch_folder() as own:
        assert Path(tempfile.gettempdir()) == own
        assert {*tmp_path.iterdir()} == {living, own}
    processes[0].communicate("\n")
    assert not [*tmp_path.iterdir()]
    assert tempfile.gettempdir() == str(tmp_path)
