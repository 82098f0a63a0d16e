"""The code that the author of a connector wrote, and its statements that no run reached.

The code of a connector is its class, and the functions and classes of its author that the class
uses by name, directly or through others. Other code in the same files (a second connector, a test,
a command) does not count as code of the connector.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from kvview.connector.hooks import TARGET_PREFIX
from kvview.testing.connector.exercised.branches import Branches, Region, lines_of, regions_of

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = _Function | ast.ClassDef
_LIBRARIES = {"site-packages", "dist-packages"}
_DEFINITION = re.compile(r"\s*(async|def|class|from|import|@)")


@dataclass(frozen=True)
class Unrun:
    """Consecutive statements that no run reached.

    Args:
        place: ``file:line`` of the first statement; the file is relative to the author's folder.
        function: Qualified name of the function that contains the statements.
        num_statements: Number of statements; 0 for a statement that ran, but with a branch that was
            never taken.
        source: Source of the first line.
        condition: Source of the condition that never led to these statements; empty for a whole
            function.
        is_judged: Whether a check that does not reach these statements is incomplete. False for a
            branch, for code that handles errors, a GPU or a log, for code without an effect or
            without a caller, and for a method that a class of the author overrides.
    """

    place: str
    function: str
    num_statements: int
    source: str
    condition: str
    is_judged: bool


@dataclass
class _File:
    """A parsed module of the author."""

    module: ModuleType
    path: Path
    folder: Path

    @cached_property
    def lines(self) -> list[str]:
        return self.path.read_text(encoding="utf-8").splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse("\n".join(self.lines))

    @cached_property
    def definitions(self) -> Mapping[str, _Definition]:
        """Classes and functions by qualified name (``__qualname__``)."""
        return dict(_definitions(self.tree, ""))

    @cached_property
    def assigned(self) -> Mapping[str, ast.expr]:
        """Values that the module assigns to global names."""
        found: dict[str, ast.expr] = {}
        for node in self.tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    found[name] = value
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    found[name] = value
        return found


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, _Definition]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            name = f"{prefix}{child.name}"
            yield name, child
            inner = f"{name}." if isinstance(child, ast.ClassDef) else f"{name}.<locals>."
            yield from _definitions(child, inner)
        else:
            yield from _definitions(child, prefix)


@dataclass
class AuthorCode:
    """The files and definitions of a connector's author.

    Args:
        connector_class: The connector.
    """

    connector_class: type[Any]
    _files: dict[str, _File] = field(default_factory=dict)  # by module
    _parts: dict[tuple[str, str], _Definition] = field(default_factory=dict)  # module, qualname

    def __post_init__(self) -> None:
        self._folders: set[Path] = set()
        self._add(self.connector_class)

    @property
    def paths(self) -> list[str]:
        """Return the files with the code; empty if the code is kvview's own or has no file."""
        return sorted({str(self._files[module].path) for module, _ in self._parts})

    def num_statements(self, ran: Branches) -> int:
        """Return the number of statements in the functions of the code."""
        return sum(len(region.statements) for _, _, _, region in self._regions(ran))

    def unrun(self, ran: Branches) -> list[Unrun]:
        """Return the statements that no run reached, in the order of the files.

        Args:
            ran: Branches that ran, by file.
        """
        regions = list(self._regions(ran))
        called = self._hooks.union(
            *(_names_used(file.lines, lines_of(ran.get(str(file.path), ()))) for file in self._own)
        )
        replaced = self._replaced(called)
        return [
            one
            for file, name, node, region in regions
            for one in self._unrun_in(
                file,
                name,
                node,
                region,
                is_called=node.name in called and (file.module.__name__, name) not in replaced,
            )
        ]

    def options(self) -> dict[str, object]:
        """Options, with defaults, that the code reads from pydantic models or with ``get``."""
        found: dict[str, object] = {}
        for (module, name), node in sorted(self._parts.items(), key=lambda item: item[0]):
            fields = getattr(vars(self._files[module].module).get(name), "model_fields", {})
            found.update({key: field.default for key, field in fields.items()})
            found.update(_options_read(node))
        return found

    # --- the parts of the code ---

    def _add(self, found: object) -> None:
        """Add a class with its bases, a function or a module, and the definitions that it uses."""
        found = inspect.unwrap(found) if callable(found) else found
        if isinstance(found, type):
            self._add_bases(found)
        name = getattr(found, "__qualname__", None)
        if not isinstance(name, str):
            found, name = type(found), type(found).__qualname__
        file = self._file(getattr(found, "__module__", None))
        node = file and file.definitions.get(name)
        if not file or not node or (file.module.__name__, name) in self._parts:
            return
        self._parts[file.module.__name__, name] = node
        self._add_used(file, node)

    def _add_bases(self, kind: type) -> None:
        """Add the base classes of a connector, a half or a store, even from other folders."""
        if not any(_is_kvviews(base.__module__) for base in kind.__mro__):
            return
        for base in kind.__mro__:
            folder = _folder_of(base)
            is_library = folder is not None and not _LIBRARIES.isdisjoint(folder.parts)
            if folder is None or (is_library and base is not self.connector_class):
                continue
            if self._file(base.__module__) is None:
                self._folders.add(folder)
            if base is not kind:
                self._add(base)

    def _add_used(self, file: _File, node: ast.AST) -> None:
        names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        attributes = {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
        for one in ast.walk(node):
            if isinstance(one, ast.ImportFrom):
                imported = self._file(one.module) if one.module else None
                for alias in one.names if imported else ():
                    self._add_named(imported, alias.name)  # type: ignore[arg-type]
        for name in sorted(names):
            value = vars(file.module).get(name)
            if isinstance(value, ModuleType):
                module = self._file(value.__name__)
                for attribute in sorted(attributes) if module else ():
                    self._add_named(module, attribute)  # type: ignore[arg-type]
            else:
                self._add_named(file, name)

    def _add_named(self, file: _File, name: str) -> None:
        if name not in vars(file.module):
            return
        self._add(vars(file.module)[name])
        if (value := file.assigned.get(name)) is not None and name not in self._followed(file):
            self._followed(file).add(name)
            self._add_used(file, value)

    def _followed(self, file: _File) -> set[str]:
        return vars(file).setdefault("followed", set())  # type: ignore[no-any-return]

    def _file(self, module_name: object) -> _File | None:
        """Parse a module of the author; returns None for any other module."""
        if not isinstance(module_name, str):
            return None
        if module_name not in self._files:
            module = sys.modules.get(module_name)
            path = _path_of(module)
            if module is None or path is None or _is_kvviews(module_name):
                return None
            folder = next((one for one in self._folders if path.is_relative_to(one)), None)
            if folder is None or _LIBRARIES.intersection(path.relative_to(folder).parts):
                return None
            self._files[module_name] = _File(module, path, folder)
        return self._files[module_name]

    def _functions(self) -> Iterator[tuple[_File, str, _Function]]:
        """Yield the functions of the code, each once."""
        seen: set[tuple[str, int]] = set()
        for (module, name), node in sorted(self._parts.items(), key=lambda item: item[0]):
            file = self._files[module]
            inner = dict(_definitions(node, f"{name}."))
            for full_name, definition in ((name, node), *inner.items()):
                place = (module, definition.lineno)
                if isinstance(definition, _Function) and place not in seen:
                    seen.add(place)
                    yield file, full_name, definition

    # --- the statements that did not run ---

    @property
    def _own(self) -> list[_File]:
        return [self._files[module] for module in sorted({module for module, _ in self._parts})]

    def _regions(self, ran: Branches) -> Iterator[tuple[_File, str, _Function, Region]]:
        """Yield the functions of the code with their statements."""
        found = regions_of(self.paths, ran)
        for file, name, node in self._functions():
            if region := found[str(file.path)].get(name.replace(".<locals>", "")):
                yield file, name, node, region

    def _unrun_in(
        self, file: _File, name: str, node: _Function, region: Region, *, is_called: bool
    ) -> Iterator[Unrun]:
        path = file.path.relative_to(file.folder)
        is_listed_only = not (is_called or node.name.startswith("__"))
        for group in region.unrun():
            line, lines = group[0], file.lines
            is_whole = line == region.statements[0]
            origin = region.origins.get(line)
            is_an_error = lines[group[-1] - 1].lstrip().startswith("raise")
            first = node.lineno if is_whole else line
            yield Unrun(
                f"{path}:{first}",
                name,
                len(group),
                lines[first - 1].strip(),
                lines[origin - 1].strip() if origin and not is_whole else "",
                bool(region.missing.intersection(group)) and not (is_listed_only or is_an_error),
            )
        for line in region.partial:
            yield Unrun(f"{path}:{line}", name, 0, file.lines[line - 1].strip(), "", False)

    @cached_property
    def _hooks(self) -> set[str]:
        """Return the names of methods that override a method of another author's base class."""
        found: set[str] = set()
        for kind in self._classes():
            found.update(
                attribute
                for base in kind.__mro__
                if self._file(base.__module__) is None and base is not object
                for attribute in vars(base)
            )
        if not found:  # a class that is defined in a function cannot be found by name
            for base in self.connector_class.__mro__:
                found.update(vars(base))
        return found

    def _replaced(self, used: Collection[str]) -> set[tuple[str, str]]:
        """Return the methods, by module and name, of a base class that only exists as a base.

        A method is included if a class of the author overrides it, and no line that ran uses the
        base class.
        """
        return {
            (base.__module__, f"{base.__qualname__}.{method}")
            for kind in self._classes()
            for base in kind.__mro__[1:]
            if base is not self.connector_class and base.__name__ not in used
            for method in vars(base).keys() & vars(kind).keys()
        }

    def _classes(self) -> Iterator[type[Any]]:
        """Yield the classes of the code that can be found by name."""
        for module, name in self._parts:
            kind: Any = vars(self._files[module].module).get(name.partition(".")[0])
            for part in name.split(".")[1:]:
                kind = getattr(kind, part, None)
            if isinstance(kind, type):
                yield kind


def _options_read(node: ast.AST) -> Iterator[tuple[str, object]]:
    """Yield the keys that code reads from a mapping named ``options``, with their defaults."""
    for one in ast.walk(node):
        match one:
            case ast.Call(
                func=ast.Attribute(value=owner, attr="get"),
                args=[ast.Constant(value=str(key)), *rest],
            ) if ast.unparse(owner).endswith("options"):
                default = rest[0] if rest else None
                yield key, default.value if isinstance(default, ast.Constant) else None
            case ast.Subscript(value=owner, slice=ast.Constant(value=str(key))) if ast.unparse(
                owner
            ).endswith("options"):
                yield key, None


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
