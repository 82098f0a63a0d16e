"""Makes a source wrong in one place: a comparison, a constant, a statement, and so on.

Places on which no behaviour of right code depends are excluded (:data:`LEFT_OUT`).
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import Any

LEFT_OUT = {
    "annotations, docstrings, strings, and code under TYPE_CHECKING": "they never run",
    "type aliases, any | outside of functions": "annotations with a name",
    "assert, and strict=True of a zip": "they state a condition that right code never breaks",
    "the text and arguments of errors, log lines, warnings, __repr__, __str__": "people read them",
    "numbers from 8 on, and sums of numbers, at module level or as a default": (
        "sizes and thresholds, which affect speed and not results"
    ),
}
"""Places that are never made wrong, with the reason."""

_TUNED_FROM = 8

_COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "reversed": "list"}
_EMPTY = {
    "bool": "False",
    "int": "0",
    "float": "0.0",
    "str": "''",
    "bytes": "b''",
    "Counter": "Counter()",
    "list": "[]",
    "Sequence": "()",
    "Iterable": "()",
    "Iterator": "iter(())",
    "tuple": "()",
    "set": "set()",
    "frozenset": "frozenset()",
    "dict": "{}",
    "Mapping": "{}",
}
_LOGGERS = {"log", "logger", "_log", "_logger", "LOGGER", "logging", "warnings"}
_NOT_SWAPPED = {"min", "max", "isinstance"}  # the same again, or never the same
_NOT_MUTATED = {"__repr__", "__str__"}


@dataclass(frozen=True)
class Site:
    """One place where a source can be wrong, in one way.

    Args:
        module: Name of the module.
        function: Qualified name of the function or class; ``""`` at module level.
        operator: The kind of change.
        number: Counts the sites of the operator in the function.
        line: Of the statement, to find the checks that reach it.
        change: ``old -> new``, for people, and to notice that the code has changed.
        is_in_function: Whether the import does not execute it.
    """

    module: str
    function: str
    operator: str
    number: int
    line: int
    change: str
    is_in_function: bool

    @property
    def id(self) -> str:
        """Stable while the function itself is unchanged."""
        return f"{self.module}:{self.function}:{self.operator}:{self.number}"


@dataclass(frozen=True)
class _Edit:
    function: str
    operator: str
    line: int
    change: str
    is_in_function: bool
    apply: Callable[[], None]


def find_sites(module: str, source: str) -> list[Site]:
    """Return every mutant of a module, in the order of its source."""
    return [site for site, _ in _sites(module, ast.parse(source))]


def mutate(module: str, source: str, site_id: str) -> ast.Module:
    """Return the module with one site made wrong.

    Raises:
        KeyError: There is no such site.
    """
    tree = ast.parse(source)
    for site, edit in _sites(module, tree):
        if site.id == site_id:
            edit.apply()
            return ast.fix_missing_locations(tree)
    raise KeyError(site_id)


def sample(sites: list[Site], num: int, seed: int) -> list[Site]:
    """Return some of the sites, spread evenly over the functions.

    A smaller sample is the start of a larger one.
    """

    def rank(site: Site) -> str:
        return sha256(f"{seed} {site.id}".encode()).hexdigest()

    turns: Counter[tuple[str, str]] = Counter()
    order = []
    for site in sorted(sites, key=rank):
        function = site.module, site.function
        order.append((turns[function], rank(site), site))
        turns[function] += 1
    return [site for _, _, site in sorted(order, key=lambda entry: entry[:2])[:num]]


def statement_lines(tree: ast.Module) -> Iterator[tuple[list[ast.stmt], int]]:
    """Yield each statement inside a function, as its list and its index."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                for name in ("body", "orelse", "finalbody"):
                    block = getattr(node, name, None)
                    if isinstance(block, list):
                        yield from ((block, at) for at in range(len(block)))


def _sites(module: str, tree: ast.Module) -> Iterator[tuple[Site, _Edit]]:
    edits = list(_Finder().find(tree))
    numbers: Counter[tuple[str, str]] = Counter()
    for edit in edits:
        key = edit.function, edit.operator
        site = Site(
            module, *key, numbers[key], edit.line, edit.change, is_in_function=edit.is_in_function
        )
        numbers[key] += 1
        yield site, edit


class _Finder:
    """Walks a tree and yields edits, which change the tree in place when they are applied."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._returns: list[ast.expr | None] = []
        self._line = 0

    def find(self, node: ast.AST) -> Iterator[_Edit]:
        """Yield the edits below a node."""
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "type_params", "decorator_list"):
                continue
            if isinstance(value, list):
                for at, child in enumerate(value):
                    if isinstance(child, ast.AST):
                        yield from self._visit(child, _into_list(value, at))
            elif isinstance(value, ast.AST):
                yield from self._visit(value, _into_field(node, field))

    def _visit(self, node: ast.AST, put: Callable[[ast.AST], None]) -> Iterator[_Edit]:
        outer = self._line
        if isinstance(node, ast.stmt):
            self._line = node.lineno
        yield from self._edits(node, put)
        self._line = outer  # the guard of a case comes after the statements of the case before it

    def _edits(self, node: ast.AST, put: Callable[[ast.AST], None]) -> Iterator[_Edit]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if node.name in _NOT_MUTATED:
                return
            self._names.append(node.name)
            is_function = isinstance(node, ast.FunctionDef)
            if isinstance(node, ast.FunctionDef):
                self._returns.append(node.returns)
            yield from self.find(node)
            self._names.pop()
            if is_function:
                self._returns.pop()
            return
        if isinstance(node, ast.arguments) and self._returns:  # defaults: the import's
            inner = self._returns.pop()
            yield from self.find(node)
            self._returns.append(inner)
            return
        if isinstance(node, ast.Assert | ast.JoinedStr) or _is_for_types(node) or _is_message(node):
            return
        if _is_strict(node) or _is_error(node) or (not self._returns and _is_tuned_or_alias(node)):
            return
        for operator, new, change in self._mutations(node):
            yield self._edit(operator, change, new, put)
        for operator, change, apply in _inside(node):
            yield _Edit(*self._place(operator), change, bool(self._returns), apply)
        if not isinstance(node, ast.Raise):  # an error's text and arguments are for people
            yield from self.find(node)

    def _edit(
        self, operator: str, change: str, new: ast.AST, put: Callable[[ast.AST], None]
    ) -> _Edit:
        return _Edit(*self._place(operator), change, bool(self._returns), lambda: put(new))

    def _place(self, operator: str) -> tuple[str, str, int]:
        return ".".join(self._names), operator, self._line

    def _mutations(self, node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
        """Yield the replacements of a whole node."""

        def to(operator: str, new: ast.AST) -> tuple[str, ast.AST, str]:
            return operator, new, f"{_text(node)} -> {_text(new)}"

        match node:
            case ast.Constant(value=bool() as value):
                yield to("flag", ast.Constant(not value))
            case ast.Constant(value=int() as value):
                yield to("plus 1", ast.Constant(value + 1))
                yield to("minus 1", ast.Constant(value - 1))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield to("not", operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                yield to("arithmetic", ast.BinOp(left, _ARITHMETIC[type(op)](), right))
            case ast.AugAssign(target=target, op=op, value=value) if type(op) in _ARITHMETIC:
                new_op = _ARITHMETIC[type(op)]()
                yield to("arithmetic", ast.AugAssign(target, new_op, value))
                yield to("removed", ast.Pass())
            case ast.BoolOp(op=op, values=values):
                yield to(
                    "and/or", ast.BoolOp(ast.Or() if type(op) is ast.And else ast.And(), values)
                )
            case ast.Slice(lower=lower, upper=upper, step=step):
                if lower is not None:
                    yield to("slice", ast.Slice(None, upper, step))
                if upper is not None:
                    yield to("slice", ast.Slice(lower, None, step))
            case ast.Call(func=ast.Name(id=name) as func, args=args, keywords=keywords) if (
                name in _CALLS
            ):
                named = ast.copy_location(ast.Name(_CALLS[name], ast.Load()), func)
                yield to("call", ast.Call(named, args, keywords))
            case ast.Return(value=value) if value is not None and self._returns:
                if (empty := _empty(self._returns[-1])) != _text(value):
                    yield to("returns empty", ast.Return(_expression(empty)))
            case ast.Return():
                yield to("removed", ast.Pass())
            case ast.Expr(value=ast.Call() | ast.Await()):
                yield to("removed", ast.Pass())
            case ast.Raise() | ast.Delete() | ast.Continue() | ast.Break():
                yield to("removed", ast.Pass())
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield to("removed", ast.Pass())
            case _:
                pass
        if isinstance(node, ast.Call) and _text(node.func) not in _NOT_SWAPPED:
            for at, (one, other) in enumerate(pairwise(node.args)):
                if ast.dump(one) != ast.dump(other) and not isinstance(other, ast.Starred):
                    args = [*node.args[:at], other, one, *node.args[at + 2 :]]
                    yield to("swapped", ast.Call(node.func, args, node.keywords))


def _inside(node: ast.AST) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Yield the changes of a part of a node."""
    if isinstance(node, ast.Compare):
        for at, op in enumerate(node.ops):
            new = _COMPARE[type(op)]()
            old, changed = _text(node), ast.Compare(node.left, list(node.ops), node.comparators)
            changed.ops[at] = new
            yield "compare", f"{old} -> {_text(changed)}", _into_list_later(node.ops, at, new)
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not _negates_itself(node.test):
        change = f"if {_text(node.test)} -> if not ..."
        negated = ast.UnaryOp(ast.Not(), node.test)
        yield "negated", change, _into_field_later(node, "test", negated)
    if isinstance(node, ast.If) and node.orelse:
        change = f"else: {_text(node.orelse[0])} -> no else"
        yield "no else", change, _into_field_later(node, "orelse", [])
    if isinstance(node, ast.comprehension):
        for at, test in enumerate(node.ifs):
            true = ast.Constant(True)
            yield "filter", f"if {_text(test)} -> no if", _into_list_later(node.ifs, at, true)
    if isinstance(node, ast.For):
        change = f"for ... in {_text(node.iter)} -> in ()"
        yield "no loop", change, _into_field_later(node, "iter", _expression("()"))


def _negates_itself(test: ast.expr) -> bool:
    """Return whether another operator already makes the opposite."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return not isinstance(test.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and _text(node.test) == "TYPE_CHECKING"


def _is_error(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _text(node.func).endswith(("Error", "Exceeded"))


def _is_strict(node: ast.AST) -> bool:
    return isinstance(node, ast.keyword) and node.arg == "strict"


def _is_tuned_or_alias(node: ast.AST) -> bool:
    """Return whether a node outside of functions is a size, a threshold or a type alias."""
    if isinstance(node, ast.BinOp):
        is_number = isinstance(node.left, ast.Constant) and isinstance(node.right, ast.Constant)
        return is_number or isinstance(node.op, ast.BitOr)
    is_int = isinstance(node, ast.Constant) and type(node.value) is int
    return is_int and node.value >= _TUNED_FROM  # type: ignore[attr-defined]


def _is_message(node: ast.AST) -> bool:
    """Return whether a node is a log line or a warning."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and isinstance(node.value.func.value, ast.Name)
        and node.value.func.value.id in _LOGGERS
    )


def _empty(annotation: ast.expr | None) -> str:
    text = "" if annotation is None else _text(annotation)
    return "None" if "None" in text else _EMPTY.get(text.partition("[")[0], "None")


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _text(node: ast.AST) -> str:
    text = ast.unparse(ast.fix_missing_locations(node)).partition("\n")[0]
    return text if len(text) <= 100 else f"{text[:97]}..."


def _into_list(items: list[Any], at: int) -> Callable[[ast.AST], None]:
    return lambda new: items.__setitem__(at, new)


def _into_field(node: ast.AST, field: str) -> Callable[[ast.AST], None]:
    return lambda new: setattr(node, field, new)


def _into_list_later(items: list[Any], at: int, new: ast.AST) -> Callable[[], None]:
    return lambda: items.__setitem__(at, new)


def _into_field_later(node: ast.AST, field: str, new: object) -> Callable[[], None]:
    return lambda: setattr(node, field, new)
