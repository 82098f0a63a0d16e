"""The tier contract: the kit on right and wrong stores, and behaviour beyond the contract."""

from __future__ import annotations

import fcntl
import os
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from typing_extensions import override

from examples.folder_store import FolderStore
from kvview import ConfigError, NamespaceMismatchError
from kvview.bridge import TierOptions, open_tier
from kvview.options import parse_options
from kvview.testing import run_checks
from kvview.testing.tier.suite import suite_of
from kvview.tier import Namespace, Polled, Threaded
from kvview.tier.guard.checksum import PageSeal
from kvview_reference.harness import Tier
from kvview_reference.tier import FileStore
from tests.tier.jobs import HERE, THERE, moved

pytest.importorskip("xxhash")


class TestFiles(Tier):
    settings = settings(max_examples=10, stateful_step_count=20)


class PolledMemory(Polled):
    """Moves one job in each call of ``poll``."""

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(namespace)
        self.pages: dict[bytes, bytes] = {}
        self.waiting: deque[tuple[int, Sequence[bytes], Sequence[memoryview], bool]] = deque()

    @override
    def begin(
        self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], *, is_get: bool
    ) -> None:
        self.waiting.append((job, keys, pages, is_get))

    @override
    def collect(self) -> None:
        if not self.waiting:
            return
        job, keys, pages, is_get = self.waiting.popleft()
        move = self.load if is_get else self.store
        self.report(job, [move(key, page) for key, page in zip(keys, pages, strict=True)])

    def load(self, key: bytes, page: memoryview) -> bool:
        found = self.pages.pop(key, b"")  # a key whose load fails is a miss
        if len(found) != len(page):
            return False
        page[:] = self.pages[key] = found
        return True

    def store(self, key: bytes, page: memoryview) -> bool:
        self.pages[key] = bytes(page)
        return True

    @override
    def end(self) -> None:
        self.waiting.clear()
        self.pages.clear()

    def lookup(self, keys: Sequence[bytes], /) -> list[bool | None]:
        return [key in self.pages for key in keys]


class TestPolled(suite_of(PolledMemory, {})):  # type: ignore[misc]
    settings = settings(max_examples=10, stateful_step_count=20)


class HasNamesOfItsOwn(FolderStore):
    """Uses names that the base might use."""

    def __init__(self, namespace: Namespace, root: str) -> None:
        super().__init__(namespace, root)
        self._done = self._tasks = self._threads = self._removals = None

    def _remove(self, key: bytes) -> None:
        self._path(key).unlink()

    def delete(self, keys: Any, /) -> None:
        self.remove_later(keys, self._remove)

    def _work(self) -> None: ...

    _move = _ask = _submit = _work


def test_the_names_of_an_author_do_not_replace_those_of_the_base(tmp_path: Path) -> None:
    store = HasNamesOfItsOwn(Namespace("m", weights="1"), str(tmp_path))
    page = memoryview(bytearray(b"page"))
    store.put(1, [b"key"], [page])
    assert store.drain(10)
    store.delete([b"key"])
    store.get(2, [b"key"], [page])
    assert store.drain(10)
    assert store.poll() == [(1, [True]), (2, [False])]
    store.close()


# --- reports ---


# --- targets ---


class Lacking:
    """Lacks methods of a store."""

    def put(self) -> None: ...

    def get(self) -> None: ...

    def poll(self) -> None: ...


class Half(Threaded):
    """A store whose author has not finished."""

    def has(self, key: bytes, /) -> bool:
        return False


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (Lacking, "Lacking is not a tier store, because it lacks lookup, drain, close"),
        (Half, "Half is abstract, because it lacks read_into, write"),
    ],
)
def test_an_unfinished_store_is_refused(target: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_checks(target)


@pytest.mark.parametrize("options", [{}, {"root": 5}, {"root": "r", "max_bytes": "1 GB"}])
def test_options_that_a_store_cannot_take_are_refused_by_name(options: dict[str, Any]) -> None:
    given = {"store": "kvview_reference.tier:FileStore", "options": options, "weights": "1"}
    settings = parse_options(TierOptions, given)
    with pytest.raises(ConfigError, match="do not fit FileStore"):
        open_tier(settings, HERE)


# --- TIER-10: namespaces ---


@pytest.mark.parametrize("wrong", [{"model": ""}, {"weights": ""}])
def test_tier_10_unknown_weights_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"a tier needs the name|set 'weights' to their revision"):
        Namespace(**{"model": "m", "weights": "1", **wrong})


def test_tier_10_a_folder_of_another_namespace_is_refused_with_both_named(tmp_path: Path) -> None:
    FileStore(HERE, root=str(tmp_path)).close()
    (tmp_path / HERE.digest.hex()).rename(tmp_path / THERE.digest.hex())
    with pytest.raises(NamespaceMismatchError, match=r"TIER-10: .*weights '1' there, '2' here"):
        FileStore(THERE, root=str(tmp_path))


def test_a_namespace_is_read_as_it_was_written() -> None:
    assert Namespace.from_json(HERE.to_json()) == HERE
    assert HERE.digest != THERE.digest
    for text in ("", "[]", "{}", '{"model": 1}'):
        with pytest.raises(ConfigError, match="not the namespace of a tier"):
            Namespace.from_json(text)


# --- seals ---


def test_a_seal_is_of_key_namespace_and_bytes() -> None:
    page = memoryview(bytes(range(200)))
    for checksum in ("xxh3", "crc32"):
        seal = PageSeal(HERE, checksum)
        right = seal.of(b"k", page)
        assert PageSeal.name_of(right) == checksum
        others = [seal.of(b"l", page), seal.of(b"k", page[:-1]), seal.of(b"k", page[1:])]
        others.append(PageSeal(THERE, checksum).of(b"k", page))
        assert right == seal.of(b"k", page)
        assert right not in others
        assert len({*others}) == 4


# --- the store of files ---


def test_half_files_of_a_killed_process_are_removed_while_others_use_the_folder(
    tmp_path: Path,
) -> None:
    first = FileStore(HERE, root=str(tmp_path), max_bytes=1000)
    dead, living = (tmp_path / HERE.digest.hex() / "half" / name for name in ("dead", "living"))
    dead.write_bytes(b"x")
    with living.open("wb") as written:
        fcntl.flock(written, fcntl.LOCK_EX)
        FileStore(HERE, root=str(tmp_path)).close()
    assert (dead.exists(), living.exists()) == (False, True)
    first.close()


def counted(tmp_path: Path) -> tuple[int, int]:
    """The bytes that a store counts when it is opened, and those of its files."""
    store = FileStore(HERE, root=str(tmp_path), max_bytes=100_000)
    used = store.usage().used_bytes
    held = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    store.close()
    assert used is not None
    return used, held


def test_a_count_that_cannot_be_trusted_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(HERE, root=str(tmp_path))
    moved(store, "put", b"a", b"b", b"c")
    store.close()
    used, held = counted(tmp_path)
    assert used == held > 3000
    count = tmp_path / HERE.digest.hex() / "budget"
    right = count.read_bytes()
    for wrong in (b"", b"x", right[:-1], right[:5] + b"\xff" + right[6:]):
        count.write_bytes(wrong)
        assert counted(tmp_path) == (held, held)
    left_open = FileStore(HERE, root=str(tmp_path))
    moved(left_open, "put", b"d")
    (next(iter((tmp_path / HERE.digest.hex()).glob("??/*")))).unlink()
    os.close(left_open._budget._alive)  # as if it were killed
    used, held = counted(tmp_path)
    assert used > held, "the same start of the machine: it is believed"
    left_open = FileStore(HERE, root=str(tmp_path))
    os.close(left_open._budget._alive)
    boot = "kvview_reference.tier.folder.file_budget._boot_of_machine"
    monkeypatch.setattr(boot, lambda: b"after a power cut"[:16])
    used, held = counted(tmp_path)
    assert used == held


def test_of_many_files_the_oldest_of_some_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvview_reference.tier.folder.eviction._LOOKED_AT", 40)
    store = FileStore(HERE, root=str(tmp_path), max_bytes=400_000)
    keys = [f"key {number}".encode() for number in range(600)]
    for key in keys:
        assert moved(store, "put", key) == [True]
    kept = [number for number, key in enumerate(keys) if store.has(key)]
    assert len(kept) > 300
    oldest = sum(number < 150 for number in kept)
    newest = sum(number >= 450 for number in kept)
    assert newest == 150
    assert oldest < 60
    store.close()


def test_an_exception_of_an_authors_call_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(FolderStore):
        def write(self, key: bytes, page: memoryview, /) -> bool:
            raise TypeError("an author's mistake")

    store = Wrong(HERE, str(tmp_path))
    assert moved(store, "put", b"a", b"b") == [False, False]
    store.close()
    assert caplog.text.count("Wrong.write: TypeError: an author's mistake") == 1


def test_a_method_without_a_result_has_failed_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class ForgetsToReturn(FolderStore):
        def write(self, key: bytes, page: memoryview, /) -> bool:  # type: ignore[return]
            super().write(key, page)

    store = ForgetsToReturn(HERE, str(tmp_path))
    assert moved(store, "put", b"a") == [False]
    store.close()
    assert "ForgetsToReturn.write: TypeError: write returned None, expected True" in caplog.text


def test_a_removal_that_raises_ends_no_thread(tmp_path: Path) -> None:
    def raises(key: bytes, number: int) -> None:
        raise ValueError(number)

    store = FolderStore(HERE, str(tmp_path), threads=1)
    store.remove_later([b"a"], partial(raises, number=1))  # a function without a name
    assert moved(store, "put", b"a") == [True]
    store.close()
