"""The code that the author of a connector wrote, and its statements that no run reached.

The code of a connector is its class, and the functions and classes of its author that the class
uses by name, directly or through others. Other code in the same files (a second connector, a test,
a command) does not count as code of the connector.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from kvview.connector.hooks import TARGET_PREFIX
from kvview.testing.connector.exercised.lines import Lines, Region, regions_of

_LIBRARIES = {"site-packages", "dist-packages"}
_DEFINITION = re.compile(r"\s*(async|def|class|from|import|@)")
_FUNCTION = re.compile(r"\s*(async\s+)?def\b")


@dataclass(frozen=True)
class Unrun:
    """Consecutive statements that no run reached.

    Args:
        place: ``file:line`` of the first statement; the file is relative to the author's folder.
        function: Qualified name of the function that contains the statements.
        num_statements: Number of statements.
        source: Source of the first line.
        is_judged: Whether a check that does not reach these statements is incomplete. False for
            code that handles errors, a GPU or a log, for code without an effect or without a
            caller, and for a method that a class of the author overrides.
    """

    place: str
    function: str
    num_statements: int
    source: str
    is_judged: bool


@dataclass
class _File:
    """A file of the author."""

    path: Path
    folder: Path

    @cached_property
    def lines(self) -> list[str]:
        return self.path.read_text(encoding="utf-8").splitlines()


@dataclass(frozen=True)
class _Function:
    """A function of the code, with its statements."""

    module: str
    file: _File
    code: CodeType
    region: Region

    @property
    def name(self) -> str:
        return self.code.co_qualname


class AuthorCode:
    """The files, classes and functions of a connector's author.

    Args:
        connector_class: The connector.
    """

    def __init__(self, connector_class: type[Any]) -> None:
        self._connector_class = connector_class
        self._folders: set[Path] = set()
        self._files: dict[str, _File] = {}  # by module
        self._kinds: list[type[Any]] = []
        self._codes: dict[tuple[str, str], CodeType] = {}  # by module and qualified name
        self._seen: dict[int, object] = {}  # by id, which is unique while the object exists
        self._add(connector_class)

    @property
    def paths(self) -> list[str]:
        """Return the files with the code; empty if the code is kvview's own or has no file."""
        modules = {kind.__module__ for kind in self._kinds} | {module for module, _ in self._codes}
        return sorted({str(self._files[module].path) for module in modules})

    def num_statements(self, ran: Lines) -> int:
        """Return the number of statements in the functions of the code."""
        return sum(len(function.region.statements) for function in self._functions(ran))

    def unrun(self, ran: Lines) -> list[Unrun]:
        """Return the statements that no run reached, in the order of the files.

        Args:
            ran: Lines that ran, by file.
        """
        called = self._hooks.union(
            *(_names_used(file.lines, ran.get(str(file.path), ())) for file in self._files.values())
        )
        replaced = self._replaced(called)
        return [
            one
            for function in self._functions(ran)
            for one in _unrun_in(
                function,
                is_called=function.code.co_name in called
                and (function.module, function.name) not in replaced,
            )
        ]

    # --- the parts of the code ---

    def _add(self, found: object) -> None:
        """Add an object that the code names, and the objects of the author that it uses."""
        if id(found) in self._seen:
            return
        self._seen[id(found)] = found
        match found:
            case type():
                self._add_class(found)
            case FunctionType():
                self._add_function(found)
            case staticmethod() | classmethod() | MethodType():
                self._add(found.__func__)
            case property():
                self._add_all((found.fget, found.fset))
            case cached_property() | partial():
                self._add(found.func)
            case dict():
                self._add_all(found.values())
            case list() | tuple() | set() | frozenset():
                self._add_all(found)
            case _:
                self._add(type(found))
        self._add(getattr(found, "__wrapped__", None) if callable(found) else None)

    def _add_all(self, found: Collection[object]) -> None:
        for one in found:
            self._add(one)

    def _add_class(self, kind: type[Any]) -> None:
        if any(_is_kvviews(base.__module__) for base in kind.__mro__):
            self._add_folders(kind)
        if self._file(kind.__module__) is None:
            return
        self._kinds.append(kind)
        self._add_all(kind.__mro__)
        self._add_all(list(vars(kind).values()))

    def _add_folders(self, kind: type[Any]) -> None:
        """Add the folders of the bases of a connector, a half or a store."""
        for base in kind.__mro__:
            folder = _folder_of(base)
            is_library = folder is not None and not _LIBRARIES.isdisjoint(folder.parts)
            if folder is None or (is_library and base is not self._connector_class):
                continue
            if self._file(base.__module__) is None:
                self._folders.add(folder)
            self._add(base)

    def _add_function(self, function: FunctionType) -> None:
        if self._file(function.__module__) is None:
            return
        codes = list(_nested(function.__code__))
        self._codes.update({(function.__module__, code.co_qualname): code for code in codes})
        names = {name for code in codes for name in code.co_names}
        scopes = [function.__globals__]
        for name in names:
            module = function.__globals__.get(name, sys.modules.get(name))
            if isinstance(module, ModuleType) and self._file(module.__name__):
                scopes.append(vars(module))
        for scope in scopes:
            self._add_all([scope[name] for name in sorted(names & scope.keys())])

    def _file(self, module_name: object) -> _File | None:
        """Return the file of a module of the author; None for any other module."""
        if not isinstance(module_name, str):
            return None
        if module_name not in self._files:
            path = _path_of(sys.modules.get(module_name))
            if path is None or _is_kvviews(module_name):
                return None
            folder = next((one for one in self._folders if path.is_relative_to(one)), None)
            if folder is None or _LIBRARIES.intersection(path.relative_to(folder).parts):
                return None
            self._files[module_name] = _File(path, folder)
        return self._files[module_name]

    # --- the statements that did not run ---

    def _functions(self, ran: Lines) -> Iterator[_Function]:
        """Yield the functions of the code with their statements."""
        regions = regions_of(self.paths, ran)
        for (module, name), code in sorted(
            self._codes.items(), key=lambda item: (item[0][0], item[1].co_firstlineno)
        ):
            file = self._files[module]
            if region := regions[str(file.path)].get(name.replace(".<locals>", "")):
                yield _Function(module, file, code, region)

    @cached_property
    def _hooks(self) -> set[str]:
        """Return the names of methods that override a method of another author's base class."""
        return {
            attribute
            for kind in self._kinds
            for base in kind.__mro__
            if self._file(base.__module__) is None and base is not object
            for attribute in vars(base)
        }

    def _replaced(self, used: Collection[str]) -> set[tuple[str, str]]:
        """Return the methods, by module and name, of a base class that only exists as a base.

        A method is included if a class of the author overrides it, and no line that ran uses the
        base class.
        """
        return {
            (base.__module__, f"{base.__qualname__}.{method}")
            for kind in self._kinds
            for base in kind.__mro__[1:]
            if base is not self._connector_class and base.__name__ not in used
            for method in vars(base).keys() & vars(kind).keys()
        }


def _unrun_in(function: _Function, *, is_called: bool) -> Iterator[Unrun]:
    file, region = function.file, function.region
    is_listed_only = not (is_called or function.code.co_name.startswith("__"))
    for group in region.unrun():
        first = group[0]
        if first == region.statements[0]:  # none of the function ran
            first = function.code.co_firstlineno  # of a decorator, if there is one
            while not _FUNCTION.match(file.lines[first - 1]):
                first += 1
        is_an_error = file.lines[group[-1] - 1].lstrip().startswith("raise")
        yield Unrun(
            f"{file.path.relative_to(file.folder)}:{first}",
            function.name,
            len(group),
            file.lines[first - 1].strip(),
            bool(region.missing.intersection(group)) and not (is_listed_only or is_an_error),
        )


def _nested(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and of the functions and classes that are defined in it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _nested(one)


def _folder_of(kind: type[Any]) -> Path | None:
    """Return the folder of an author's modules: the top package's folder, or else the file's.

    Returns:
        The folder; None for a class of kvview or of Python.
    """
    module = sys.modules.get(kind.__module__)
    path = _path_of(module)
    if module is None or path is None or _is_kvviews(module.__name__):
        return None
    if kind.__module__.partition(".")[0] in sys.stdlib_module_names:
        return None
    package = module.__name__.partition(".")[0]
    top = _path_of(sys.modules.get(package)) if "." in module.__name__ else None
    return (top or path).parent


def _is_kvviews(module_name: str) -> bool:
    """Whether a module is part of kvview; the names of modules of authors start with a prefix."""
    return module_name.startswith("kvview") and not module_name.startswith(TARGET_PREFIX)


def _path_of(module: ModuleType | None) -> Path | None:
    name = getattr(module, "__file__", None)
    path = Path(name) if isinstance(name, str) else None
    return path if path is not None and path.suffix == ".py" and path.exists() else None


def _names_used(lines: Sequence[str], ran: Collection[int]) -> set[str]:
    """Return the names in lines that ran; definitions are excluded, because they call nothing."""
    used = (lines[number - 1] for number in ran if number <= len(lines))
    return {
        word for line in used if not _DEFINITION.match(line) for word in re.findall(r"\w+", line)
    }
