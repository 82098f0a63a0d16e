"""The Python sources of SGLang, without its dependencies, which need a GPU.

``python tests/clients/sglang_sources.py`` fetches them once, and prints their folder.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
import types
import zipfile
from pathlib import Path
from typing import Any

RELEASE = "0.5.23"
FOLDER = Path.home() / ".cache/kvview/sglang-sources" / RELEASE
_PAGE_METHODS = ("get_data_page", "get_dummy_flat_data_page", "set_from_flat_data_page",
                 "_storage_page_index")  # fmt: skip


def fetch() -> Path:
    """Download the wheel, and keep its Python files."""
    if (FOLDER / "sglang").is_dir():
        return FOLDER
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, f"sglang=={RELEASE}", "-d", folder], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as content:
            wanted = "sglang/srt/mem_cache/", "sglang/srt/environ.py"
            names = [n for n in content.namelist() if n.startswith(wanted) and n.endswith(".py")]
            content.extractall(FOLDER.with_suffix(".half"), names)
    FOLDER.with_suffix(".half").rename(FOLDER)
    return FOLDER


def make_importable() -> None:
    """Import ``sglang`` without its own ``__init__``, which patches transformers for serving."""
    if not (FOLDER / "sglang").is_dir():
        raise ImportError("needs SGLang's sources: python tests/clients/sglang_sources.py")
    if "sglang" not in sys.modules:
        package = types.ModuleType("sglang")
        package.__path__ = [str(FOLDER / "sglang")]
        sys.modules["sglang"] = package
        # The module imports triton; HiCacheFile uses only its parser of sizes.
        common = types.ModuleType("sglang.srt.utils.common")
        common.human_readable_int = int  # type: ignore[attr-defined]
        sys.modules["sglang.srt.utils"] = types.ModuleType("sglang.srt.utils")
        sys.modules["sglang.srt.utils.common"] = common


def page_methods(file: str, pool: str) -> dict[str, Any]:
    """Return SGLang's own methods for the pages of a host pool, whose module needs kernels."""
    import torch

    path = FOLDER / "sglang/srt/mem_cache/pool_host" / file
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (found,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == pool)
    found.body = [n for n in found.body if getattr(n, "name", "") in _PAGE_METHODS]
    names: dict[str, Any] = {"torch": torch}
    for method in found.body:
        assert isinstance(method, ast.FunctionDef)
        method.decorator_list.clear()
    exec(compile(ast.Module(found.body, []), str(path), "exec"), names)
    return {name: names[name] for name in _PAGE_METHODS if name in names}


if __name__ == "__main__":
    print(fetch())
