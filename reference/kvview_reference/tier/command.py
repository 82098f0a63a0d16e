"""``kvview tier``: folders of :class:`~kvview_reference.tier.FileStore`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from kvview.cli.exit_codes import ExitCode
from kvview.errors import ConfigError, KVViewError
from kvview.tier import Namespace

_MOST_LINES = 20


@click.group()
def tier() -> None:
    """Look after tiers below the host."""


@tier.command()
@click.argument("root")
def fsck(root: str) -> None:
    """Read every entry of a file store, and say which cannot be loaded.

    ROOT is the store's folder. Nothing is changed; a store removes a bad entry
    itself when it is asked for it. Exit code 1 when there is one.
    """
    from kvview_reference.tier.file_store import read_entry

    folders = [path.parent for path in sorted(Path(root).glob("*/namespace.json"))]
    if not folders:
        raise ConfigError(f"{root!r} is no folder of a file store: it has no */namespace.json")
    num_bad = 0
    for folder in folders:
        try:
            namespace = Namespace.from_json((folder / "namespace.json").read_text("utf-8"))
        except (KVViewError, OSError) as error:
            click.echo(f"{folder}: {error}", err=True)
            num_bad += 1
            continue
        num_entries, num_bytes = 0, 0
        for path in sorted(folder.glob("??/*")):
            try:
                entry = read_entry(namespace, str(path))
                num_bytes += path.stat().st_size
            except FileNotFoundError:  # evicted just now
                continue
            num_entries += 1
            if entry.problem:
                num_bad += 1
                if num_bad <= _MOST_LINES:
                    click.echo(f"{path}: {entry.problem}", err=True)
        click.echo(
            f"{folder.name}: {num_entries} entries, {num_bytes / 1e9:.3f} GB, model "
            f"{namespace.model!r}, weights {namespace.weights!r}"
        )
    click.echo(f"{num_bad} cannot be loaded")
    sys.exit(ExitCode.WRONG if num_bad else ExitCode.CLEAN)
