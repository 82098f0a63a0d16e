"""Placeholders in options that the check fills in: fresh folders, and the size of a tier.

Data of a connector must not outlive its run. Most faults of a tier show only when the tier is
full, and a tier of its default size never fills up in a run of seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory
from typing import Any

FOLDER = "{tmp}"
"""In the text of an option: a fresh folder."""
BLOCKS = "{blocks}"
"""An option: how many blocks the tier holds in this run."""
BYTES = "{bytes}"
"""An option: how many bytes it holds."""


def in_folder(value: Any, folder: str) -> Any:
    """Options with :data:`FOLDER` replaced.

    Args:
        value: Options, or a part of them.
        folder: Of this run.
    """
    if isinstance(value, str):
        return value.replace(FOLDER, folder)
    return _each(value, lambda part: in_folder(part, folder))


def in_size(value: Any, num_blocks: int, block_bytes: int) -> Any:
    """Options with :data:`BLOCKS` and :data:`BYTES` replaced.

    Args:
        value: Options, or a part of them.
        num_blocks: Blocks that the tier holds in this run.
        block_bytes: Of one of them.
    """
    if isinstance(value, str):
        rest = num_blocks % 2 * block_bytes // 2  # a size need not be a whole number of blocks
        return {BLOCKS: num_blocks, BYTES: num_blocks * block_bytes + rest}.get(value, value)
    return _each(value, lambda part: in_size(part, num_blocks, block_bytes))


def is_sized(options: Mapping[str, Any]) -> bool:
    """Whether they leave it to the check how much a tier holds."""
    return bool(in_size(options, 0, 0) != options)


def is_in_bytes(options: Mapping[str, Any]) -> bool:
    """Whether they do so in bytes: how many blocks fit, headers and all, a connector knows."""
    return bool(in_size(options, 1, 0) != in_size(options, 1, 1))


def _each(value: Any, fill: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {name: fill(part) for name, part in value.items()}
    return [fill(part) for part in value] if isinstance(value, list) else value


@contextmanager
def in_fresh_folders(options: Mapping[str, Any], number: int = 1) -> Iterator[list[dict[str, Any]]]:
    """Options for as many connectors, each with a folder until the end of the block.

    No folder is made unless an option names it.
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
