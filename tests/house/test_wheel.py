"""The wheel as a stranger installs it: its top-level names, and a bare import."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path


def test_top_level_names(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    packages = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert packages == {
        "kvview",
        *(f"kvview_{n}" for n in ("reference", "vllm", "lmcache", "sglang")),
    }
    assert {f"{package}/py.typed" for package in packages} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_bare_import_needs_nothing_installed(wheel: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(wheel)!r}); import kvview; print(kvview.__file__)"
    # -S: without site-packages, so without torch, pydantic, hypothesis, numpy.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    assert str(wheel) in done.stdout
