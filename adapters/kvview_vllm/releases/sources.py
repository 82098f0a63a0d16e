"""The Python sources of vLLM releases, which are unpacked from their wheels and kept in a cache.

The ``.py`` files of a wheel are enough to import and run vLLM's scheduler on a CPU. They are about
10 MB of a 300 MB wheel, so only these parts of the wheel are fetched. If the index cannot serve
parts of a file, or requires credentials that only pip has, pip downloads the wheel. The index is
the package index of the user's pip configuration. The files are kept in ``$KVVIEW_CACHE`` (else
``~/.cache/kvview``), in one folder per release, ready for PYTHONPATH.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from kvview import KVViewError
from kvview_vllm.releases.compat.versions import LATEST_OF_MINORS, RELEASES, TESTED, number

_PLATFORMS = ("manylinux1", *(f"manylinux_2_{minor}" for minor in (24, 28, 31, 35)))
_WINDOW = 4 << 20
_TIMEOUT_S = 60


class SourcesError(KVViewError):
    """The sources of a release could not be fetched; the message is one line."""


class VLLMReleases:
    """The releases on the package index, for ``kvview check --vllm``."""

    def resolve(self, names: Sequence[str]) -> list[str]:
        """Return the releases that names such as "0.33", "0.33.0" and "all" match."""
        return resolve_all(names)

    def fetch(self, release: str, on_progress: Callable[[str], None]) -> Path:
        """Return the folder of a release's sources, which are fetched the first time."""
        return sources(release, on_progress)

    def environment(self) -> Mapping[str, str]:
        """Return environment variables that disable network access and logs of missing features."""
        return {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


def resolve(name: str) -> tuple[str, ...]:
    """Return the releases that a name such as "0.33", "0.33.0" or "all" stands for.

    A complete version that is not tested is returned unchanged, because only the package index
    knows whether it exists.

    Raises:
        SourcesError: No release has this name.
    """
    if name == "all":
        return LATEST_OF_MINORS
    if name in RELEASES:
        return (name,)
    if found := [one for one in LATEST_OF_MINORS if one.rpartition(".")[0] == name]:
        return (found[0],)
    if number(name) is not None and name.count(".") >= 2:
        return (name,)
    raise SourcesError(
        f"vllm {name} is not a known release; use one of {TESTED}, such as 0.33 or 0.33.0, "
        f"'all', or the complete version of another release"
    )


def resolve_all(names: Sequence[str]) -> list[str]:
    """Return the releases that names stand for, each once, in the order of the names.

    Raises:
        SourcesError: No release has one of the names.
    """
    return list(dict.fromkeys(release for name in names for release in resolve(name)))


def cache_folder() -> Path:
    """Return the folder in which the sources are kept."""
    return (
        Path(os.environ.get("KVVIEW_CACHE") or Path.home() / ".cache" / "kvview") / "vllm-sources"
    )


def sources(release: str, on_progress: Callable[[str], None] = lambda text: None) -> Path:
    """Return the folder with the sources of a release, which are fetched the first time.

    Besides the ``vllm`` package the folder has a ``vllm-<release>+cpu.dist-info``, because vLLM
    recognises its CPU build by that local version.

    Args:
        release: A version on the package index, such as "0.33.0".
        on_progress: Called with a description of each action, such as a download, if any is needed.

    Returns:
        A folder for PYTHONPATH.

    Raises:
        SourcesError: The release does not exist, or the network or disk space is missing.
    """
    folder = cache_folder() / release
    if folder.is_dir():
        return folder
    on_progress("querying pip for the URL of its wheel")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        url = _wheel_url(release)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            unpacked = Path(scratch, release)
            _fetch(release, url, unpacked, on_progress)
            metadata = unpacked / f"vllm-{release}+cpu.dist-info" / "METADATA"
            metadata.parent.mkdir()
            metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")
            try:
                unpacked.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was first
                    raise
    except OSError as error:
        raise SourcesError(f"vllm {release}: the sources cannot be stored: {error}") from error
    return folder


def _fetch(release: str, url: str, folder: Path, on_progress: Callable[[str], None]) -> None:
    on_progress("fetching its sources")
    try:
        with io.BufferedReader(_RemoteFile(url), _WINDOW) as file:
            _unpack(file, folder)
        return
    except (OSError, HTTPException, BadZipFile):
        on_progress("downloading its whole wheel: the index serves no parts of it")
    with tempfile.TemporaryDirectory(dir=folder.parent) as target:
        _pip(release, "download", f"--dest={target}")
        wheel = next(Path(target).glob("*.whl"))
        try:
            _unpack(wheel, folder)
        except BadZipFile as error:
            raise SourcesError(f"vllm {release}: cannot unpack the wheel: {error}") from error


def _wheel_url(release: str) -> str:
    with tempfile.TemporaryDirectory() as target:
        report = _pip(
            *(release, "install", "--dry-run", "--ignore-installed", "--report=-"),
            # Otherwise pip downloads the wheel to read its metadata; before 23.3 it always does.
            *("--use-feature=fast-deps", f"--target={target}"),
        )
    return str(json.loads(report)["install"][0]["download_info"]["url"])


def _pip(release: str, command: str, *options: str) -> str:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", command, f"vllm=={release}", *options),
            *("--no-deps", "--only-binary=:all:", "--quiet", "--python-version=3.12"),
            *(f"--platform={platform}_x86_64" for platform in _PLATFORMS),
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        return done.stdout
    if "No module named pip" in done.stderr:
        raise SourcesError(
            f"vllm {release}: fetching it needs pip, which {sys.executable} does not have: "
            "run 'python -m ensurepip' there"
        )
    if "(from versions: none)" in done.stderr:
        raise SourcesError(f"vllm {release}: no package index responded")
    if "(from versions: " in done.stderr:
        raise SourcesError(f"vllm {release}: the package index has no such release")
    raise SourcesError(f"vllm {release}: pip failed: {' '.join(done.stderr.split()[-30:])}")


def _unpack(wheel: Any, folder: Path) -> None:
    with ZipFile(wheel) as archive:
        # In the order of the file, so that a buffer that is read ahead serves neighbours.
        for member in sorted(archive.infolist(), key=lambda member: int(member.header_offset)):
            if member.filename.startswith("vllm/") and member.filename.endswith(".py"):
                archive.extract(member, folder)


class _RemoteFile(io.RawIOBase):
    """A file on a server, read in parts.

    Raises:
        OSError: The server does not respond, or cannot send parts of a file.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url, self._at = url, 0
        with self._request(0, 0) as response:
            self._size = int(response.headers["Content-Range"].rpartition("/")[2])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self._size - self._at)
        if size <= 0:
            return 0
        with self._request(self._at, self._at + size - 1) as response:
            data = response.read()
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _request(self, first: int, last: int) -> Any:
        request = urllib.request.Request(self._url, headers={"Range": f"bytes={first}-{last}"})
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
        if response.status != 206:
            response.close()
            raise OSError("the server only sends complete files")
        return response
