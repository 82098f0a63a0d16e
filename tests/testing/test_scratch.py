"""The temporary files of a check, which are removed at its end."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from kvview.testing.supervision.scratch import scratch_folder


def test_a_check_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with scratch_folder() as own:
        assert Path(tempfile.gettempdir()) == own
        assert Path(os.environ["TMPDIR"]) == own
        tempfile.mkdtemp()
        assert [*tmp_path.iterdir()] == [own]
    assert not [*tmp_path.iterdir()]
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(tmp_path)
