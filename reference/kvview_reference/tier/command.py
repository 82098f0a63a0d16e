"""``kvview tier``: verify the folder of a tier store."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from typing import Literal

import click

from kvview.cli.echo import echo
from kvview.cli.exit_codes import ExitCode
from kvview.cli.output import json_option, write_json
from kvview.errors import ConfigError, KVViewError
from kvview.tier import Namespace
from kvview_reference.tier.folder.store_folder import NOTE

_MOST_LINES = 20


@dataclass(frozen=True)
class StoreNamespace:
    """A folder of a file store, which contains the pages of one model.

    Args:
        folder: Name of the folder below the root.
        model: Model in the folder's ``namespace.json``; empty if the file cannot be read.
        weights: Weights in the folder's ``namespace.json``; empty if the file cannot be read.
        entries: Number of pages in the folder.
        num_bytes: Bytes of the files of these pages.
    """

    folder: str
    model: str
    weights: str
    entries: int
    num_bytes: int


@dataclass(frozen=True)
class BadEntry:
    """An entry of a store that cannot be loaded.

    Args:
        path: Path of the file or folder.
        problem: The fault.
    """

    path: str
    problem: str


@dataclass
class StoreCheck:
    """The report of ``kvview tier fsck --json FILE``.

    Args:
        root: Folder of the store.
        namespaces: The folders of namespaces.
        bad: Every entry that cannot be loaded.
        orphans: Folders of processes that are gone.
        removed: Whether these folders were removed.
        schema_version: Version of the JSON format, which grows when a field is removed or changes
            its meaning.
    """

    root: str
    namespaces: list[StoreNamespace] = field(default_factory=list)
    bad: list[BadEntry] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    removed: bool = False
    schema_version: Literal[1] = 1

    def report(self, path: str, problem: str) -> None:
        """Record an entry that cannot be loaded, and print it if it is one of the first."""
        self.bad.append(BadEntry(path, problem))
        if len(self.bad) <= _MOST_LINES:
            echo(f"{path}: {problem}", err=True)


@click.group()
def tier() -> None:
    """Verify the folder of a tier store."""


@tier.command()
@click.argument("root")
@click.option("--remove", is_flag=True, help="Remove the folders of runs that are gone.")
@json_option({"fsck": "kvview_reference.tier.command:StoreCheck"})
def fsck(root: str, remove: bool, json_file: str | None) -> None:
    """Read every entry of a store, and report the entries that cannot be loaded.

    ROOT is the folder of a file store. The command also reports the folders that killed
    runs have left, which the next engine removes, or --remove now. A bad entry is not
    removed, because a store does so when the entry is loaded. The exit code is 1 if an
    entry cannot be loaded.
    """
    from kvview_reference.tier.folder.namespace_folder import dead_folders, remove_folder
    from kvview_reference.tier.folder.stored_entries import entries_of_folder, read_entry

    found, num_stores = StoreCheck(root, removed=remove), 0
    for folder in dead_folders(root):
        found.orphans.append(folder.name)
        if remove:
            remove_folder(folder)
    for store in entries_of_folder(root):
        num_stores += 1
        try:
            if isinstance(store.note, OSError):
                raise store.note
            namespace = Namespace.from_json(store.note.decode("utf-8", "replace"))
        except (KVViewError, OSError) as error:
            found.report(store.name, str(error))
            continue
        if namespace.digest.hex() != store.name:
            found.report(store.name, f"the name of the folder is not the digest of its {NOTE}")
        num_entries, num_bytes = 0, 0
        for path, content in store.entries:
            num_entries += 1
            if isinstance(content, OSError):
                found.report(path, content.strerror or type(content).__name__)
                continue
            num_bytes += len(content)
            if problem := read_entry(namespace, content).problem:
                found.report(path, problem)
        names = namespace.model, namespace.weights
        found.namespaces.append(StoreNamespace(store.name, *names, num_entries, num_bytes))
        echo(
            f"{store.name}: {num_entries} entries, {num_bytes / 1e9:.3f} GB, model "
            f"{namespace.model!r}, weights {namespace.weights!r}",
            err=json_file == "-",
        )
    if not num_stores and not found.orphans:
        raise ConfigError(
            f"{root!r} is not the folder of a file store, because it has no */namespace.json"
        )
    echo(f"entries that cannot be loaded: {len(found.bad)}", err=json_file == "-")
    what = "removed folders of runs that are gone" if remove else "folders of runs that are gone"
    echo(f"{what}: {len(found.orphans)}", err=json_file == "-")
    write_json(json_file, asdict(found))
    sys.exit(ExitCode.WRONG if found.bad else ExitCode.CLEAN)
