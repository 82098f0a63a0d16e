"""``kvview tier``: what the stores of this package have written."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from typing import Literal

import click
from rich.box import SIMPLE
from rich.table import Table

from kvview.cli.console import Console
from kvview.cli.echo import echo
from kvview.cli.exit_codes import ExitCode
from kvview.cli.output import JSONOption, Whole, write_json
from kvview.errors import ConfigError, KVViewError
from kvview.options import read_options
from kvview.targets import load_target
from kvview.tier import Namespace, is_tier_store
from kvview_reference.tier.store_folder import NOTE

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
            echo(f"{path}: {problem}", err=True)


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
    from kvview_reference.tier.stored_entries import (
        entries_of_bucket,
        entries_of_folder,
        read_entry,
    )

    options, found, num_stores = read_options(given), StoreCheck(root), 0
    stores = entries_of_bucket(root, options) if "://" in root else entries_of_folder(root)
    for store in stores:
        num_stores += 1
        try:
            if isinstance(store.note, OSError):
                raise store.note
            namespace = Namespace.from_json(store.note.decode("utf-8", "replace"))
        except (KVViewError, OSError) as error:
            found.tell(store.name, str(error))
            continue
        if namespace.digest.hex() != store.name:
            found.tell(store.name, f"it is named after another namespace than its {NOTE}")
        num_entries, num_bytes = 0, 0
        for path, content in store.entries:
            num_entries += 1
            if isinstance(content, OSError):
                found.tell(path, content.strerror or type(content).__name__)
                continue
            num_bytes += len(content)
            if problem := read_entry(namespace, content).problem:
                found.tell(path, problem)
        names = namespace.model, namespace.weights
        found.namespaces.append(StoreNamespace(store.name, *names, num_entries, num_bytes))
        echo(
            f"{store.name}: {num_entries} entries, {num_bytes / 1e9:.3f} GB, model "
            f"{namespace.model!r}, weights {namespace.weights!r}",
            err=json_file == "-",
        )
    if not num_stores:
        raise ConfigError(f"there is no tier at {root!r}: it has no */namespace.json")
    echo(f"{len(found.bad)} cannot be loaded", err=json_file == "-")
    write_json(json_file, asdict(found))
    sys.exit(ExitCode.WRONG if found.bad else ExitCode.CLEAN)


@tier.command()
@click.argument("store")
@click.option("--option", "given", multiple=True, metavar="NAME=VALUE", help="Of the store.")
@click.option(
    "--page-bytes",
    "sizes",
    type=Whole(),
    multiple=True,
    default=(65_536, 262_144, 1_048_576, 4_194_304),
    help="Size of a page; repeatable.  [default: 64 KiB to 4 MiB]",
)
@click.option("--pages", type=Whole(), default=32, show_default=True, help="Of one job.")
@click.option(
    "--rounds", type=Whole(), default=5, show_default=True, help="Of each size; medians count."
)
@click.option("--no-guard", is_flag=True, help="Without what every bridge puts in front.")
@click.option(
    "--json",
    "json_file",
    cls=JSONOption,
    schemas={"bench": "kvview_reference.tier.throughput:StoreBench"},
)
def bench(
    store: str,
    given: tuple[str, ...],
    sizes: tuple[int, ...],
    pages: int,
    rounds: int,
    no_guard: bool,
    json_file: str | None,
) -> None:
    """Measure how fast a store is, by the size of a page.

    STORE is package.module:Class or path/to/file.py:Class. '{tmp}' in an option
    is a fresh folder, removed at the end. One job of --pages pages is in flight
    at a time. Exit code 1 when a page failed, or came back with other bytes.
    """
    from kvview_reference.tier.throughput import StoreBench, measure

    make = load_target(store)
    if not is_tier_store(make):
        raise ConfigError(f"{store!r} is no class of tier stores")
    options = read_options(given)
    found = measure(make, options, sizes, pages=pages, rounds=rounds, is_guarded=not no_guard)
    table = Table(box=SIMPLE)
    for column in ("page", "put GB/s", "get GB/s", "lookup us/key", "caller us/page", "failed"):
        table.add_column(column, justify="right")
    for speed in found:
        table.add_row(
            f"{speed.page_bytes / 1024:g} KiB",
            f"{speed.put:.2f}",
            f"{speed.get:.2f}",
            f"{speed.lookup_us:.0f}",
            f"{speed.call_us:.1f}",
            str(speed.failed + speed.wrong),
        )
    Console(stderr=json_file == "-").print(table)
    write_json(json_file, asdict(StoreBench(store, not no_guard, found)))
    sys.exit(ExitCode.WRONG if any(each.failed + each.wrong for each in found) else 0)
