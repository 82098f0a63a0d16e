"""vLLM's releases without vLLM: the fetch of their sources, and what changed between two."""

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

from kvview import ConfigError
from kvview_vllm.comparison.changes import changes
from kvview_vllm.comparison.surfaces import BASE, WATCHED
from kvview_vllm.releases.sources import SourcesError, resolve, resolve_all, sources
from kvview_vllm.releases.versions import LATEST_OF_MINORS, NEWEST_TESTED

# --- the fetch: real pip, a real server, a small wheel ---

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
        ("/nowhere", RELEASE, "no package index responds"),
    ],
)
def test_why_it_cannot_be_had(
    index: Path, monkeypatch: pytest.MonkeyPatch, links: str | None, release: str, told: str
) -> None:
    if links is not None:
        monkeypatch.setenv("PIP_FIND_LINKS", links)
    with pytest.raises(SourcesError, match=f"vllm {release}: {told}"):
        sources(release)
    assert not (index.parent / "cache/vllm-sources" / release).exists()


def test_a_cache_that_cannot_be_written(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVVIEW_CACHE", str(next(index.glob("*.whl"))))
    with pytest.raises(SourcesError, match=f"vllm {RELEASE}: its sources cannot be kept"):
        sources(RELEASE)


def test_names_of_releases() -> None:
    assert resolve("0.27") == ("0.27.1",)
    assert resolve("0.27.0") == ("0.27.0",)
    assert resolve("0.99.1") == ("0.99.1",)
    assert resolve("all") == LATEST_OF_MINORS
    assert resolve_all(["0.33", NEWEST_TESTED, "0.11"]) == [NEWEST_TESTED, "0.11.2"]
    for name in ("", "0.1", "0.99", "newest", "33"):
        with pytest.raises(SourcesError, match="no such release is known"):
            resolve(name)


# --- what changed ---

OLD = {
    BASE: """
class KVConnectorBase_V1(ABC):
    def __init__(self, vllm_config, role): self._role = role
    @abstractmethod
    def start(self, context, **kwargs): ...
    def finished(self, request) -> tuple[bool, Optional[dict]]: ...
    def events(self): ...
    def same(self, a, b=None) -> Optional[int]: ...
    def _metadata(self): ...
""",
    "Request": """
class Request:
    def __init__(self, salt: str | None):
        self.cache_salt = salt
        self.hashes: list[int] = []
        self.block_ids = 0
    @property
    def num_tokens(self) -> int: ...
""",
    "BlockPool": """
class BlockPool:
    def touch(self, blocks: tuple[list[int], ...]) -> None: ...
    def evict(self): ...
""",
    "NewRequestData": "class NewRequestData:\n    block_ids: list[int]\n",
}
NEW = {
    BASE: """
class KVConnectorBase_V1(ABC):
    def __init__(self, vllm_config, role, kv_cache_config=None): self._role = role
    @abstractmethod
    def start(self, context, **kwargs): ...
    def finished(self, request, block_ids) -> tuple[bool, dict | None]: ...
    def same(self, a, b=None) -> int | None: ...
    @abstractmethod
    def must(self, one): ...
    def later(self): ...
    def hook(self, x): ...
""",
    "Request": """
class Request:
    def __init__(self, salt: str | None):
        self.cache_salts = salt
        self.hashes: list[bytes] = []
    @property
    def num_tokens(self) -> int: ...
""",
    "BlockPool": "class BlockPool:\n    def touch(self, blocks: list[int]) -> None: ...\n",
    "NewRequestData": "class NewRequestData:\n    block_ids: list[int]\n",
}
CONNECTOR = """
from typing import TYPE_CHECKING
from vllm.moved import Thing
try:
    from vllm.moved import Maybe
except ImportError:
    Maybe = None
if TYPE_CHECKING:
    from vllm.moved import Hint
from {base} import KVConnectorBase_V1
from helper import Half

class Raw(KVConnectorBase_V1):
    def __init__(self, vllm_config, role):
        self.num_tokens = 0
    def start(self, context, **kwargs):
        return self._metadata(), self.num_tokens
    def finished(self, request):
        request.evict, getattr(request, "evict", None)
        return Half().read(request)
    def events(self): ...
    def same(self, a, b=None): ...
    def later(self, needed): ...
"""
HELPER = """
class Half:
    def read(self, request):
        return request.cache_salt, request.hashes, request.block_ids, request.pool.touch([])
"""


def tree(folder: Path, classes: dict[str, str], moved: str) -> Path:
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm/moved.py").write_text(moved)
    for name, text in classes.items():
        file = folder / WATCHED[name]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


@pytest.fixture
def releases(tmp_path: Path) -> tuple[Path, Path]:
    old = tree(tmp_path / "old", OLD, "Thing = Maybe = Hint = 1\n")
    new = tree(tmp_path / "new", NEW, "def f():\n    Thing = 1\n")
    module = WATCHED[BASE].removesuffix(".py").replace("/", ".")
    (tmp_path / "raw.py").write_text(CONNECTOR.replace("{base}", module))
    (tmp_path / "helper.py").write_text(HELPER)
    return old, new


def test_what_changed(tmp_path: Path, releases: tuple[Path, Path]) -> None:
    found = {
        f"{each.owner}.{each.name}": each for each in changes(f"{tmp_path}/raw.py:Raw", *releases)
    }
    told = {name: (each.breaks, each.told) for name, each in found.items()}
    assert told == {
        "vllm.moved.Thing": (True, "removed, but imported"),
        f"{BASE}.__init__": (
            False,
            "(vllm_config, role) is now (vllm_config, role, kv_cache_config=); "
            "the override takes no kv_cache_config",
        ),
        f"{BASE}.finished": (
            True,
            "(request) -> tuple[bool, dict | None] is now "
            "(request, block_ids) -> tuple[bool, dict | None]; the override takes no block_ids",
        ),
        f"{BASE}.must": (True, "now abstract: the class cannot be built without must(one)"),
        f"{BASE}.later": (
            True,
            "new in the base class: now called as (); the override requires needed",
        ),
        f"{BASE}.*": (False, "new optional hooks: hook"),
        f"{BASE}.events": (False, "removed from the base class: vLLM no longer calls the override"),
        f"{BASE}._metadata": (True, "removed"),
        "Request.cache_salt": (True, "removed; new, with a similar name: cache_salts"),
        "Request.hashes": (False, "list[int] is now list[bytes]"),
        "Request.block_ids": (False, "removed"),  # another class has one: look
        "BlockPool.evict": (False, "removed"),  # its use is guarded
    }
    assert found["Request.cache_salt"].where == "helper.py:4"
    assert found[f"{BASE}.must"].where == ""


def test_nothing_changed_between_a_release_and_itself(
    tmp_path: Path, releases: tuple[Path, Path]
) -> None:
    for release in releases:
        assert changes(f"{tmp_path}/raw.py:Raw", release, release) == []


def test_a_kvview_connector_uses_nothing_of_vllm(releases: tuple[Path, Path]) -> None:
    example = Path(__file__).parents[2] / "examples/host_cache.py"
    assert changes(f"{example}:HostCacheConnector", *releases) == []


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("nowhere.py:Raw", "its source was not found"),
        ("no.such.module:Raw", "its source was not found"),
        ("{folder}/raw.py:Roe", "defines no class 'Roe'"),
    ],
)
def test_no_source_is_one_line(
    tmp_path: Path, releases: tuple[Path, Path], target: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        changes(target.format(folder=tmp_path), *releases)
