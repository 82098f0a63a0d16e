"""The object store: the kit on a folder and on memory, servers that fail, and no secrets."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import settings

from kvview import ConfigError
from kvview.testing import TierConformance
from kvview.tier import GuardedTier
from tests.cases import read_cases
from tests.tier.jobs import HERE, looked_up, moved

pytest.importorskip("obstore")
pytest.importorskip("xxhash")

from kvview_reference.tier import ObjectStore

RUNS = {"killed": "1", "living": "2", "shared": ""}
SECRET = "wJalrXUtnFEMIabcdefSECRET"


class TestMemory(TierConformance):
    store = ObjectStore
    options = {"url": "memory:///"}
    settings = settings(max_examples=10, stateful_step_count=20)


class TestFolder(TestMemory):
    options = {"url": "file://{tmp}"}
    lacks = ("kill",)  # obstore writes to a file of its own first, which a kill leaves behind


@pytest.mark.parametrize(
    ("_", "options", "said"), read_cases(Path(__file__).with_name("object_options.txt"))
)
def test_a_store_that_cannot_start_shows_no_secret(_: str, options: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ObjectStore(HERE, **json.loads(options.replace("SECRET", SECRET)))
    assert said in str(raised.value)
    assert SECRET not in str(raised.value)


def test_an_object_that_may_not_be_removed_is_replaced(tmp_path: Path) -> None:
    """As with credentials that may read and write, and no more."""

    class CannotDelete(ObjectStore):
        def _drop(self, keys: Any) -> None:
            pass

    store = CannotDelete(HERE, url=f"file://{tmp_path}")
    moved(store, "put", b"a")
    (path,) = tmp_path.rglob(b"a".hex())
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert moved(store, "get", b"a") == [False]
    assert looked_up(store, b"a") == [False]
    assert moved(store, "put", b"a") == [True]
    assert moved(store, "get", b"a") == [True]
    store.close()


# --- servers that fail ---


class FailingServer(ThreadingHTTPServer):
    """Responds to every request alike, and repeats its credentials as real servers do."""

    daemon_threads = True

    def __init__(self, fault: str) -> None:
        self.fault = fault
        super().__init__(("127.0.0.1", 0), _Answer)
        Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that did not wait."""


class _Answer(BaseHTTPRequestHandler):
    def _answer(self) -> None:
        fault = getattr(self.server, "fault", "")
        self.rfile.read(int(self.headers.get("content-length", 0)))
        if fault == "slow":
            time.sleep(3.0)
        if fault == "hangs up":
            self.close_connection = True
            return
        body = f"<Error><Code>No</Code><Sent>{self.headers.get('authorization')}</Sent></Error>"
        self.send_response(int(fault) if fault.isdigit() else 200)
        self.send_header("content-length", str(10_000 if fault == "truncated" else len(body)))
        self.send_header("last-modified", "Sun, 22 Nov 2026 11:00:00 GMT")
        self.send_header("etag", '"1"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body.encode())
        self.close_connection = True

    do_GET = do_PUT = do_HEAD = do_DELETE = _answer

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", f"AKIA{SECRET}")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", f"token{SECRET}")


@pytest.mark.parametrize(
    "fault", ["403", "401", "404", "500", "503", "301", "slow", "hangs up", "truncated", "nonsense"]
)
@pytest.mark.usefixtures("credentials")
def test_a_server_that_fails_gives_misses_and_no_secret(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = FailingServer(fault)
    endpoint = f"http://127.0.0.1:{server.server_port}"
    store = ObjectStore(
        HERE, url="s3://b/p", endpoint=endpoint, region="us-east-1", timeout=0.5, retries=0
    )
    guard = GuardedTier(store, HERE, deadline=20.0)
    says_yes = fault in ("truncated", "nonsense")
    assert moved(guard, "put", b"a", b"b") == [says_yes, says_yes]
    assert moved(guard, "get", b"a", b"b") == [False, False]
    assert looked_up(guard, b"a", b"b") == [False, False]
    guard.close()
    shown = caplog.text + repr(store) + repr(store._client) + str(vars(store))
    assert SECRET not in shown
    assert fault == "nonsense" or "fails: " in caplog.text
    server.shutdown()
    server.server_close()


def test_the_objects_of_a_run_end_with_it_or_expire(tmp_path: Path) -> None:
    def opened(run: str) -> ObjectStore:
        one_by_one = 1  # thread, so that each task waits for the task before it
        namespace, url = replace(HERE, run=run), f"file://{tmp_path}"
        return ObjectStore(namespace, url=url, threads=one_by_one, run_expires=100.0)

    def objects() -> set[str]:
        return {path.parent.name for path in tmp_path.rglob(b"a".hex())}

    stores = {name: opened(run) for name, run in RUNS.items()}
    prefixes = {name: store.namespace.digest.hex() for name, store in stores.items()}
    assert all(moved(store, "put", b"a") == [True] for store in stores.values())
    assert objects() == {*prefixes.values()}
    for name in ("killed", "shared"):
        os.utime(tmp_path / prefixes[name] / "namespace.json", (1, 1))
    later = opened("later")
    moved(later, "put", b"a")
    assert prefixes["killed"] not in objects()
    later.close()
    assert objects() == {prefixes["living"], prefixes["shared"]}
    stores["living"].close()
    assert objects() == {prefixes["shared"]}
