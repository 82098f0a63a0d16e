"""Placeholders in options, which the check replaces by new folders and sizes of tiers.

A new folder is needed because the data of a run must not affect later runs. A size is needed
because most faults of a tier show only when the tier is full, and a tier of its default size never
fills up in a run of seconds. A size may be an expression, such as ``{bytes}/4`` for the upper of
two levels.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory
from typing import Any

from kvview.errors import ConfigError

FOLDER = "{tmp}"
"""Placeholder for a new folder, in the text of an option."""
BLOCKS = "{blocks}"
"""Placeholder for the number of blocks that the tier holds in this run."""
BYTES = "{bytes}"
"""Placeholder for the number of bytes that the tier holds in this run."""

_OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def in_folder(value: Any, folder: str) -> Any:
    """Return options with :data:`FOLDER` replaced.

    Args:
        value: Options, or a part of them.
        folder: Folder of this run.
    """
    if isinstance(value, str):
        return value.replace(FOLDER, folder)
    return _each(value, lambda part: in_folder(part, folder))


def in_size(value: Any, num_blocks: int, block_bytes: int) -> Any:
    """Return options in which :data:`BLOCKS`, :data:`BYTES` and expressions are replaced by sizes.

    Args:
        value: Options, or a part of them.
        num_blocks: Blocks that the tier holds in this run.
        block_bytes: Bytes of one block.

    Raises:
        ConfigError: An expression contains more than numbers, ``+ - * /`` and parentheses, or its
            value is not a size.
    """
    if _is_size(value):
        rest = num_blocks % 2 * block_bytes // 2  # a size need not be a whole number of blocks
        sizes = {"blocks": num_blocks, "bytes": num_blocks * block_bytes + rest}
        return _evaluated(value, sizes)
    return _each(value, lambda part: in_size(part, num_blocks, block_bytes))


def is_sized(options: Mapping[str, Any]) -> bool:
    """Whether options let the check choose the size of a tier."""
    return bool(_sizes(options))


def has_whole_size(options: Mapping[str, Any]) -> bool:
    """Whether an option is the size of the whole tier, not an expression of it."""
    return any(text in (BLOCKS, BYTES) for text in _sizes(options))


def is_in_bytes(options: Mapping[str, Any]) -> bool:
    """Whether sizes are in bytes or are expressions, so that the number of blocks is unknown."""
    return any(text != BLOCKS for text in _sizes(options))


def _is_size(value: Any) -> bool:
    if not isinstance(value, str) or FOLDER in value or value.startswith("/"):
        return False  # a path
    return BLOCKS in value or BYTES in value


def _sizes(value: Any) -> list[str]:
    """Return the texts in options that are sizes."""
    found: list[str] = [value] if _is_size(value) else []
    if isinstance(value, Mapping | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            found += _sizes(part)
    return found


def _evaluated(text: str, sizes: Mapping[str, int]) -> int:
    try:
        tree = ast.parse(text.replace(BLOCKS, "blocks").replace(BYTES, "bytes"), mode="eval")
        size = int(_value(tree.body, sizes))
    except (SyntaxError, ValueError, OverflowError, RecursionError, ZeroDivisionError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise ConfigError(
            f"size {text!r} cannot be computed ({reason}); use numbers, + - * / and parentheses "
            f"with {BLOCKS} or {BYTES}, such as '{BYTES}/4'"
        ) from None
    if size < 0:
        raise ConfigError(f"size {text!r} is {size} in a run with {sizes}, expected 0 or more")
    return size


def _value(node: ast.expr, sizes: Mapping[str, int]) -> float:
    match node:
        case ast.BinOp(op=op) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(node.left, sizes), _value(node.right, sizes))
        case ast.Name(id=name) if name in sizes:
            return sizes[name]
        case ast.Constant(value=number) if type(number) in (int, float):
            assert isinstance(number, int | float), "the case permits no other type"
            return number
    raise ValueError(f"{ast.unparse(node)} is not a number")


def _each(value: Any, fill: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {name: fill(part) for name, part in value.items()}
    return [fill(part) for part in value] if isinstance(value, list) else value


@contextmanager
def in_fresh_folders(options: Mapping[str, Any], number: int = 1) -> Iterator[list[dict[str, Any]]]:
    """Make options for several connectors, each with its own folder until the end of the block.

    Folders are only made if an option names them.
    """
    if in_folder(options, "") == options:
        yield [dict(options)] * number
        return
    with ExitStack() as stack:
        folders = [
            stack.enter_context(TemporaryDirectory(prefix="kvview-", ignore_cleanup_errors=True))
            for _ in range(number)
        ]
        yield [in_folder(options, folder) for folder in folders]
