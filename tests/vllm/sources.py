"""The Python sources of vLLM releases, unpacked from their wheels.

The `.py` files of a wheel are enough to import and run vLLM's scheduler on a
CPU: some 10 MB of a 300 MB wheel, which is why they are read out of it in
place. They land in `$KVVIEW_CACHE` (else `~/.cache/kvview`), one folder a
release, ready for PYTHONPATH:

    PYTHONPATH=$(python tests/vllm/sources.py 0.33.0) python ...
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

# Without a code: it is untyped, and outside the vLLM lane it is not installed.
from remotezip import PartialBuffer, RemoteFetcher, RemoteZip, RemoteZipError  # type: ignore

RELEASES = (
    *("0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.13.0", "0.14.0", "0.14.1"),
    *("0.15.0", "0.15.1", "0.16.0", "0.17.0", "0.17.1", "0.18.0", "0.18.1"),
    *("0.19.0", "0.19.1", "0.20.0", "0.20.1", "0.20.2", "0.21.0", "0.22.0"),
    *("0.22.1", "0.23.0", "0.24.0", "0.25.0", "0.25.1", "0.26.0", "0.27.0"),
    *("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
)
"""Every release from 0.11.0 to 0.33.0, oldest first."""

LATEST_OF_MINORS = tuple({release.rpartition(".")[0]: release for release in RELEASES}.values())
"""The last patch release of each minor, oldest first."""

_PLATFORMS = ("manylinux1", *(f"manylinux_2_{minor}" for minor in (24, 28, 31, 35)))
_WINDOW = 4 << 20


class SourcesError(Exception):
    """The sources of a release could not be had; the message is one line."""


def sources(release: str) -> Path:
    """Gives the folder with the sources of a release, fetching it the first time.

    Beside the `vllm` package it holds a `vllm-<release>+cpu.dist-info`: that
    local version is how vLLM recognises a CPU build of itself.

    Args:
        release: A version on the package index, such as "0.33.0".

    Returns:
        A folder to put on PYTHONPATH.

    Raises:
        SourcesError: There is no such release, or no network.
    """
    cache = Path(os.environ.get("KVVIEW_CACHE") or Path.home() / ".cache" / "kvview")
    folder = cache / "vllm-sources" / release
    if folder.is_dir():
        return folder
    url = _wheel_url(release)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        unpacked = Path(scratch, release)
        try:
            _unpack(url, unpacked)
        except (OSError, RemoteZipError, BadZipFile) as error:
            raise SourcesError(f"vllm {release}: cannot unpack the wheel: {error}") from error
        metadata = unpacked / f"vllm-{release}+cpu.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")
        try:
            unpacked.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first
                raise
    return folder


def _wheel_url(release: str) -> str:
    with tempfile.TemporaryDirectory() as target:
        pip = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", f"vllm=={release}"),
                *("--dry-run", "--no-deps", "--ignore-installed", "--only-binary=:all:"),
                *("--quiet", "--report=-", f"--target={target}", "--python-version=3.12"),
                *(f"--platform={platform}_x86_64" for platform in _PLATFORMS),
                # Else pip downloads the wheel to read its metadata; before 23.3 it does anyway.
                "--use-feature=fast-deps",
            ],
            capture_output=True,
            text=True,
        )
    if pip.returncode:
        if "(from versions: none)" in pip.stderr:
            raise SourcesError(f"vllm {release}: no package index answers")
        if "(from versions: " in pip.stderr:
            raise SourcesError(f"vllm {release}: no such release")
        raise SourcesError(f"vllm {release}: pip failed: {' '.join(pip.stderr.split()[-30:])}")
    return str(json.loads(pip.stdout)["install"][0]["download_info"]["url"])


def _unpack(url: str, folder: Path) -> None:
    with RemoteZip(url, initial_buffer_size=_WINDOW, fetcher=_ReadAhead) as wheel:
        for member in sorted(wheel.infolist(), key=lambda member: int(member.header_offset)):
            if member.filename.startswith("vllm/") and member.filename.endswith(".py"):
                wheel.extract(member, folder)


class _ReadAhead:
    """Answers the many small reads of neighbouring members from few large ones."""

    def __init__(self, url: str, session: Any, **options: Any) -> None:
        self._fetch = RemoteFetcher(url, session, **options).fetch
        self._start = 0
        self._window = b""

    def fetch(self, data_range: tuple[int, int | None], stream: bool = False) -> Any:
        first, last = data_range
        if last is None:
            return self._fetch(data_range, stream)
        if not self._start <= first <= last < self._start + len(self._window):
            self._window = self._fetch((first, max(last, first + _WINDOW - 1))).read()
            self._start = first
        size = last - first + 1
        at = first - self._start
        return PartialBuffer(io.BytesIO(self._window[at : at + size]), first, size, stream)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the folder of each release asked for, one a line.

    Args:
        argv: The command line's arguments; those of the process if None.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(
        description="Fetch vLLM's Python sources and print where they are."
    )
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help="such as 0.33.0")
    parser.add_argument(
        "--all-minors", action="store_true", help="the latest patch of each minor release"
    )
    arguments = parser.parse_args(argv)
    releases = [*arguments.releases, *(LATEST_OF_MINORS if arguments.all_minors else ())]
    if not releases:
        parser.error("name a release, or say --all-minors")
    try:
        for release in releases:
            print(sources(release), flush=True)
    except SourcesError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
