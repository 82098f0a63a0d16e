"""Fresh folders for options: what a connector keeps must not outlive its run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory
from typing import Any

FOLDER = "{tmp}"
"""In the text of an option: a fresh folder."""


def in_folder(value: Any, folder: str) -> Any:
    """Options with :data:`FOLDER` replaced.

    Args:
        value: Options, or a part of them.
        folder: Of this run.
    """
    if isinstance(value, str):
        return value.replace(FOLDER, folder)
    if isinstance(value, Mapping):
        return {name: in_folder(part, folder) for name, part in value.items()}
    return [in_folder(part, folder) for part in value] if isinstance(value, list) else value


@contextmanager
def in_fresh_folders(options: Mapping[str, Any], number: int = 1) -> Iterator[list[dict[str, Any]]]:
    """Options for as many connectors, each with a folder until the end of the block.

    None is made if no option asks for it.
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
