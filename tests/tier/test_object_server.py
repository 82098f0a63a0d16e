"""The object store on an S3-compatible server that runs here; see ``requirements-server.txt``."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from kvview.testing import run_checks

if find_spec("moto") is None or find_spec("flask_cors") is None:
    pytest.skip("needs an S3 server: requirements-server.txt", allow_module_level=True)
pytest.importorskip("obstore")
pytest.importorskip("xxhash")

from kvview_reference.tier import ObjectStore


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    silent = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=silent, stderr=silent)
    url = f"http://127.0.0.1:{port}"
    try:
        _make_bucket(f"{url}/tier")
        yield url
    finally:
        process.terminate()
        process.wait()


def _make_bucket(url: str) -> None:
    """On a server that has just been started."""
    for _ in range(300):
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="PUT")).close()
            return
        except urllib.error.HTTPError:
            raise
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the server does not start")


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def test_the_kit_on_a_server(server: str) -> None:
    options = {"url": "s3://tier{tmp}", "endpoint": server, "region": "us-east-1"}
    chosen = ("TIER-2", "TIER-4", "TIER-6", "TIER-7", "TIER-10", "TIER-11", "check_tier_9")
    report = run_checks(ObjectStore, options=options, select=chosen)
    assert report.is_clean, [str(result.failure) for result in report.failures]
    assert report.counts["passed"] > 5
