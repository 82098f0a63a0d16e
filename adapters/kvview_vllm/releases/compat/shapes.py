"""The table of shapes: every member of vLLM that the adapter reads, builds or overrides.

1. A release **must** have every member that ``shapes.txt`` lists for it, in the listed shape:
   names, order and defaults of parameters and the return type, or the type of a field.
2. In a version that names no release, each listed member that exists **must** have one of the
   listed shapes.
3. Members that are not listed are ignored, unless a subclass must define them
   (:func:`require_concrete`).

Source: the modules named in the table, every tested release.
"""

from __future__ import annotations

import ast
import dis
import enum
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from traceback import walk_tb
from typing import Any

from kvview import KVViewError
from kvview_vllm.releases.compat.versions import (
    OLDEST_TESTED,
    importing,
    is_between,
    number,
    refusal,
    refuse_shape,
    require_usable,
)

_MEMBER = "a member"
_PROPERTY = "a property"
_ANY = ""  # of any type
_MADE = "()"  # the arguments that the adapter passes to a constructor


@dataclass(frozen=True)
class Shape:
    """One row of the table.

    Args:
        owner: Class of the member, or module of a function.
        name: Name of the member.
        shape: Shape of the member, as ``shapes.txt`` describes it.
        since: First release with this shape.
        until: Last release with this shape; None if the newest tested release has it.
    """

    owner: str
    name: str
    shape: str
    since: str = OLDEST_TESTED
    until: str | None = None

    def is_in(self, version: str) -> bool:
        """Whether a release has this shape; False for a version that names no release."""
        return is_between(version, self.since, self.until)


def _read_table() -> dict[str, tuple[Shape, ...]]:
    table: dict[str, list[Shape]] = {}
    rows: list[Shape] = []
    owner = ""
    for line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("  "):
            releases, name, *shapes = line.split(None, 2)
            since, _, until = releases.partition("..")
            shape = shapes[0] if shapes else _ANY
            rows.append(Shape(owner, name, shape, since or OLDEST_TESTED, until or None))
        elif line and not line.startswith("#"):
            seam, _, owner = line.partition(": ")
            rows = table.setdefault(seam, [])
    return {seam: tuple(rows) for seam, rows in table.items()}


SHAPES: Mapping[str, tuple[Shape, ...]] = _read_table()
"""The rows of ``shapes.txt``, by seam."""


def known_signatures(owner: str) -> dict[str, set[str]]:
    """Return the signatures in all tested releases, for each method of the newest release."""
    rows = [row for rows in SHAPES.values() for row in rows if row.owner == owner]
    current = {row.name for row in rows if row.until is None and row.shape.startswith("(")}
    return {
        name: {row.shape.partition(" -> ")[0] for row in rows if row.name == name}
        for name in current
    }


def is_in_every_release(owner: str, name: str) -> bool:
    """Whether each tested release has a member."""
    return any(
        (row.owner, row.name, row.since) == (owner, name, OLDEST_TESTED)
        for rows in SHAPES.values()
        for row in rows
    )


@cache
def check_shapes(seam: str) -> None:
    """Compare the installed vLLM with the table, once per process.

    Raises:
        UnsupportedEngineError: A member is missing, or has a shape that no tested release has, and
            the user has not allowed untested releases.
        VLLMNotInstalledError: No vLLM can be imported.
    """
    version = require_usable(seam)
    known: dict[tuple[str, str], list[Shape]] = {}
    for row in SHAPES[seam]:
        known.setdefault((row.owner, row.name), []).append(row)
    for (owner, name), rows in known.items():
        if name == _MADE:
            _check_arguments(seam, owner_of(owner), rows[0].shape)
            continue
        here = [row for row in rows if row.is_in(version)]
        if number(version) is not None and not here:
            continue  # the release is older or newer than the member
        found = shape_of(owner_of(owner), name)
        wanted = [row.shape for row in here or rows]
        if found is None and not here:
            continue  # because a version that names no release may be of any age
        if found is None or (_ANY not in wanted and found not in wanted):
            member = f"{owner.rpartition(':')[2].rpartition('.')[2]}.{name}"
            shape = "missing" if found is None else found
            expected = " or ".join(f"{member} {each}" for each in wanted)
            refuse_shape(seam, f"{member} {shape}", expected)


def _check_arguments(seam: str, kind: Any, passed: str) -> None:
    """Refuse a class that requires an argument that the adapter does not pass."""
    passes = set(passed.split())
    if isinstance(kind, type) and (new := sorted(required_arguments(kind) - passes)):
        raise refusal(
            seam,
            f"{kind.__name__} that requires {', '.join(new)}",
            f"no required argument except {passed}",
        )


def find_class(name: str) -> Any:
    """Find a class of vLLM's offloading interface in its modules; None if no module has it."""
    package = "vllm.v1.kv_offload"
    for module in ("base", "abstract", "spec", "mediums", "worker.worker"):
        try:
            with importing():
                found = getattr(import_module(f"{package}.{module}"), name, None)
        except ModuleNotFoundError as error:
            if not str(error.name).startswith(package):
                raise
            continue  # merged into base, or not split off yet
        if found is not None:
            return found
    return None


def has_member(member: str, probed: Any = None) -> bool:
    """Whether the installed vLLM has a member, which is given as ``"OWNER NAME PATTERN"``.

    Args:
        member: The owner as in ``shapes.txt``, or "." for the probed object; then a name and a
            regular expression that the shape must contain, both optional.
        probed: The probed object of vLLM.
    """
    owner_name, name, pattern = (*member.split(None, 2), "", "")[:3]
    owner = probed if owner_name == "." else owner_of(owner_name)
    if not name:
        return owner is not None
    shape = shape_of(owner, name)
    return shape is not None and re.search(pattern, shape) is not None


@lru_cache(64)  # because each takes 0.1 ms, and some targets are called in every step
def parameters_of(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function or a constructor, even of one that passes them on."""
    bases = target.__mro__[1:-1] if isinstance(target, type) else ()
    found = inspect.signature(target).parameters
    for base in bases:
        if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in found.values()):
            break
        found = inspect.signature(base).parameters  # which gets the arguments, as in AsyncScheduler
    return found


@lru_cache(64)
def required_arguments(target: Callable[..., Any]) -> frozenset[str]:
    """Return the names of the parameters that have no default."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = parameters_of(target).values()
    return frozenset(one.name for one in found if one.kind in named and one.default is one.empty)


def signature_of(owner: Any, method: str) -> str:
    """Format the parameters of a method, without ``self`` and ``cls``, as "(a, b=1)"."""
    try:
        found = getattr(owner, method)
        parameters = list(inspect.signature(found).parameters.values())
    except (AttributeError, TypeError, ValueError) as error:
        return f" (unreadable: {error})"
    if isinstance(owner, type) and not inspect.ismethod(found):  # not a class method
        del parameters[:1]
    return f"({', '.join(str(p.replace(annotation=p.empty)) for p in parameters)})"


def shape_of(owner: Any, name: str) -> str | None:
    """Format the shape of a member as in the table; None if the owner has no such member."""
    if owner is None:
        return None
    if isinstance(owner, enum.EnumMeta):
        return _MEMBER if name in owner.__members__ else None
    for kind in inspect.getmro(owner) if isinstance(owner, type) else ():
        if name in (annotations := inspect.get_annotations(kind)):
            return _plain(annotations[name])
    found = inspect.getattr_static(owner, name, None)
    if found is None and not isinstance(owner, type):
        found = getattr(owner, name, None)  # of a proxy
    if found is None:
        return _ANY if _is_set_by_constructor(owner, name) else None
    if isinstance(found, property):
        return _PROPERTY
    if not callable(member := getattr(owner, name)):
        return _ANY
    shape = signature_of(owner, name)
    try:
        returned = inspect.signature(member).return_annotation
    except (TypeError, ValueError):  # the shape contains the reason
        return shape
    if name == "__init__" or returned is inspect.Signature.empty:
        return shape
    return f"{shape} -> {_plain(returned)}"


def _is_set_by_constructor(owner: Any, name: str) -> bool:
    """Whether the constructor of a class sets this attribute on every object.

    A dataclass counts as False, because its fields are found by their annotations.
    """
    if not isinstance(owner, type) or is_dataclass(owner):
        return False
    for kind in inspect.getmro(owner):
        code = getattr(vars(kind).get("__init__"), "__code__", None)
        for step in dis.get_instructions(code) if code else ():
            if step.opname == "STORE_ATTR" and step.argval == name:
                return True
    return False


def require_concrete(seam: str, kind: type) -> None:
    """Refuse a base class of vLLM if it requires a member that kvview's subclass does not define.

    Raises:
        UnsupportedEngineError: The subclass could not be instantiated.
    """
    missing: frozenset[str] = vars(kind).get("__abstractmethods__", frozenset())
    if missing:
        base = next(base for base in kind.__mro__ if missing & vars(base).keys())
        raise refusal(
            seam,
            f"{base.__name__} that requires {', '.join(sorted(missing))}",
            f"a class that requires only members that {kind.__name__} has",
        )


@contextmanager
def reading(seam: str, subject: str) -> Iterator[None]:
    """Report any exception in the ``with`` block as an unknown shape, in one line.

    Args:
        seam: The surface of vLLM that the ``with`` block reads.
        subject: The part of that surface, for the message.

    Raises:
        UnsupportedEngineError: The block raised.
    """
    try:
        with importing():
            yield
    except KVViewError:
        raise
    except Exception as error:
        *_, (frame, line) = walk_tb(error.__traceback__)
        message = " ".join(str(error).split())
        place = f"{Path(frame.f_code.co_filename).name}:{line}"
        raise refusal(
            seam, f"{subject} fails: {type(error).__name__}: {message} at {place}", subject
        ) from error


def expect(seam: str, subject: str, found: object, expected: object) -> None:
    """Refuse a vLLM that returns a value that no tested release returns.

    Raises:
        UnsupportedEngineError: The values differ.
    """
    if found != expected:
        raise refusal(seam, f"{subject}: {found!r}", repr(expected))


def members_of(kind: type) -> dict[str, str | None]:
    """Return the shapes of the public members that a class defines, without inherited members."""
    names = [*vars(kind), *inspect.get_annotations(kind)]
    return {name: shape_of(kind, name) for name in names if not name.startswith("_")}


def owner_of(name: str) -> Any:
    """Return the class or module of a row; None if the release does not have it."""
    module, _, kind = name.partition(":")
    if "." not in module:
        return find_class(module)
    try:
        found = import_module(module)
    except ImportError:
        return None
    return getattr(found, kind, None) if kind else found


def _plain(annotation: Any) -> str:
    """Format an annotation in a uniform spelling."""
    if annotation is None or annotation is type(None):
        return "None"
    if isinstance(annotation, type) and not hasattr(annotation, "__args__"):
        return annotation.__name__
    text = annotation if isinstance(annotation, str) else repr(annotation)
    return plain_text(text)


@cache
def plain_text(text: str) -> str:
    """Format an annotation in a uniform spelling, without module names and quotes."""
    text = re.sub(r"<(?:class|enum) '([^']*)'>", r"\1", text)
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        return text
    return ast.unparse(_Plain().visit(tree))


class _Plain(ast.NodeTransformer):
    """Rewrites annotations with plain names, and with ``X | None`` for ``Optional[X]``."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return ast.Name(node.attr)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            return self.visit(ast.parse(node.value, mode="eval").body)  # type: ignore[no-any-return]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:  # ForwardRef('X', ...)
        return self.visit(node.args[0])  # type: ignore[no-any-return]

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(None) if node.id == "NoneType" else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        kind = node.value.id if isinstance(node.value, ast.Name) else ""
        if kind == "Optional":
            return ast.BinOp(node.slice, ast.BitOr(), ast.Constant(None))
        if kind == "Union" and isinstance(node.slice, ast.Tuple):
            first, *others = node.slice.elts
            for other in others:
                first = ast.BinOp(first, ast.BitOr(), other)
            return first
        return node
