"""Drifts: what a later vLLM could rename, reorder, add or take away (``drifts.py``).

Each says what vLLM did like it between 0.11 and 0.33. The texts to replace are those of the
newest release; where it no longer has them, the drift must be written anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Files = dict[str, str]
"""Texts of changed files, by path in the sources."""

_ROOTS = ("vllm/v1", "vllm/distributed", "vllm/config", "vllm/platforms")
OUTPUT = "vllm/v1/core/sched/output.py"
SCHEDULER = "vllm/v1/core/sched/scheduler.py"
UTILS = "vllm/v1/core/kv_cache_utils.py"
POOL = "vllm/v1/core/block_pool.py"
BLOCKS = "vllm/v1/core/kv_cache_manager.py"
BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
EVENTS = "vllm/distributed/kv_events.py"
OUTPUTS = "vllm/v1/outputs.py"
OFFLOAD = "vllm/v1/kv_offload/base.py"
CPU = "vllm/v1/kv_offload/cpu/manager.py"
OFFLOAD_SCHEDULER = "vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py"
OFFLOAD_WORKER = "vllm/distributed/kv_transfer/kv_connector/v1/offloading/worker.py"


class DriftError(Exception):
    """A drift does not fit the sources: it must be written anew for the newest release."""


@dataclass(frozen=True)
class Sources:
    """The files of the newest release."""

    folder: Path

    def read(self, path: str) -> str:
        """Text of one file."""
        return (self.folder / path).read_text()

    @cache  # noqa: B019 - one object, for the length of the script
    def all(self) -> dict[str, str]:
        """Texts of all files that a rename may touch."""
        return {
            str(path.relative_to(self.folder)): path.read_text()
            for root in _ROOTS
            for path in sorted((self.folder / root).rglob("*.py"))
        }


Edit = Callable[[Sources, Files], None]


def rename(word: str, new: str) -> Edit:
    """Another name, wherever vLLM uses the old one."""

    def edit(files: Sources, changed: Files) -> None:
        pattern = re.compile(rf"\b{word}\b")
        for path, text in files.all().items():
            if pattern.search(found := changed.get(path, text)):
                changed[path] = pattern.sub(new, found)
        if not changed:
            raise DriftError(f"nothing is named {word}")

    return edit


def swap(path: str, *texts: str) -> Edit:
    """Replace texts of one file: old, new, old, new, each found once."""

    def edit(files: Sources, changed: Files) -> None:
        text = changed.get(path) or files.read(path)
        for old, new in zip(texts[::2], texts[1::2], strict=True):
            if text.count(old) != 1:
                raise DriftError(f"{path}: {text.count(old)} times {old!r}")
            text = text.replace(old, new)
        changed[path] = text

    return edit


def field(path: str, kind: str, line: str) -> Edit:
    """A new first field of a class, which it requires."""

    def edit(files: Sources, changed: Files) -> None:
        text = changed.get(path) or files.read(path)
        pattern = re.compile(rf'^class {kind}\b[^:]*:\n(?:    """(?:.|\n)*?"""\n)?', re.M)
        if not (found := pattern.search(text)):
            raise DriftError(f"{path}: no class {kind}")
        changed[path] = f"{text[: found.end()]}    {line}\n{text[found.end() :]}"

    return edit


def method(path: str, kind: str, line: str) -> Edit:
    """A new abstract method of a class."""
    return field(path, kind, f"@abstractmethod\n    def {line}: ...\n")


@dataclass(frozen=True)
class Drift:
    """One change to vLLM.

    Args:
        name: What it is.
        like: What vLLM did like it.
        edits: What changes in the sources.
        harness: What changes with them in what stands for the model runner and the front end,
            none of which runs in a server: patterns, and what they become.
    """

    name: str
    like: str
    edits: tuple[Edit, ...]
    harness: tuple[tuple[str, str], ...] = ()

    def apply(self, files: Sources) -> Files:
        """Texts of the files that change."""
        changed: Files = {}
        for edit in self.edits:
            edit(files, changed)
        return changed


DRIFTS: dict[str, Drift] = {}


def drift(name: str, like: str, *edits: Edit, harness: Mapping[str, str] | None = None) -> None:
    assert name not in DRIFTS, name
    DRIFTS[name] = Drift(name, like, edits, tuple((harness or {}).items()))
