"""``kvview tier``: what the stores of this package have written."""

from __future__ import annotations

import sys

import click

from kvview.cli.exit_codes import ExitCode
from kvview.errors import ConfigError, KVViewError
from kvview.options import read_options
from kvview.tier import Namespace

_MOST_LINES = 20


@click.group()
def tier() -> None:
    """Look after tiers below the host."""


@tier.command()
@click.argument("root")
@click.option("--option", "given", multiple=True, metavar="NAME=VALUE", help="Of an object store.")
def fsck(root: str, given: tuple[str, ...]) -> None:
    """Read every entry of a store, and say which cannot be loaded.

    ROOT is the folder of a file store, or the url of an object store, all of
    which is read over the network then. Nothing is changed; a store removes a
    bad entry itself when it is asked for it. Exit code 1 when there is one.
    """
    from kvview_reference.tier.entry import read_entry
    from kvview_reference.tier.file_store import entries_of_folder
    from kvview_reference.tier.object_store import entries_of_bucket

    options, num_bad, num_stores = read_options(given), 0, 0
    stores = entries_of_bucket(root, options) if "://" in root else entries_of_folder(root)
    for name, said, contents in stores:
        num_stores += 1
        try:
            namespace = Namespace.from_json(said)
        except KVViewError as error:
            click.echo(f"{name}: {error}", err=True)
            num_bad += 1
            continue
        num_entries, num_bytes = 0, 0
        for path, content in contents:
            num_entries += 1
            num_bytes += len(content)
            if problem := read_entry(namespace, content).problem:
                num_bad += 1
                if num_bad <= _MOST_LINES:
                    click.echo(f"{path}: {problem}", err=True)
        click.echo(
            f"{name}: {num_entries} entries, {num_bytes / 1e9:.3f} GB, model "
            f"{namespace.model!r}, weights {namespace.weights!r}"
        )
    if not num_stores:
        raise ConfigError(f"there is no tier at {root!r}: it has no */namespace.json")
    click.echo(f"{num_bad} cannot be loaded")
    sys.exit(ExitCode.WRONG if num_bad else ExitCode.CLEAN)
