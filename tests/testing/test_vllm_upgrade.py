"""vLLM's releases without vLLM: the fetch of their sources."""

from __future__ import annotations

import functools
import http.server
import re
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvview_vllm.releases.compat.versions import LATEST_OF_MINORS, NEWEST_TESTED
from kvview_vllm.releases.sources import SourcesError, resolve, resolve_all, sources

RELEASE = "0.99.1"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a wheel, which pip is told to look into; and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    info = f"vllm-{RELEASE}.dist-info"
    with zipfile.ZipFile(folder / f"vllm-{RELEASE}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("vllm/__init__.py", "x = 1\n")
        wheel.writestr("vllm/big.so", b"\0" * 9_000_000)
        wheel.writestr("vllm/v1/request.py", "y = 2\n")
        wheel.writestr("other/__init__.py", "")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: vllm\nVersion: {RELEASE}\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("KVVIEW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    return folder


class _Server(http.server.SimpleHTTPRequestHandler):
    """Serves parts of files, as package indexes do; counts the bytes."""

    sent = 0

    def do_GET(self) -> None:
        wanted = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None:
            return super().do_GET()
        first, last = int(wanted[1]), int(wanted[2])
        whole = Path(self.translate_path(self.path)).read_bytes()
        part = whole[first : last + 1]
        type(self).sent += len(part)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(whole)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)
        return None

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server(index: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Server]]:
    kind = type("Counting", (_Server,), {"sent": 0})
    handler = functools.partial(kind, directory=str(index))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        monkeypatch.setenv("PIP_FIND_LINKS", f"http://127.0.0.1:{serving.server_port}/")
        yield kind
        serving.shutdown()


def files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


FETCHED = {"vllm/__init__.py", "vllm/v1/request.py", f"vllm-{RELEASE}+cpu.dist-info/METADATA"}


def test_parts_of_the_wheel_are_fetched_once(server: type[_Server]) -> None:
    told: list[str] = []
    folder = sources(RELEASE, told.append)
    assert files(folder) == FETCHED
    assert (
        f"Version: {RELEASE}+cpu" in (folder / f"vllm-{RELEASE}+cpu.dist-info/METADATA").read_text()
    )
    assert 0 < server.sent < 20_000_000
    assert told[-1] == "fetching its sources"
    told.clear()
    assert sources(RELEASE, told.append) == folder
    assert not told, "it was there"


def test_the_whole_wheel_where_there_are_no_parts(index: Path) -> None:
    told: list[str] = []
    assert files(sources(RELEASE, told.append)) == FETCHED
    assert told[-1].startswith("downloading its whole wheel")
    assert not list((index.parent / "cache").rglob("*.whl"))


@pytest.mark.parametrize(
    ("links", "release", "told"),
    [
        (None, "0.99.2", "the package index has no such release"),
        ("/nowhere", RELEASE, "no package index responded"),
    ],
)
def test_the_error_names_the_reason(
    index: Path, monkeypatch: pytest.MonkeyPatch, links: str | None, release: str, told: str
) -> None:
    if links is not None:
        monkeypatch.setenv("PIP_FIND_LINKS", links)
    with pytest.raises(SourcesError, match=f"vllm {release}: {told}"):
        sources(release)
    assert not (index.parent / "cache/vllm-sources" / release).exists()


def test_a_cache_that_cannot_be_written(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVVIEW_CACHE", str(next(index.glob("*.whl"))))
    with pytest.raises(SourcesError, match=f"vllm {RELEASE}: the sources cannot be stored"):
        sources(RELEASE)


def test_names_of_releases() -> None:
    assert resolve("0.27") == ("0.27.1",)
    assert resolve("0.27.0") == ("0.27.0",)
    assert resolve("0.99.1") == ("0.99.1",)
    assert resolve("all") == LATEST_OF_MINORS
    assert resolve_all(["0.33", NEWEST_TESTED, "0.11"]) == [NEWEST_TESTED, "0.11.2"]
    for name in ("", "0", "0.1", "0.99", "newest", "33"):
        with pytest.raises(SourcesError, match="is not a known release"):
            resolve(name)
