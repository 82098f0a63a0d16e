"""The source of a connector: the names that it overrides, reads and imports.

1. It is read, never imported, because it may need a vLLM that is not installed.
2. Imported modules of the same folder are part of it, and so are their classes that it extends.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvview import ConfigError
from kvview_vllm.comparison.surfaces import BASE, WATCHED, parse

_GUARDS = {"ImportError", "ModuleNotFoundError", "Exception"}


@dataclass
class ConnectorSource:
    """The names in the source of a connector.

    Args:
        overrides: Methods that its class defines or inherits, with their place.
        reads: Attributes of any object but ``self`` that it reads, with the first place.
        reads_of_self: Attributes of ``self`` and ``super()`` that it reads.
        defines: Names of attributes, methods and fields of its own classes.
        guarded: Names that it reads with ``getattr`` or ``hasattr``.
        imports: Module and name of unguarded imports of vLLM, with the place.
    """

    overrides: dict[str, tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]] = field(
        default_factory=dict
    )
    reads: dict[str, str] = field(default_factory=dict)
    reads_of_self: dict[str, str] = field(default_factory=dict)
    defines: set[str] = field(default_factory=set)
    guarded: set[str] = field(default_factory=set)
    imports: dict[tuple[str, str | None], str] = field(default_factory=dict)


def read_connector(target: str, sources: Path) -> ConnectorSource:
    """Read the source of a target.

    Args:
        target: ``path/to/file.py:Class`` or ``package.module:Class``.
        sources: Sources of a release, for a connector of vLLM itself.

    Raises:
        ConfigError: There is no such file, or no such class in it.
    """
    location, _, name = target.rpartition(":")
    roots = [sources, *(Path(path or os.getcwd()) for path in sys.path)]
    file = None if location.endswith(".py") else _find(location, roots)
    file = file or Path(location)
    if not file.is_file():
        raise ConfigError(f"target {target!r}: its source was not found, so it cannot be compared")
    files = _files(file, location, roots)
    kinds = {
        node.name: (node, path)
        for path in reversed(files)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ClassDef)
    }
    if name.rpartition(".")[2] not in kinds:
        raise ConfigError(f"target {target!r}: {file} defines no class {name!r} to compare")
    found = ConnectorSource()
    for kind, path in _lineage(name.rpartition(".")[2], kinds):
        for node in kind.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.overrides.setdefault(node.name, (node, _place(path, node)))
    for path in files:
        _read(path, found)
    return found


def _files(file: Path, location: str, roots: Sequence[Path]) -> list[Path]:
    """The file, and the files that it imports from its folder, directly or indirectly."""
    home = file.resolve().parent
    package = "" if location.endswith(".py") else location
    if file.name != "__init__.py":
        package = package.rpartition(".")[0]
    queue, found = [(file, package)], [file]
    while queue:
        here, package = queue.pop(0)
        for module, name in _imported(parse(here), package):
            for each in (module, f"{module}.{name}"):
                path = _find(each, [home, *roots])
                if path is None or home not in path.resolve().parents or path in found:
                    continue
                if path == file.parent / "__init__.py":  # it imports the whole package
                    continue
                if any(path.as_posix().endswith(place) for place in WATCHED.values()):
                    continue
                found.append(path)
                is_package = path.name == "__init__.py"
                queue.append((path, each if is_package else each.rpartition(".")[0]))
    return found


def _imported(tree: ast.Module, package: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            module = ".".join([*filter(None, above), *([node.module] if node.module else [])])
            yield from ((module, each.name) for each in node.names)
        elif isinstance(node, ast.Import):
            yield from ((each.name, "") for each in node.names)


def _find(module: str, roots: Sequence[Path]) -> Path | None:
    for root in roots:
        path = root.joinpath(*filter(None, module.split(".")))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if module and file.is_file():
                return file
    return None


def _lineage(
    name: str, kinds: dict[str, tuple[ast.ClassDef, Path]]
) -> Iterator[tuple[ast.ClassDef, Path]]:
    seen, queue = {BASE}, [name]
    while queue:
        each = queue.pop(0)
        if each in seen or each not in kinds:
            continue
        seen.add(each)
        yield kinds[each]
        queue += [ast.unparse(base).rpartition(".")[2] for base in kinds[each][0].bases]


def _read(path: Path, found: ConnectorSource) -> None:
    tree = parse(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            is_own = ast.unparse(node.value) in ("self", "super()")
            reads = found.reads_of_self if is_own else found.reads
            reads.setdefault(node.attr, _place(path, node))
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            found.defines.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.defines.add(each.name)
                elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    found.defines.add(each.target.id)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            found.guarded |= {str(a.value) for a in node.args[1:2] if isinstance(a, ast.Constant)}
    for statement in _unguarded(tree.body):
        place = _place(path, statement)
        if isinstance(statement, ast.ImportFrom):
            if _is_vllm(statement.module) and not statement.level:
                for name in statement.names:
                    found.imports.setdefault((str(statement.module), name.name), place)
        elif isinstance(statement, ast.Import):
            for name in statement.names:
                if _is_vllm(name.name):
                    found.imports.setdefault((name.name, None), place)


def _unguarded(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, except those for the type checker and those under ``except ImportError``."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            if "TYPE_CHECKING" not in ast.unparse(node.test):
                yield from _unguarded(node.body)
            yield from _unguarded(node.orelse)
        elif isinstance(node, ast.Try):
            caught = {
                name.id
                for handler in node.handlers
                for name in ast.walk(handler.type or ast.Name("Exception"))
                if isinstance(name, ast.Name)
            }
            if not caught & _GUARDS:
                yield from _unguarded(node.body)
            yield from _unguarded(node.finalbody)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.With):
            yield from _unguarded(node.body)


def _is_vllm(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] == "vllm"


def _place(path: Path, node: ast.stmt | ast.expr) -> str:
    return f"{path.name}:{node.lineno}"
