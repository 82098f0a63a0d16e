"""Folders in any state: a store refuses one in one line or uses it, and touches no file outside."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import resource
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from click.testing import CliRunner

from kvview import ConfigError, KVViewError
from kvview.tier import GuardedTier, Namespace
from kvview_reference.tier import FileStore, ObjectStore
from kvview_reference.tier.command import tier as tier_group
from kvview_reference.tier.folder.namespace_folder import lock_of
from tests.tier.jobs import HERE, looked_up, moved

pytest.importorskip("xxhash")

OLD = [b"old %d" % number for number in range(6)]
NEW = [b"new %d" % number for number in range(6)]


def ends(call: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Return the result of a call, which must end by itself or by an exception."""
    found: list[Any] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            raised.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it does not end"
    if raised:
        raise raised[0]
    return found[0]


def contents(folder: Path) -> dict[str, Any]:
    return {
        str(path): path.read_bytes() if stat.S_ISREG(path.lstat().st_mode) else path.lstat().st_mode
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with some pages, next to files that are not its own."""
    outside = tmp_path / "outside"
    (outside / "folder" / "half").mkdir(parents=True)
    (outside / "file").write_bytes(b"f" * 50)
    for key in OLD:  # named as entries are
        (outside / "folder" / key.hex()).write_bytes(b"o" * 5000)
    (outside / "folder" / "half" / "file").write_bytes(b"h")
    store = FileStore(HERE, root=str(tmp_path / "root"))
    assert all(moved(store, "put", *OLD))
    store.close()
    return tmp_path / "root"


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{(folder := os.open(path.parent, os.O_RDONLY))}/{path.name}")
        os.close(folder)


def _make_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 36)


KINDS: dict[str, Callable[[Path, Path], Any]] = {
    "folder": lambda path, outside: path.mkdir(),
    "full folder": lambda path, outside: (path / "x").mkdir(parents=True),
    "pipe": lambda path, outside: os.mkfifo(path),
    "socket": lambda path, outside: _socket(path),
    "link to a file": lambda path, outside: path.symlink_to(outside / "file"),
    "link to a folder": lambda path, outside: path.symlink_to(outside / "folder"),
    "link to nothing": lambda path, outside: path.symlink_to(outside / "none"),
    "link to itself": lambda path, outside: path.symlink_to(path.name),
    "link to zeros": lambda path, outside: path.symlink_to("/dev/zero"),
    "hard link": lambda path, outside: path.hardlink_to(outside / "file"),
    "empty file": lambda path, outside: path.touch(),
    "no text": lambda path, outside: path.write_bytes(b"\xff\xfe{" * 20),
    "large file": lambda path, outside: _make_large(path),
}
PLACES = ("", "lock", "turn", "budget", "namespace.json", "half", "half/x", "stray", "SHARD",
          "ENTRIES", "SHARD/stray", "SHARD/ABCD", "SHARD/abcd")  # fmt: skip


def places_of(folder: Path, place: str) -> list[Path]:
    shards = sorted(folder.glob("??"))
    if place == "ENTRIES":
        return sorted(folder.glob("??/*"))
    if place.startswith("SHARD"):
        return [shards[0] / place[6:] if place[6:] else shards[0]]
    return [folder / place]


def replace(path: Path, kind: str, outside: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    KINDS[kind](path, outside)


def play(root: Path, max_bytes: int | None) -> bool:
    """Open a store and use it; returns whether it was refused, in one line."""
    problem = ""
    try:
        store = FileStore(HERE, root=str(root), max_bytes=max_bytes)
    except KVViewError as error:
        problem = str(error)
    if problem:
        assert "\n" not in problem
        return True
    moved(store, "get", *OLD)
    for keys in (OLD, NEW, OLD):
        moved(store, "put", *keys)
        looked_up(store, *keys)
        moved(store, "get", *keys)
    for key in [*OLD, *NEW] if max_bytes is None else ():
        if moved(store, "put", key) == [True]:
            assert moved(store, "get", key) == [True], "a stored page can be loaded"
    store.delete(OLD)
    assert looked_up(store, *OLD) == [False] * len(OLD)
    store.close()
    return False


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_something_else_is_in_the_place_of_a_file(place: str, kind: str, root: Path) -> None:
    outside = root.with_name("outside")
    for path in places_of(root / HERE.digest.hex(), place):
        replace(path, kind, outside)
    before = contents(outside)
    refused = [ends(partial(play, root, size)) for size in (None, 5000)]
    assert contents(outside) == before
    is_own = place in ("", "lock", "turn", "budget", "namespace.json", "half")
    assert is_own or not any(refused), "strays are ignored"


def _become_links(paths: list[Path], outside: Path) -> None:
    for path in paths:
        path.rename(outside.with_name(f"moved {path.name}"))
        path.symlink_to(outside / "folder")


def _become(kind: str) -> Callable[[Path, Path], None]:
    def change(folder: Path, outside: Path) -> None:
        for path in sorted(folder.glob("??/*")):
            replace(path, kind, outside)

    return change


def _go(folder: Path, outside: Path) -> None:
    for path in sorted(folder.glob("??")):
        shutil.rmtree(path)


CHANGES: dict[str, Callable[[Path, Path], None]] = {
    "shards become links": lambda folder, out: _become_links(sorted(folder.glob("??")), out),
    "half becomes a link": lambda folder, out: _become_links([folder / "half"], out),
    "the folder becomes a link": lambda folder, out: _become_links([folder], out),
    "the folder goes": lambda folder, out: shutil.rmtree(folder),
    "half goes": lambda folder, out: shutil.rmtree(folder / "half"),
    "shards go": _go,
    "the count becomes a link": lambda f, out: replace(f / "budget", "link to a file", out),
    "entries become pipes": _become("pipe"),
    "entries become folders": _become("full folder"),
    "entries become links": _become("link to a file"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("max_bytes", [None, 7000])
def test_the_folder_changes_while_a_store_is_open(
    change: str, max_bytes: int | None, root: Path
) -> None:
    outside = root.with_name("outside")
    before = contents(outside)
    store = FileStore(HERE, root=str(root), max_bytes=max_bytes)
    assert any(moved(store, "get", *OLD))
    CHANGES[change](root / HERE.digest.hex(), outside)

    def use() -> None:
        for keys in (NEW, OLD, NEW):
            moved(store, "put", *keys)
            moved(store, "get", *keys)
            looked_up(store, *keys)
        store.delete(OLD)
        store.touch(NEW)
        moved(store, "put", *OLD, *NEW)
        store.close()

    ends(use)
    assert contents(outside) == before


# --- files that cannot be read ---


def test_a_put_replaces_a_file_that_cannot_be_read(root: Path) -> None:
    """No file can be opened for a while, as a full table of open files has it."""
    store = FileStore(HERE, root=str(root))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # otherwise a file that is closed later would leave a number for another file
    os.close(first_free := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, limits[1]))
    try:
        assert moved(store, "get", *OLD) == [False] * len(OLD)
        assert moved(store, "put", *NEW) == [False] * len(NEW)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert looked_up(store, *OLD) == [False] * len(OLD), "TIER-4"
    assert all(moved(store, "put", *OLD))
    assert all(moved(store, "get", *OLD))
    store.close()


def test_puts_that_fail_do_not_change_the_count(root: Path) -> None:
    folder = root / HERE.digest.hex()
    for path in sorted(folder.glob("??/*")):
        replace(path, "full folder", root)
    store = FileStore(HERE, root=str(root), max_bytes=20_000)
    used = store.usage().used_bytes
    for _ in range(20):
        assert moved(store, "put", *OLD) == [False] * len(OLD)
    assert store.usage().used_bytes == used
    assert not list((folder / "half").iterdir())
    store.close()
    again = FileStore(HERE, root=str(root), max_bytes=20_000)
    assert again.usage().used_bytes == used
    again.close()


def test_a_store_that_is_refused_leaves_nothing_open(root: Path) -> None:
    folder = root / HERE.digest.hex()
    (folder / "namespace.json").write_bytes(b"\xff")

    def in_use() -> set[str]:
        return {
            f"{kind} {one}" for kind in ("fd", "task") for one in os.listdir(f"/proc/self/{kind}")
        }

    before = in_use()
    with pytest.raises(ConfigError, match=r"cannot be used: namespace.json"):
        FileStore(HERE, root=str(root))
    with pytest.raises(ConfigError, match="threads must be from 1"):
        FileStore(Namespace("n", "1"), root=str(root), threads=0)
    assert in_use() <= before  # threads of other tests may end meanwhile
    (folder / "namespace.json").unlink()
    store = FileStore(HERE, root=str(root))
    assert all(moved(store, "get", *OLD))
    store.close()


@pytest.mark.parametrize("root_is", ["\0", "x" * 300, "/dev/null/x", "/proc/self/none"])
def test_a_root_that_cannot_be_made_is_refused(root_is: str) -> None:
    with pytest.raises(ConfigError, match=r"the folder .* cannot be used") as raised:
        FileStore(HERE, root=root_is)
    assert "\n" not in str(raised.value)


# --- locks ---

_HOLDER = """
import fcntl, os, sys, time
fcntl.flock(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(300)
"""


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Have another process keep the lock of a file."""
    monkeypatch.setattr("kvview_reference.tier.folder.file_budget._PATIENCE", 0.5)
    holders: list[subprocess.Popen[str]] = []

    def start(path: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _HOLDER, str(path)]
        holders.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert holders[-1].stdout is not None
        assert holders[-1].stdout.readline() == "held\n"
        return holders[-1]

    yield start
    for holder in holders:
        holder.kill()
        holder.communicate()


@pytest.mark.parametrize("name", ["lock", "turn", "budget"])
def test_a_lock_that_is_kept_refuses_the_folder(
    name: str, root: Path, hold: Callable[..., Any]
) -> None:
    hold(root / HERE.digest.hex() / name)
    with pytest.raises(ConfigError, match="another process did not release its lock"):
        ends(lambda: FileStore(HERE, root=str(root)))


def test_a_lock_that_is_kept_fails_puts_until_it_is_released(
    root: Path, hold: Callable[..., Any]
) -> None:
    store = FileStore(HERE, root=str(root))
    holder = hold(root / HERE.digest.hex() / "budget")
    many = [b"many %d" % number for number in range(400)]  # one wait, not one a page
    assert ends(lambda: moved(store, "put", *many)) == [False] * len(many)
    assert all(moved(store, "get", *OLD)), "loads need no lock"
    holder.kill()
    holder.wait()
    assert all(moved(store, "put", *NEW))
    ends(store.close)


# --- damage ---


@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("kind", [FileStore, ObjectStore])
def test_damage_that_a_store_finds_is_counted_and_logged_once(
    kind: Any, zero_copy: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if kind is ObjectStore:
        pytest.importorskip("obstore")
    caplog.set_level(logging.WARNING)
    options = {"url": f"file://{tmp_path}"} if kind is ObjectStore else {"root": str(tmp_path)}
    guard = GuardedTier(kind(HERE, **options), HERE, checksum="none", zero_copy=zero_copy)
    keys = [b"key %d" % number for number in range(60)]
    assert all(moved(guard, "put", *keys))
    names = {key.hex() for key in keys[:53]}
    for path in tmp_path.rglob("*"):
        if path.name in names:
            path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert moved(guard, "get", *keys) == [False] * 53 + [True] * 7
    assert (guard.stats.damaged, guard.stats.failed) == (53, 53)
    assert moved(guard, "get", *keys) == [False] * 53 + [True] * 7
    assert guard.stats.damaged == 53, "the damaged pages are removed"
    assert caplog.text.count("has damaged pages") == 1
    guard.close()


# --- runs ---


def test_a_run_removes_what_killed_processes_left_and_nothing_else(root: Path) -> None:
    outside = contents(root.with_name("outside"))
    living = FileStore(dataclasses.replace(HERE, run="living"), root=str(root))
    moved(living, "put", *OLD)
    dead = [root / (digit * 32) for digit in "abc"]
    for number, folder in enumerate(dead):
        lock_of(folder).touch()
        if number:
            shutil.copytree(root / living.namespace.digest.hex(), folder)
    (dead[2] / "link").symlink_to(root.with_name("outside"))
    (root / "stray.run").touch()
    before = fsck(str(root))
    assert "folders of runs that are gone: 3" in before.output
    assert "removed folders of runs that are gone: 3" in fsck(str(root), "--remove").output
    assert not any(path.exists() for folder in dead for path in (folder, lock_of(folder)))
    assert moved(living, "get", *OLD) == [True] * len(OLD)
    lock_of(dead[0]).touch()
    again = FileStore(living.namespace, root=str(root))
    again.close()
    assert moved(living, "get", *OLD) == [True] * len(OLD), "another store of the run has it open"
    living.close()
    assert sorted(path.name for path in root.iterdir()) == [HERE.digest.hex(), "stray.run"]
    assert contents(root.with_name("outside")) == outside


# --- fsck ---


def fsck(place: str, *options: str) -> Any:
    return ends(partial(CliRunner().invoke, tier_group, ["fsck", place, *options]))


@pytest.mark.parametrize("kind", KINDS)
def test_fsck_ends_on_any_folder(kind: str, root: Path) -> None:
    folder, outside = root / HERE.digest.hex(), root.with_name("outside")
    for place in ("stray", "SHARD/stray", "SHARD/ABCD", "SHARD/abcd", "half/x"):
        for path in places_of(folder, place):
            replace(path, kind, outside)
    KINDS[kind](root / "stray", outside)
    found = fsck(str(root))
    assert found.exit_code == 0, found.output
    assert f"{len(OLD)} entries" in found.output
    entry = min(folder.glob("??/*"))
    entry.write_bytes(entry.read_bytes()[:-1])
    found = fsck(str(root))
    assert found.exit_code == 1
    assert "it has 999 bytes of a page of 1000" in found.output
    assert "entries that cannot be loaded: 1" in found.output
    replace(folder / "namespace.json", kind, outside)
    found = fsck(str(root))
    assert found.exit_code == 1, found.output
    assert "Traceback" not in found.output
    assert fsck(str(folder / "lock")).exit_code == 1
