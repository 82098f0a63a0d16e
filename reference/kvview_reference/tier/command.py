"""``kvview tier``: what the stores of this package have written."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from typing import Literal

import click

from kvview.cli.exit_codes import ExitCode
from kvview.cli.output import JSONOption, require_writable, write_json
from kvview.errors import ConfigError, KVViewError
from kvview.options import read_options
from kvview.tier import Namespace

_MOST_LINES = 20


@dataclass(frozen=True)
class StoreNamespace:
    """A folder of a file store, whose pages are of one model.

    Args:
        folder: Its name below the root.
        model: As its ``namespace.json`` says; empty when that cannot be read.
        weights: As its ``namespace.json`` says; empty when that cannot be read.
        entries: Pages in it.
        num_bytes: Of their files.
    """

    folder: str
    model: str
    weights: str
    entries: int
    num_bytes: int


@dataclass(frozen=True)
class BadEntry:
    """What cannot be loaded.

    Args:
        path: Of the file or folder.
        problem: What is wrong with it.
    """

    path: str
    problem: str


@dataclass
class StoreCheck:
    """What ``kvview tier fsck --json FILE`` writes.

    Args:
        root: As it was given.
        namespaces: One a folder.
        bad: All that cannot be loaded.
        schema_version: Grows when a field goes or means something else.
    """

    root: str
    namespaces: list[StoreNamespace] = field(default_factory=list)
    bad: list[BadEntry] = field(default_factory=list)
    schema_version: Literal[1] = 1

    def tell(self, path: str, problem: str) -> None:
        """Note what cannot be loaded, and say it while there are few."""
        self.bad.append(BadEntry(path, problem))
        if len(self.bad) <= _MOST_LINES:
            click.echo(f"{path}: {problem}", err=True)


@click.group()
def tier() -> None:
    """Look after tiers below the host."""


@tier.command()
@click.argument("root")
@click.option("--option", "given", multiple=True, metavar="NAME=VALUE", help="Of an object store.")
@click.option(
    "--json",
    "json_file",
    cls=JSONOption,
    schemas={"fsck": "kvview_reference.tier.command:StoreCheck"},
)
def fsck(root: str, given: tuple[str, ...], json_file: str | None) -> None:
    """Read every entry of a store, and say which cannot be loaded.

    ROOT is the folder of a file store, or the url of an object store, all of
    which is read over the network then. Nothing is changed; a store removes a
    bad entry itself when it is asked for it. Exit code 1 when there is one.
    """
    from kvview_reference.tier.entry import read_entry
    from kvview_reference.tier.file_store import entries_of_folder
    from kvview_reference.tier.object_store import entries_of_bucket

    require_writable("--json", json_file)
    options, found, num_stores = read_options(given), StoreCheck(root), 0
    stores = entries_of_bucket(root, options) if "://" in root else entries_of_folder(root)
    for name, said, contents in stores:
        num_stores += 1
        try:
            namespace = Namespace.from_json(said)
        except KVViewError as error:
            found.tell(name, str(error))
            continue
        num_entries, num_bytes = 0, 0
        for path, content in contents:
            num_entries += 1
            num_bytes += len(content)
            if problem := read_entry(namespace, content).problem:
                found.tell(path, problem)
        names = namespace.model, namespace.weights
        found.namespaces.append(StoreNamespace(name, *names, num_entries, num_bytes))
        click.echo(
            f"{name}: {num_entries} entries, {num_bytes / 1e9:.3f} GB, model "
            f"{namespace.model!r}, weights {namespace.weights!r}",
            err=json_file == "-",
        )
    if not num_stores:
        raise ConfigError(f"there is no tier at {root!r}: it has no */namespace.json")
    click.echo(f"{len(found.bad)} cannot be loaded", err=json_file == "-")
    write_json(json_file, asdict(found))
    sys.exit(ExitCode.WRONG if found.bad else ExitCode.CLEAN)
