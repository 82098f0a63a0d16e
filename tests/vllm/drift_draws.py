"""Drifts that a seed draws, beside those that somebody thought of (``drifts.py --draw N``).

What is drawn from: names that vLLM defines in the files that the adapter reads or overrides, and
that the adapter's code names. A name that kvview defines itself is left out, since the harness
would be renamed with it. Each draw is consistent in itself: vLLM's own uses follow.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path

from drift_edits import (  # type: ignore[import-not-found]
    BASE,
    BLOCKS,
    CPU,
    DRIFTS,
    EVENTS,
    OFFLOAD,
    OUTPUT,
    OUTPUTS,
    POOL,
    SCHEDULER,
    UTILS,
    Edit,
    Files,
    Sources,
    drift,
    field,
    rename,
)

SEAMS = (
    *(BASE, BLOCKS, CPU, EVENTS, OFFLOAD, OUTPUT, OUTPUTS, POOL, SCHEDULER, UTILS),
    "vllm/v1/request.py",
    "vllm/v1/kv_cache_interface.py",
    "vllm/config/cache.py",
)
_ROOT = Path(__file__).parents[2]
_NOT_THE_ADAPTER = ("simulation", "inference", "comparison", "doctor")
_HARNESS = ("tests/vllm/engine.py", "adapters/kvview_vllm/simulation/scheduler.py")
_OF_PYTHON = {name for kind in (dict, list, set, str, float) for name in dir(kind)}


def _called(tree: ast.AST) -> set[str]:
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {one.attr for one in calls if isinstance(one, ast.Attribute)}
    return names | {one.id for one in calls if isinstance(one, ast.Name)}


def _trees(folder: Path) -> Iterator[tuple[Path, ast.AST]]:
    for path in sorted(folder.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def _named(tree: ast.AST) -> set[str]:
    """Attributes, keywords and strings that are names."""
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg}
    return names | {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.isidentifier()
    }


def _defined(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Fields and methods of the classes of a file."""
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    fields = {
        node.target.id
        for body in bodies
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    methods = {
        node.name
        for body in bodies
        for node in body
        if isinstance(node, ast.FunctionDef) and not node.decorator_list and node.args.args
    }
    return fields, methods


def _argument(word: str) -> Edit:
    """A new first argument of a method, which vLLM's own callers give."""

    def edit(files: Sources, changed: Files) -> None:
        for path, text in files.all().items():
            found = re.sub(rf"(\bdef {word}\(\s*(?:self|cls)\b,?)", r"\1 drifted,", text)
            found = re.sub(rf"(?<=\.){word}\((?!\))", f"{word}(None, ", found)
            found = re.sub(rf"(?<=\.){word}\(\)", f"{word}(None)", found)
            if found != text:
                changed[path] = found

    return edit


def _required(kind: str, path: str) -> Edit:
    """A new field that a class requires, which vLLM itself gives."""
    add: Edit = field(path, kind, "drifted: int")

    def edit(files: Sources, changed: Files) -> None:
        for where, text in files.all().items():
            found = re.sub(rf"(?<!class )(?<!\w){kind}\((?=\s*\w+=)", f"{kind}(drifted=0, ", text)
            if found != text:
                changed[where] = found
        add(files, changed)

    return edit


def _dataclasses(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(
            "dataclass" in ast.unparse(one) for one in node.decorator_list
        ):
            yield node.name


def draw(files: Sources, seed: int, number: int) -> list[str]:
    """Add so many drifts, and return their names."""
    ours: set[str] = set()
    read: set[str] = set()
    for folder in ("kvview", "reference", "adapters"):
        for file, tree in _trees(_ROOT / folder):
            ours.update(*_defined(tree))
            if folder == "adapters" and not set(file.parts) & set(_NOT_THE_ADAPTER):
                read |= _named(tree)
                read.update(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    seams = {path: ast.parse(files.read(path)) for path in SEAMS}
    hooks = {name for tree in seams.values() for name in _defined(tree)[1]} & read
    fields = {name for tree in seams.values() for name in _defined(tree)[0]} & read
    kinds = {(k, path) for path, tree in seams.items() for k in _dataclasses(tree)}
    of_kinds = {(kind, path) for kind, path in kinds if kind in read}
    taken = " ".join(DRIFTS)
    of_harness: set[str] = set()  # what it calls or builds: it would have to be written anew
    for name in _HARNESS:
        of_harness |= _called(ast.parse((_ROOT / name).read_text()))
    choices: list[tuple[str, Edit, dict[str, str]]] = []
    for word in sorted((hooks | fields) - ours - _OF_PYTHON):
        if not word.startswith("__") and not re.search(rf"\b{word}\b", taken):
            new = f"{word}_drifted"
            choices.append((f"{word} renamed", rename(word, new), {rf"\b{word}\b": new}))
    for word in sorted(hooks - of_harness - _OF_PYTHON):
        if not word.startswith("__"):
            choices.append((f"{word} takes one more", _argument(word), {}))
    for kind, path in sorted(of_kinds):
        if kind not in of_harness:
            choices.append((f"{kind} needs one more", _required(kind, path), {}))
    names = []
    for name, edit, harness in random.Random(seed).sample(choices, number):
        drift(f"drawn: {name}", f"seed {seed}", edit, harness=harness)
        names.append(f"drawn: {name}")
    return names
