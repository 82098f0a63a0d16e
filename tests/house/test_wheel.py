"""The wheel as a stranger installs it: its top-level names, and a bare import.

``.ci/wheel-lane`` compares it with the wheel that the sdist makes, and uses it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

from kvview.version import __version__
from tests.house.source_tree import FLOORS


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


def test_every_module_of_the_tree_is_in_it(wheel: Path) -> None:
    """A pattern of .gitignore such as ``build/`` also excludes a package of that name."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    modules = {
        path.relative_to(folder.parent).as_posix()
        for folder in FLOORS.values()
        for path in folder.rglob("*.py")
    }
    assert modules <= names, modules - names


def test_bare_import_needs_nothing_installed(wheel: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(wheel)!r}); import kvview; print(kvview.__file__)"
    # -S: without site-packages, so without torch, pydantic, hypothesis, numpy.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    assert str(wheel) in done.stdout


def test_links_on_the_package_index_lead_to_this_version(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(name).decode()
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 10
    assert not [link for link in links if not link.startswith(("https://", "#"))]
    assert f"https://github.com/kvview/kvview/blob/v{__version__}/docs/results.md" in links
