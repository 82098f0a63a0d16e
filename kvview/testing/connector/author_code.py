"""The author's code of a connector, and the statements of it that no run reached.

The code of a connector is its class, and the functions and classes of its author that the class
uses by name, directly or through others. Other code in the same files (a second connector, a
test, a command) belongs to other programs and is not part of it.
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

_FOR_PEOPLE = {"__repr__", "__str__"}
_LOGS = re.compile(
    r"(^|\.)_?(log|logger|logging|warnings)\.(debug|info|warn\w*|error|exception|critical|log)$|^print$",
    re.IGNORECASE,
)
_NEEDS_A_DEVICE = re.compile(r"cuda|\bhip\b|\bxpu\b|sys\.platform|version_info", re.IGNORECASE)
_NO_COVER = re.compile(r"#\s*pragma:\s*no\s*cover", re.IGNORECASE)
_IN_NORMAL_USE = {  # exceptions by which Python code asks a question
    *("KeyError", "IndexError", "LookupError", "AttributeError", "StopIteration"),
    *("FileNotFoundError", "FileExistsError", "BlockingIOError", "Empty", "Full"),
}

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = _Function | ast.ClassDef
_Ran = Mapping[str, Collection[int]]


@dataclass(frozen=True)
class Unrun:
    """Consecutive statements that no run reached.

    Args:
        place: ``file:line`` of the first of them; the file is relative to the author's folder.
        function: Qualified name of the function that they are part of.
        num_statements: Their number, those inside of them included.
        source: The first of those lines.
        condition: Source of the condition above them; empty for a whole function.
        is_judged: Whether a check without them is incomplete. Code for errors, for a GPU, for
            a log, without an effect, or without a caller is listed only.
    """

    place: str
    function: str
    num_statements: int
    source: str
    condition: str
    is_judged: bool


@dataclass
class _File:
    """A module of the author, parsed."""

    module: ModuleType
    path: Path

    @cached_property
    def lines(self) -> list[str]:
        return self.path.read_text(encoding="utf-8").splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse("\n".join(self.lines))

    @cached_property
    def definitions(self) -> Mapping[str, _Definition]:
        """Classes and functions by qualified name, as ``__qualname__`` has it."""
        return dict(_definitions(self.tree, ""))

    @cached_property
    def assigned(self) -> Mapping[str, ast.expr]:
        """Values of the module's global names."""
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
        self._folder = _folder_of(self.connector_class)
        if self._folder is not None:
            for kind in self.connector_class.__mro__:
                self._add(kind)

    @property
    def paths(self) -> list[str]:
        """The files that hold the code; empty when it is kvview's own or has no file."""
        return sorted({str(self._files[module].path) for module, _ in self._parts})

    @cached_property
    def num_statements(self) -> int:
        """Statements in the functions of the code."""
        return sum(len(list(_statements(node.body))) for _, _, node in self._functions())

    def unrun(self, ran: _Ran) -> list[Unrun]:
        """Statements that no run reached, in the order of the files.

        Args:
            ran: Lines that ran, by file.
        """
        called = self._hooks | self._used_names(ran)
        return [
            one
            for file, name, node in self._functions()
            for one in self._unrun_in(
                file, name, node, ran.get(str(file.path), ()), is_called=node.name in called
            )
        ]

    def options(self) -> dict[str, object]:
        """Options that the code reads, with their defaults: of pydantic models, or by ``get``."""
        found: dict[str, object] = {}
        for (module, name), node in sorted(self._parts.items(), key=lambda item: item[0]):
            fields = getattr(vars(self._files[module].module).get(name), "model_fields", {})
            found.update({key: field.default for key, field in fields.items()})
            found.update(_options_read(node))
        return found

    # --- the parts of the code ---

    def _add(self, found: object) -> None:
        """Add a class, a function or a module, and everything that it uses by name."""
        found = inspect.unwrap(found) if callable(found) else found
        name = getattr(found, "__qualname__", None)
        if not isinstance(name, str):
            found, name = type(found), type(found).__qualname__
        file = self._file(getattr(found, "__module__", None))
        node = file and file.definitions.get(name)
        if not file or not node or (file.module.__name__, name) in self._parts:
            return
        self._parts[file.module.__name__, name] = node
        self._add_used(file, node)

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
        """A module, if it is the author's."""
        if not isinstance(module_name, str) or self._folder is None:
            return None
        if module_name not in self._files:
            module = sys.modules.get(module_name)
            path = _path_of(module)
            if module is None or path is None or not path.is_relative_to(self._folder):
                return None
            below = path.relative_to(self._folder).parts
            is_library = bool({"site-packages", "dist-packages"}.intersection(below))
            if is_library or _is_kvviews(module_name):
                return None
            self._files[module_name] = _File(module, path)
        return self._files[module_name]

    def _functions(self) -> Iterator[tuple[_File, str, _Function]]:
        """The functions of the code, each once."""
        seen: set[tuple[str, int]] = set()
        for (module, name), node in sorted(self._parts.items(), key=lambda item: item[0]):
            file = self._files[module]
            inner = dict(_definitions(node, f"{name}."))
            for full_name, definition in ((name, node), *inner.items()):
                place = (module, definition.lineno)
                if isinstance(definition, _Function) and place not in seen:
                    seen.add(place)
                    yield file, full_name, definition

    # --- what did not run ---

    def _unrun_in(
        self, file: _File, name: str, node: _Function, ran: Collection[int], *, is_called: bool
    ) -> Iterator[Unrun]:
        body = [one for one in node.body if not _is_docstring(one)]
        is_listed_only = node.name in _FOR_PEOPLE or not (is_called or node.name.startswith("__"))
        for found in _unrun(body, ran, _Above("", is_listed_only)):
            first = found.statements[0]
            line = first.lineno
            is_whole = first is body[0]
            if is_whole:
                line = node.lineno
            source = file.lines[line - 1].strip()
            has_pragma = any(
                _NO_COVER.search(file.lines[number - 1])
                for number in (node.lineno, first.lineno, found.above.line or first.lineno)
            )
            is_judged = not (found.above.is_listed_only or has_pragma)
            yield Unrun(
                f"{file.path.relative_to(self._folder or '/')}:{line}",
                name,
                len(list(_statements(found.statements))),
                source,
                found.above.condition,
                is_judged and not _is_trivial(found.statements),
            )

    def _used_names(self, ran: _Ran) -> set[str]:
        """Names that code uses that ran: what only other code uses did not run because of that."""
        found: set[str] = set()
        for file, _, function in self._functions():
            found.update(_names_used(function.body, ran.get(str(file.path), ())))
        for node in self._parts.values():
            if isinstance(node, ast.ClassDef):
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                found.update(_names_used(node.body, lines))
        return found

    @cached_property
    def _hooks(self) -> set[str]:
        """Names of methods that override one of a base class that is not the author's."""
        found: set[str] = set()
        for module, name in self._parts:
            kind: Any = vars(self._files[module].module).get(name.partition(".")[0])
            for part in name.split(".")[1:]:
                kind = getattr(kind, part, None)
            if isinstance(kind, type):
                found.update(
                    attribute
                    for base in kind.__mro__
                    if self._file(base.__module__) is None and base is not object
                    for attribute in vars(base)
                )
        if not found:  # a class in a function cannot be found by name
            for base in self.connector_class.__mro__:
                found.update(vars(base))
        return found


def _options_read(node: ast.AST) -> Iterator[tuple[str, object]]:
    """Keys that code reads from a mapping named ``options``, with their defaults."""
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


def _folder_of(connector_class: type[Any]) -> Path | None:
    """The folder of an author's modules: of the top package, or else of the file."""
    module = sys.modules.get(connector_class.__module__)
    path = _path_of(module)
    if module is None or path is None:
        return None
    if _is_kvviews(module.__name__):
        return None
    package = module.__name__.partition(".")[0]
    top = _path_of(sys.modules.get(package)) if "." in module.__name__ else None
    return (top or path).parent


def _is_kvviews(module_name: str) -> bool:
    """Whether a module is part of kvview; files of authors have a prefix of their own."""
    return module_name.startswith("kvview") and not module_name.startswith(TARGET_PREFIX)


def _path_of(module: ModuleType | None) -> Path | None:
    name = getattr(module, "__file__", None)
    path = Path(name) if isinstance(name, str) else None
    return path if path is not None and path.suffix == ".py" and path.exists() else None


@dataclass(frozen=True)
class _Above:
    """The branch that statements are part of."""

    condition: str
    is_listed_only: bool
    line: int = 0


@dataclass(frozen=True)
class _Found:
    statements: Sequence[ast.stmt]
    above: _Above


def _unrun(statements: Sequence[ast.stmt], ran: Collection[int], above: _Above) -> Iterator[_Found]:
    """Maximal sequences of statements that did not run, branch by branch."""
    pending: list[ast.stmt] = []
    for statement in statements:
        if not _has_run(statement, ran):
            pending.append(statement)
            continue
        if pending:
            yield _Found(pending, above)
            pending = []
        for suite, inner in _branches(statement, above):
            yield from _unrun(suite, ran, inner)
    if pending:
        yield _Found(pending, above)


def _branches(statement: ast.stmt, above: _Above) -> Iterator[tuple[Sequence[ast.stmt], _Above]]:
    """The suites of a compound statement; those of nested functions are functions of their own."""
    line, listed = statement.lineno, above.is_listed_only
    match statement:
        case ast.If(test=test) | ast.While(test=test):
            condition = ast.unparse(test)
            is_device = listed or bool(_NEEDS_A_DEVICE.search(condition))
            is_static = "TYPE_CHECKING" in condition
            yield statement.body, _Above(condition, is_device or is_static, line)
            yield statement.orelse, _Above(condition, listed, line)
        case ast.For() | ast.AsyncFor():
            yield statement.body, _Above(ast.unparse(statement.iter), listed, line)
            yield statement.orelse, above
        case ast.With() | ast.AsyncWith():
            yield statement.body, above
        case ast.Try() | ast.TryStar():
            yield statement.body, above
            for handler in statement.handlers:
                caught = ast.unparse(handler.type) if handler.type else "BaseException"
                is_an_error = listed or not _IN_NORMAL_USE.intersection(re.findall(r"\w+", caught))
                yield handler.body, _Above(f"except {caught}", is_an_error, handler.lineno)
            yield statement.orelse, above
            yield statement.finalbody, above
        case ast.Match():
            for case in statement.cases:
                subject = ast.unparse(statement.subject)
                yield case.body, _Above(subject, listed, case.pattern.lineno)


def _has_run(statement: ast.stmt, ran: Collection[int]) -> bool:
    if isinstance(statement, _Definition):
        first = min([statement.lineno, *(one.lineno for one in statement.decorator_list)])
        return any(line in ran for line in range(first, statement.body[0].lineno))
    if _leaves_no_trace(statement):
        return True
    last = statement.end_lineno or statement.lineno
    return any(line in ran for line in range(statement.lineno, last + 1))


def _leaves_no_trace(statement: ast.stmt) -> bool:
    """Whether the compiler makes nothing of a statement."""
    is_declared = isinstance(statement, ast.AnnAssign) and statement.value is None
    return (
        is_declared or _is_docstring(statement) or isinstance(statement, ast.Global | ast.Nonlocal)
    )


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a function, those of nested functions excluded."""
    for statement in body:
        if not _leaves_no_trace(statement):
            yield statement
        for suite, _ in _branches(statement, _Above("", False)):
            yield from _statements(suite)


def _is_trivial(statements: Sequence[ast.stmt]) -> bool:
    """Whether statements raise, log, or have no effect, so that their absence hides nothing."""
    if isinstance(statements[-1], ast.Raise):
        return True
    return all(map(_has_no_effect, statements))


def _has_no_effect(statement: ast.stmt) -> bool:
    match statement:
        case ast.Pass() | ast.Break() | ast.Continue() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Return(value=value):
            return value is None or _is_constant(value)
        case ast.Expr(value=ast.Call(func=function)):
            return bool(_LOGS.search(ast.unparse(function)))
    return _leaves_no_trace(statement)


def _is_constant(value: ast.expr) -> bool:
    """Whether a value is written out: ``0``, ``None``, ``[]``."""
    return not any(isinstance(one, ast.Name | ast.Call | ast.Attribute) for one in ast.walk(value))


def _names_used(statements: Sequence[ast.stmt], ran: Collection[int]) -> Iterator[str]:
    """Names and attributes in statements that ran, nested functions excluded."""
    for statement in statements:
        if isinstance(statement, _Definition) or not _has_run(statement, ran):
            continue
        suites = [suite for suite, _ in _branches(statement, _Above("", False))]
        inner = {id(one) for suite in suites for one in suite}
        todo: list[ast.AST] = [statement]
        while todo:
            node = todo.pop()
            if isinstance(node, ast.Name):
                yield node.id
            elif isinstance(node, ast.Attribute):
                yield node.attr
            todo += [one for one in ast.iter_child_nodes(node) if id(one) not in inner]
        for suite in suites:
            yield from _names_used(suite, ran)
