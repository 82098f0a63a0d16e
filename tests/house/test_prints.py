"""Text reaches the terminal through :mod:`kvview.cli.echo` alone (SECURITY.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.house.source_tree import Module, modules

SINKS = ("kvview.cli.echo", "kvview.cli.console", "kvview.cli.output")
BEFORE_CLICK = "kvview.cli"  # prints that the extra "cli" is not installed
SAFE = ("printable", "dumps")
RAW = {"click.echo", "click.secho", "sys.stdout.write", "sys.stderr.write", "print_exception"}


def raw_prints(module: Module) -> Iterator[int]:
    """Lines that print in another way."""
    has_rich_console = any(
        isinstance(node, ast.ImportFrom)
        and node.module == "rich.console"
        and "Console" in {alias.name for alias in node.names}
        for node in ast.walk(module.tree)
    )
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        is_raw = called in RAW or called.rpartition(".")[2] in RAW
        is_raw |= called == "Console" and has_rich_console
        is_raw |= called == "print" and not any(name in ast.unparse(node) for name in SAFE)
        if is_raw:
            yield node.lineno


def test_no_module_prints_in_another_way() -> None:
    wrong = [
        f"{module.path}:{line} prints; use kvview.cli.echo.echo or kvview.cli.console.Console"
        for module in modules()
        if module.name not in (*SINKS, BEFORE_CLICK)
        for line in raw_prints(module)
    ]
    assert not wrong, "\n".join(wrong)
