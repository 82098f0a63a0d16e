"""The members of vLLM's classes in the sources of a release, which are read, never imported.

1. A class that a release does not have has no members, which is not an error.
2. Members that a class inherits from another class of the same file are its own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvview_vllm.releases.shapes import plain_text

BASE = "KVConnectorBase_V1"

WATCHED = {
    BASE: "vllm/distributed/kv_transfer/kv_connector/v1/base.py",
    "SupportsHMA": "vllm/distributed/kv_transfer/kv_connector/v1/base.py",
    "KVConnectorMetadata": "vllm/distributed/kv_transfer/kv_connector/v1/base.py",
    "KVConnectorStats": "vllm/distributed/kv_transfer/kv_connector/v1/metrics.py",
    "SchedulerOutput": "vllm/v1/core/sched/output.py",
    "NewRequestData": "vllm/v1/core/sched/output.py",
    "CachedRequestData": "vllm/v1/core/sched/output.py",
    "Request": "vllm/v1/request.py",
    "KVConnectorOutput": "vllm/v1/outputs.py",
    "KVCacheBlocks": "vllm/v1/core/kv_cache_manager.py",
    "BlockPool": "vllm/v1/core/block_pool.py",
    "KVCacheBlock": "vllm/v1/core/kv_cache_utils.py",
    "FreeKVCacheBlockQueue": "vllm/v1/core/kv_cache_utils.py",
    "KVCacheConfig": "vllm/v1/kv_cache_interface.py",
    "KVCacheGroupSpec": "vllm/v1/kv_cache_interface.py",
    "KVCacheTensor": "vllm/v1/kv_cache_interface.py",
    "ForwardContext": "vllm/forward_context.py",
    "KVTransferConfig": "vllm/config/kv_transfer.py",
    "CacheConfig": "vllm/config/cache.py",
}
"""The classes that a connector uses, with their file in 0.11.0 to 0.33.0."""


@dataclass(frozen=True)
class Member:
    """A method or a field.

    Args:
        name: Its name.
        text: Parameters and return type, or the type of a field; "" without a type annotation.
        function: Definition of a method.
    """

    name: str
    text: str
    function: ast.FunctionDef | ast.AsyncFunctionDef | None = None

    @property
    def is_abstract(self) -> bool:
        """Whether a class without it cannot be built."""
        return self.function is not None and "abstractmethod" in _decorators(self.function)


def members(sources: Path, owner: str) -> dict[str, Member]:
    """The members of a watched class in a release; empty if the release has no such class."""
    return dict(_members(sources / WATCHED[owner], owner))


def has_name(sources: Path, module: str, name: str | None) -> bool:
    """Whether vLLM has a module with a name, or for None whether it has the module."""
    path = sources.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if name is None or not file.is_file():
        return file.is_file() or (name is None and path.is_dir())
    if path.is_dir() and ((path / name).is_dir() or (path / f"{name}.py").is_file()):
        return True
    names = _names(file)
    return name in names or "*" in names or "__getattr__" in names


@cache
def parse(file: Path) -> ast.Module:
    """The syntax tree of a file; an empty one if it does not exist, or is not Python."""
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return ast.Module([], [])


@cache
def _members(file: Path, owner: str) -> dict[str, Member]:
    kinds = {node.name: node for node in parse(file).body if isinstance(node, ast.ClassDef)}
    if owner not in kinds:
        return {}
    found: dict[str, Member] = {}
    for base in kinds[owner].bases:
        if isinstance(base, ast.Name) and base.id != owner and base.id in kinds:
            found |= _members(file, base.id)
    return found | {member.name: member for member in _own_members(kinds[owner])}


def _own_members(kind: ast.ClassDef) -> Iterator[Member]:
    for node in kind.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield Member(node.target.id, plain_text(ast.unparse(node.annotation)))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == "__init__":
                yield from _fields_set_in(node)
            returns = "" if node.returns is None else plain_text(ast.unparse(node.returns))
            if any("property" in name for name in _decorators(node)):
                yield Member(node.name, returns)
                continue
            arrow = f" -> {returns}" if returns else ""
            yield Member(node.name, f"({', '.join(parameters(node))}){arrow}", node)


def _fields_set_in(init: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Member]:
    types = {
        arg.arg: plain_text(ast.unparse(arg.annotation))
        for arg in init.args.args
        if arg.annotation is not None
    }
    for node in ast.walk(init):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            if not isinstance(target, ast.Attribute) or ast.unparse(target.value) != "self":
                continue
            text = ""
            if isinstance(node, ast.AnnAssign):
                text = plain_text(ast.unparse(node.annotation))
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
                text = types.get(node.value.id, "")
            yield Member(target.attr, text)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Names of parameters without self, ``=`` after those with a default."""
    args = function.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    first_default = len(names) - len(args.defaults)
    found = [name + "=" * (number >= first_default) for number, name in enumerate(names)]
    if "staticmethod" not in _decorators(function):
        found = found[1:]
    if args.vararg is not None:
        found.append(f"*{args.vararg.arg}")
    elif args.kwonlyargs:
        found.append("*")
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append(arg.arg + "=" * (default is not None))
    if args.kwarg is not None:
        found.append(f"**{args.kwarg.arg}")
    return found


def _decorators(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [ast.unparse(each).rpartition(".")[2] for each in function.decorator_list]


@cache
def _names(file: Path) -> frozenset[str]:
    found: set[str] = set()
    queue: list[ast.AST] = list(parse(file).body)
    while queue:
        node = queue.pop()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            queue += ast.iter_child_nodes(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(each.asname or each.name).partition(".")[0] for each in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return frozenset(found)
