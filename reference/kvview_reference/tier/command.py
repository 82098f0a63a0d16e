"""``kvview tier``: folders of :class:`~kvview_reference.tier.FileStore`."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import click

from kvview.cli.exit_codes import ExitCode
from kvview.cli.output import JSONOption, require_writable, write_json
from kvview.errors import ConfigError, KVViewError
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

    def tell(self, path: Path, problem: str) -> None:
        """Note what cannot be loaded, and say it while there are few."""
        self.bad.append(BadEntry(str(path), problem))
        if len(self.bad) <= _MOST_LINES:
            click.echo(f"{path}: {problem}", err=True)


@click.group()
def tier() -> None:
    """Look after tiers below the host."""


@tier.command()
@click.argument("root")
@click.option(
    "--json",
    "json_file",
    cls=JSONOption,
    schemas={"fsck": "kvview_reference.tier.command:StoreCheck"},
)
def fsck(root: str, json_file: str | None) -> None:
    """Read every entry of a file store, and say which cannot be loaded.

    ROOT is the store's folder. Nothing is changed; a store removes a bad entry
    itself when it is asked for it. Exit code 1 when there is one.
    """
    from kvview_reference.tier.file_store import read_entry

    require_writable("--json", json_file)
    folders = [path.parent for path in sorted(Path(root).glob("*/namespace.json"))]
    if not folders:
        raise ConfigError(f"{root!r} is no folder of a file store: it has no */namespace.json")
    found = StoreCheck(root)
    for folder in folders:
        try:
            namespace = Namespace.from_json((folder / "namespace.json").read_text("utf-8"))
        except (KVViewError, OSError, UnicodeDecodeError) as error:
            found.tell(folder, str(error))
            continue
        num_entries, num_bytes = 0, 0
        for path in sorted(folder.glob("??/*")):
            try:
                problem = read_entry(namespace, str(path)).problem
                num_bytes += path.stat().st_size
            except FileNotFoundError:  # evicted just now
                continue
            except OSError as error:
                problem = error.strerror or type(error).__name__
            num_entries += 1
            if problem:
                found.tell(path, problem)
        names = namespace.model, namespace.weights
        found.namespaces.append(StoreNamespace(folder.name, *names, num_entries, num_bytes))
        click.echo(
            f"{folder.name}: {num_entries} entries, {num_bytes / 1e9:.3f} GB, model "
            f"{namespace.model!r}, weights {namespace.weights!r}",
            err=json_file == "-",
        )
    click.echo(f"{len(found.bad)} cannot be loaded", err=json_file == "-")
    write_json(json_file, asdict(found))
    sys.exit(ExitCode.WRONG if found.bad else ExitCode.CLEAN)
