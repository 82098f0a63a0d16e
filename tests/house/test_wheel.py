"""The wheel as a stranger installs it: its top-level names, and a bare import."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from kvview.version import __version__
from tests.house.source_tree import ROOT


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


def test_the_sdist_makes_the_same_wheel_and_has_all_sources(wheel: Path, tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t"]
    subprocess.run([*build, "sdist", "-d", tmp_path], cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = (path for path in tmp_path.iterdir() if path.is_dir())
    for name in ("README.md", "SECURITY.md", "docs/laws.md", "examples/host_cache.py", "tests"):
        assert (tree / name).exists(), name
    subprocess.run([*build, "wheel", "-d", tmp_path], cwd=tree, check=True, capture_output=True)
    again = next(tmp_path.glob("*.whl"))
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        assert one.namelist() == other.namelist()
        assert all(one.read(name) == other.read(name) for name in one.namelist())


def test_links_on_the_package_index_lead_to_this_version(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(name).decode()
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 10
    assert not [link for link in links if not link.startswith(("https://", "#"))]
    assert f"https://github.com/kvview/kvview/blob/v{__version__}/docs/laws.md" in links
