"""Drifts that a seed draws, in addition to those of ``drifts.toml`` (``drifts.py --draw N``).

They are drawn from the names that vLLM defines in the files that the adapter reads or overrides,
and that the adapter's code names. A name that kvview defines itself is excluded, because the
harness would be renamed with it. vLLM's own uses of a name follow each draw.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from drift_edits import (  # type: ignore[import-not-found]
    Drift,
    Edit,
    Files,
    Sources,
    add_field,
    rename,
)

SEAMS = (
    *("vllm/v1/core/sched/output.py", "vllm/v1/core/sched/scheduler.py"),
    *("vllm/v1/core/kv_cache_utils.py", "vllm/v1/core/block_pool.py"),
    *("vllm/v1/core/kv_cache_manager.py", "vllm/v1/outputs.py", "vllm/v1/request.py"),
    *("vllm/v1/kv_cache_interface.py", "vllm/config/cache.py", "vllm/distributed/kv_events.py"),
    "vllm/distributed/kv_transfer/kv_connector/v1/base.py",
    *("vllm/v1/kv_offload/base.py", "vllm/v1/kv_offload/cpu/manager.py"),
)
_ROOT = Path(__file__).parents[2]
_NOT_THE_ADAPTER = {"simulation", "inference", "comparison", "doctor"}
_HARNESS = ("tests/vllm/engine.py", "adapters/kvview_vllm/simulation/scheduler.py")
_OF_PYTHON = {name for kind in (dict, list, set, str, float) for name in dir(kind)}


def _called(tree: ast.AST) -> set[str]:
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {one.attr for one in calls if isinstance(one, ast.Attribute)}
    return names | {one.id for one in calls if isinstance(one, ast.Name)}


def _named(tree: ast.AST) -> Iterator[str]:
    """Yield attributes, keywords, classes, and strings that are names."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) | ast.ClassDef(name=name):
                yield name
            case ast.keyword(arg=str(name)):
                yield name
            case ast.Constant(value=str(name)) if name.isidentifier():
                yield name


def _fields(tree: ast.AST) -> set[str]:
    return {
        node.target.id
        for kind in _classes(tree)
        for node in kind.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _methods(tree: ast.AST) -> set[str]:
    return {
        node.name
        for kind in _classes(tree)
        for node in kind.body
        if isinstance(node, ast.FunctionDef) and not node.decorator_list and node.args.args
    }


def _classes(tree: ast.AST) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def _is_dataclass(kind: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(one) for one in kind.decorator_list)


def _in_every_file(change: Callable[[str], str]) -> Edit:
    def edit(files: Sources, changed: Files) -> None:
        for path, text in files.all().items():
            if (found := change(text)) != text:
                changed[path] = found

    return edit


def _argument(word: str) -> Edit:
    """Add a first argument to a method, which vLLM's own callers pass."""

    def change(text: str) -> str:
        text = re.sub(rf"(\bdef {word}\(\s*(?:self|cls)\b,?)", r"\1 drifted,", text)
        text = re.sub(rf"(?<=\.){word}\((?!\))", f"{word}(None, ", text)
        return re.sub(rf"(?<=\.){word}\(\)", f"{word}(None)", text)

    return _in_every_file(change)


def _required(kind: str) -> Edit:
    """Pass a new field wherever vLLM makes a class."""
    pattern = rf"(?<!class )(?<!\w){kind}\((?=\s*\w+=)"
    return _in_every_file(lambda text: re.sub(pattern, f"{kind}(drifted=0, ", text))


def draw(files: Sources, seed: int, number: int, known: str) -> dict[str, Drift]:
    """Draw drifts.

    Args:
        files: Of the newest release.
        seed: Of the draw.
        number: Of drifts.
        known: Names of other drifts; a word in it is not renamed again.
    """
    ours: set[str] = set()
    read: set[str] = set()
    for folder in ("kvview", "reference", "adapters"):
        for file in sorted((_ROOT / folder).rglob("*.py")):
            tree = ast.parse(file.read_text())
            ours |= _fields(tree) | _methods(tree)
            if folder == "adapters" and not _NOT_THE_ADAPTER & set(file.parts):
                read.update(_named(tree))
    seams = {path: ast.parse(files.read(path)) for path in SEAMS}
    hooks = {name for tree in seams.values() for name in _methods(tree)} & read - _OF_PYTHON
    fields = {name for tree in seams.values() for name in _fields(tree)} & read - _OF_PYTHON
    kinds = {(k.name, path) for path, t in seams.items() for k in _classes(t) if _is_dataclass(k)}
    # A drift of a name that the harness calls or makes would need an edit of the harness.
    of_harness = set().union(*(_called(ast.parse((_ROOT / n).read_text())) for n in _HARNESS))
    choices: list[Drift] = []
    for word in sorted(hooks | fields):
        if word not in ours and not word.startswith("__") and not re.search(rf"\b{word}\b", known):
            new = f"{word}_drifted"
            harness = {rf"\b{word}\b": new}
            choices.append(Drift(f"drawn: {word} renamed", (rename(word, new),), harness))
    for word in sorted(hooks - of_harness):
        if not word.startswith("__"):
            choices.append(Drift(f"drawn: {word} takes another argument", (_argument(word),)))
    for kind, path in sorted(kinds):
        if kind in read - of_harness:
            edits = (_required(kind), add_field(path, kind, "drifted: int"))
            choices.append(Drift(f"drawn: {kind} requires another field", edits))
    return {drift.name: drift for drift in random.Random(seed).sample(choices, number)}
