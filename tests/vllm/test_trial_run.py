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

import engine  # type: ignore[import-not-found]
from kvview import UnsupportedEngineError
from kvview_vllm.connector.connector import KVViewConnector
from kvview_vllm.connector.dry_run import trial_run
from kvview_vllm.doctor import diagnose
from kvview_vllm.releases import installed
from kvview_vllm.releases.build.samples import BLOCK_SIZE

UTILS = "vllm.v1.core.kv_cache_utils"
Patch = tuple[Any, str, Any]


@pytest.fixture(autouse=True)
def again() -> Iterator[None]:
    """Let each test try the connector again, because a process tries it once."""
    trial_run.try_connector.cache_clear()
    yield
    trial_run.try_connector.cache_clear()


def wrapped(owner: Any, name: str, change: Callable[..., Any]) -> Patch:
    """Return a method that ``change`` wraps, with the arguments of the call."""
    method = getattr(owner, name)

    def drifted(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(self, lambda *given: method(self, *given, **kwargs), *args)

    return owner, name, drifted


def load_in_blocks() -> Patch:
    return wrapped(
        KVViewConnector,
        "update_state_after_alloc",
        lambda self, call, request, blocks, number: call(request, blocks, number // BLOCK_SIZE),
    )


def never_finished() -> Patch:
    return KVViewConnector, "request_finished_all_groups", lambda *_: (False, None)


def never_freed() -> Patch:
    manager = import_module("vllm.v1.core.kv_cache_manager").KVCacheManager
    return manager, "free", lambda *_: None


def reset_with_a_reason() -> Patch:
    if not installed().connector.connector_reset:
        pytest.skip("this release resets no connector")
    return KVViewConnector, "reset_cache", lambda self, reason: True


def reset_without_the_connector() -> Patch:
    if not installed().connector.connector_reset:
        pytest.skip("this release resets no connector")
    return KVViewConnector, "reset_cache", lambda self: True


def adapter_fails() -> Patch:
    def fail(*_: Any) -> Any:
        raise RuntimeError("two\nlines")

    return KVViewConnector, "build_connector_meta", fail


def save_with_an_argument() -> Patch:
    return KVViewConnector, "wait_for_save", lambda self, layer: None


def test_the_installed_release_makes_the_expected_calls() -> None:
    # SCHED-1, SCHED-2, SCHED-3
    assert trial_run.try_connector(KVViewConnector) == ""


@pytest.mark.parametrize(
    ("drift", "fact"),
    [
        (load_in_blocks, r"loaded tokens of request [bc]: \(\d+, [123]\); expected \(\d+, \d\d\)"),
        (never_finished, r"last calls of requests: \{'a': 'step'\}; expected \{'a': 'finished'\}"),
        (never_freed, r"expected "),
        (reset_with_a_reason, r"TypeError: .*missing 1 required positional argument: 'reason'"),
        (reset_without_the_connector, r"a reset of the caches: \(True, 0\); expected \(True, 1\)"),
        (save_with_an_argument, r"TypeError: .*missing 1 required positional argument: 'layer'"),
        (adapter_fails, r"a trial run fails: RuntimeError: two lines at test_trial_run"),
    ],
)
def test_a_changed_call_is_refused_in_one_line(
    drift: Callable[[], Patch], fact: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A connector is bound and served in no engine with a drift."""
    monkeypatch.setattr(*drift())
    with pytest.raises(UnsupportedEngineError, match=fact) as caught:
        engine.Engine(tmp_path, engine.connector_config())
    assert "\n" not in str(caught.value)


def test_a_server_whose_vllm_cannot_be_tried_is_not_stopped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def needs_more(*args: Any) -> None:
        raise TypeError("missing 1 required argument: 'drifted'")

    monkeypatch.setattr(trial_run, "make_scheduler", needs_more)
    with caplog.at_level(logging.WARNING):
        served = engine.Engine(tmp_path, engine.connector_config())
    assert "so KVViewConnector is used untried" in caplog.text
    for name in ("first", "again"):
        served.add(name, engine.TOKENS)
        served.run()
        served.scheduler.reset_prefix_cache()
        served.scribble()
    assert served.hits["again"] > 0
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
