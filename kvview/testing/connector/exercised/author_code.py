"""The code that the author of a connector wrote, and its statements that no run reached.

The code of a connector is each class and each function of its author that ran in part, or that a
line that ran names. Other code in the same files (a second connector, a test, a command) does not
count as code of the connector.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from kvview.connector.hooks import TARGET_PREFIX
from kvview.testing.connector.exercised.lines import Lines, Region, regions_of
from kvview.testing.results.law_broken import Unrun

_LIBRARIES = {"site-packages", "dist-packages"}
_DEFINITION = re.compile(r"\s*(async|def|class|from|import|@)")
_FUNCTION = re.compile(r"\s*(async\s+)?def\b")


class AuthorCode:
    """The files and functions of a connector's author.

    Args:
        connector_class: The connector.
    """

    def __init__(self, connector_class: type[Any]) -> None:
        self._connector_class = connector_class
        modules = {sys.modules.get(base.__module__) for base in connector_class.__mro__}
        named = [one for module in modules if module for one in list(vars(module).values())]
        folders = {
            folder
            for kind in (connector_class, *named)
            if isinstance(kind, type) and any(_is_kvviews(base.__module__) for base in kind.__mro__)
            for base in kind.__mro__
            if (folder := _folder_of(base)) and (base is connector_class or not _is_library(folder))
        }
        self._modules = {
            str(path): (module, folder)
            for module in list(sys.modules.values())
            if (path := _path_of(module)) is not None and not _is_kvviews(module.__name__)
            for folder in folders
            if path.is_relative_to(folder) and not _is_library(path.relative_to(folder))
        }

    @property
    def paths(self) -> list[str]:
        """Return the author's files; empty if the code is kvview's own or has no file."""
        return sorted(self._modules)

    def num_statements(self, ran: Lines) -> int:
        """Return the number of statements in the functions of the code."""
        return sum(len(region.statements) for _, _, region, _ in self._functions(ran))

    def unrun(self, ran: Lines) -> list[Unrun]:
        """Return the statements that no run reached, in the order of the files.

        Args:
            ran: Lines that ran, by file.
        """
        return [
            one
            for path, name, region, is_called in self._functions(ran)
            for one in self._unrun_in(path, name, region, is_called)
        ]

    def _functions(self, ran: Lines) -> Iterator[tuple[str, str, Region, bool]]:
        """Yield file, name and statements of each function, and whether the code calls it."""
        ran = {path: lines for path, lines in ran.items() if path in self._modules}
        lines = {path: Path(path).read_text(encoding="utf-8").splitlines() for path in ran}
        used = {word for path in ran for word in _names_used(lines[path], ran[path])}
        kinds = [*self._kinds(ran)]
        called = used | self._hooks(kinds)
        replaced = self._replaced(kinds, used)
        for path, regions in regions_of(ran).items():
            module = self._modules[path][0].__name__
            running = {name for name, region in regions.items() if region.executed}
            owners = running | {name.rpartition(".")[0] for name in running} - {""}
            for name, region in regions.items():
                owner, _, function = name.rpartition(".")
                is_named = (owner.rpartition(".")[2] or function) in used
                if name in running or owner in owners or is_named:
                    is_called = function in called and (module, name) not in replaced
                    yield path, name, region, is_called or function.startswith("__")

    def _unrun_in(self, path: str, name: str, region: Region, is_called: bool) -> Iterator[Unrun]:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        for group in region.unrun():
            first = group[0]
            while group[0] == region.statements[0] and not _FUNCTION.match(lines[first - 1]):
                first -= 1  # none of the function ran
            is_an_error = lines[group[-1] - 1].lstrip().startswith("raise")
            yield Unrun(
                f"{Path(path).relative_to(self._modules[path][1])}:{first}",
                name,
                len(group),
                lines[first - 1].strip(),
                bool(region.missing.intersection(group)) and is_called and not is_an_error,
            )

    def _kinds(self, ran: Lines) -> Iterator[type[Any]]:
        """Yield the classes in the files of which lines ran."""
        for path in ran:
            module = self._modules[path][0]
            for found in list(vars(module).values()):
                if isinstance(found, type) and found.__module__ == module.__name__:
                    yield found

    def _hooks(self, kinds: Collection[type[Any]]) -> set[str]:
        """Return the names of methods that override a method of another author's base class."""
        own = {module.__name__ for module, _ in self._modules.values()}
        bases = {base for kind in kinds for base in kind.__mro__ if base is not object}
        return {name for base in bases if base.__module__ not in own for name in vars(base)}

    def _replaced(
        self, kinds: Collection[type[Any]], used: Collection[str]
    ) -> set[tuple[str, str]]:
        """Return the methods, by module and name, of a base class that only exists as a base.

        A method is included if a class of the author overrides it, and no line that ran uses the
        base class.
        """
        return {
            (base.__module__, f"{base.__qualname__}.{method}")
            for kind in kinds
            for base in kind.__mro__[1:]
            if base is not self._connector_class and base.__name__ not in used
            for method in vars(base).keys() & vars(kind).keys()
        }


def _is_library(path: Path) -> bool:
    return not _LIBRARIES.isdisjoint(path.parts)


def _folder_of(kind: type[Any]) -> Path | None:
    """Return the folder of an author's modules: the top package's folder, or else the file's.

    Returns:
        The folder; None for a class of kvview or of Python.
    """
    module = sys.modules.get(kind.__module__)
    path = _path_of(module)
    if module is None or path is None or _is_kvviews(module.__name__):
        return None
    package = module.__name__.partition(".")[0]
    if package in sys.stdlib_module_names:
        return None
    top = _path_of(sys.modules.get(package)) if "." in module.__name__ else None
    return (top or path).parent


def _is_kvviews(module_name: str) -> bool:
    """Whether a module is part of kvview; the names of modules of authors start with a prefix."""
    return module_name.startswith("kvview") and not module_name.startswith(TARGET_PREFIX)


def _path_of(module: object) -> Path | None:
    name = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
    path = Path(name) if isinstance(name, str) else None
    return path if path is not None and path.suffix == ".py" and path.exists() else None


def _names_used(lines: list[str], ran: Collection[int]) -> Iterator[str]:
    """Yield the names in lines that ran; definitions are excluded, because they call nothing."""
    for number in ran:
        if number <= len(lines) and not _DEFINITION.match(lines[number - 1]):
            yield from re.findall(r"\w+", lines[number - 1])
