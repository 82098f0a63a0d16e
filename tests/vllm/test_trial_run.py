"""The trial run of a connector: it sees changed calls, and leaves nothing behind.

``drifts.toml`` has more changes. The trial run checks SCHED-1, SCHED-2 and SCHED-3.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kvview import UnsupportedEngineError
from kvview_vllm.connector.connector import KVViewConnector
from kvview_vllm.connector.dry_run import trial_run
from kvview_vllm.doctor import diagnose
from kvview_vllm.releases import installed
from tests.vllm.server import Server

UTILS = "vllm.v1.core.kv_cache_utils"
Patch = tuple[Any, str, Any]


@pytest.fixture(autouse=True)
def again() -> Iterator[None]:
    """Let each test try the connector again, because a process tries it once."""
    trial_run.try_connector.cache_clear()
    yield
    trial_run.try_connector.cache_clear()


def never_finished() -> Patch:
    return KVViewConnector, "request_finished_all_groups", lambda *_: (False, None)


def never_freed() -> Patch:
    manager = import_module("vllm.v1.core.kv_cache_manager").KVCacheManager
    return manager, "free", lambda *_: None


def reset_without_the_connector() -> Patch:
    if not installed().connector.connector_reset:
        pytest.skip("this release resets no connector")
    return KVViewConnector, "reset_cache", lambda self: True


def adapter_fails() -> Patch:
    def fail(*_: Any) -> Any:
        raise RuntimeError("two\nlines")

    return KVViewConnector, "build_connector_meta", fail


def test_the_installed_release_makes_the_expected_calls() -> None:
    # SCHED-1, SCHED-2, SCHED-3
    assert trial_run.try_connector(KVViewConnector) == ""


@pytest.mark.parametrize(
    ("drift", "fact"),
    [
        (never_finished, r"last calls of requests: \{'a': 'step'\}; expected \{'a': 'finished'\}"),
        (never_freed, r"expected "),
        (reset_without_the_connector, r"a reset of the caches: \(True, 0\); expected \(True, 1\)"),
        (adapter_fails, r"a trial run fails: RuntimeError: two lines at test_trial_run"),
    ],
)
def test_a_changed_call_is_refused_in_one_line(
    drift: Callable[[], Patch], fact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connector is bound and served in no engine with a drift."""
    monkeypatch.setattr(*drift())
    with pytest.raises(UnsupportedEngineError, match=fact) as caught:
        Server()
    assert "\n" not in str(caught.value)


def test_a_server_whose_vllm_cannot_be_tried_is_not_stopped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def needs_more(*args: Any) -> None:
        raise TypeError("missing 1 required argument: 'drifted'")

    monkeypatch.setattr(trial_run, "make_scheduler", needs_more)
    with caplog.at_level(logging.WARNING):
        server = Server()
    assert "so KVViewConnector is used untried" in caplog.text
    for name in ("first", "again"):
        server.ask(name)
        server.run()
        server.evict()
    assert server.hits["again"] > 0
    seam = next(seam for seam in diagnose().seams if seam.seam == "connector")
    assert not seam.fits
    assert "no request could be served in a trial run: TypeError: missing 1 required" in seam.detail


def environment() -> dict[str, Any]:
    gc.collect()
    state = import_module("vllm.distributed.kv_transfer.kv_transfer_state")
    return {
        "threads": set(threading.enumerate()),
        "environment": dict(os.environ),
        "files": sorted(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else [],
        "hashes": dict(vars(import_module(UTILS))),
        "connectors": len(KVViewConnector._built),
        "connector of the process": state._KV_CONNECTOR_AGENT,
    }


def test_a_trial_run_leaves_nothing_behind() -> None:
    trial_run.try_connector(KVViewConnector)  # imports vLLM's modules
    before = environment()
    trial_run.try_connector.__wrapped__(KVViewConnector)
    assert environment() == before
