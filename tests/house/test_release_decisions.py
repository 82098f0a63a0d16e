"""Differences between vLLM's releases are decided in one place: ``adapters/kvview_vllm/releases``.

Anywhere else in the adapter, a test of an object's attributes (``hasattr``, ``getattr`` with a
default, ``except AttributeError``, a signature, a version) is a hidden
decision by release: a rename in a later release would silently be taken for an older release.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.house.source_tree import Module, modules

_MISSING = {"ImportError", "ModuleNotFoundError", "AttributeError"}


def decisions(module: Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of expressions that look like a decision by release."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            asks = name == "hasattr" or (name == "getattr" and len(node.args) == 3)
            if asks or name in ("inspect.signature", "signature", "find_spec", "version"):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ExceptHandler) and node.type is not None:
            caught = {ast.unparse(n) for n in ast.walk(node.type) if isinstance(n, ast.Name)}
            if caught & _MISSING:
                yield node.lineno, f"except {ast.unparse(node.type)}"
        elif isinstance(node, ast.Call | ast.Attribute) and ast.unparse(node).endswith(
            "vllm.__version__"
        ):
            yield node.lineno, ast.unparse(node)


def test_only_the_releases_decide_by_release() -> None:
    found: dict[str, list[str]] = {}
    for module in modules():
        if not module.name.startswith("kvview_vllm") or ".releases" in module.name:
            continue
        lines = [f"{line}: {text}" for line, text in decisions(module)]
        if lines:
            found[module.path] = lines
    listed = "\n".join(f"{path}:{line}" for path, lines in found.items() for line in lines)
    assert not found, listed
