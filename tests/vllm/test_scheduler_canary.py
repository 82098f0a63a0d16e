"""The dry run of a scheduler: it sees changed facts, and leaves nothing behind."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import engine  # type: ignore[import-not-found]  # noqa: F401 - before the imports that need it
from kvview import UnsupportedEngineError
from kvview_vllm.connector import scheduler_canary
from kvview_vllm.connector.connector import KVViewConnector
from kvview_vllm.doctor import diagnose
from kvview_vllm.releases.samples import BLOCK_SIZE

play: Any = scheduler_canary.check_scheduler_steps.__wrapped__  # else once in a process
UTILS = "vllm.v1.core.kv_cache_utils"


def wrapped(owner: Any, name: str, change: Callable[..., Any]) -> tuple[Any, str, Any]:
    """Return a method that ``change`` wraps, with the arguments of the call."""
    method = getattr(owner, name)

    def drifted(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(self, lambda *given: method(self, *given, **kwargs), *args)

    return owner, name, drifted


def scheduler() -> Any:
    return import_module("vllm.v1.core.sched.scheduler").Scheduler


def load_in_blocks() -> tuple[Any, str, Any]:
    return wrapped(
        KVViewConnector,
        "update_state_after_alloc",
        lambda self, call, request, blocks, number: call(request, blocks, number // BLOCK_SIZE),
    )


def never_finished() -> tuple[Any, str, Any]:
    return KVViewConnector, "request_finished_all_groups", lambda *_: (False, None)


def never_freed() -> tuple[Any, str, Any]:
    manager = import_module("vllm.v1.core.kv_cache_manager").KVCacheManager
    return manager, "free", lambda *_: None


def freed_in_reverse() -> tuple[Any, str, Any]:
    queue = import_module("vllm.v1.core.kv_cache_utils").FreeKVCacheBlockQueue
    return wrapped(queue, "append_n", lambda self, call, blocks: call([*blocks][::-1]))


def adapter_fails() -> tuple[Any, str, Any]:
    def fail(*_: Any) -> Any:
        raise RuntimeError("two\nlines")

    return KVViewConnector, "build_connector_meta", fail


def test_the_installed_release_has_the_expected_facts() -> None:
    # SCHED-1, SCHED-2, SCHED-3
    assert play(KVViewConnector) == ""


@pytest.mark.parametrize(
    ("drift", "fact"),
    [
        (load_in_blocks, r"[13] to load'; expected .* (16|32|48) to load'"),
        (never_finished, r"calls that did not come: .*FINISHED after"),
        (freed_in_reverse, r"hashed blocks in the order in which they were freed: "),
        (never_freed, r"found request c: "),
        (adapter_fails, r"steps of a scheduler fails: RuntimeError: two lines at test_sched"),
    ],
)
def test_a_changed_fact_is_refused_in_one_line(
    drift: Callable[[], tuple[Any, str, Any]], fact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``drifts.toml`` has more changed facts."""
    monkeypatch.setattr(*drift())
    with pytest.raises(UnsupportedEngineError, match=fact) as caught:
        play(KVViewConnector)
    assert "\n" not in str(caught.value)


def test_a_scheduler_that_cannot_run_dry_is_used_unchecked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def needs_more(self: Any, *args: Any, **kwargs: Any) -> None:
        raise TypeError("missing 1 required argument: 'drifted'")

    monkeypatch.setattr(scheduler(), "__init__", needs_more)
    scheduler_canary.check_scheduler_steps.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            seam = next(seam for seam in diagnose().seams if seam.seam == "connector")
        assert "missing 1 required argument: 'drifted'" in play(KVViewConnector)
    finally:
        scheduler_canary.check_scheduler_steps.cache_clear()
    assert not seam.fits
    assert "no request could be served in a trial run" in seam.detail
    assert "so KVViewConnector is used unchecked" in caplog.text


def environment() -> dict[str, Any]:
    gc.collect()
    return {
        "threads": set(threading.enumerate()),
        "environment": dict(os.environ),
        "files": sorted(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else [],
        "hashes": dict(vars(import_module(UTILS))),
        "connectors": len(KVViewConnector._built),
    }


def test_a_dry_run_leaves_nothing_behind() -> None:
    play(KVViewConnector)  # imports vLLM's modules
    before = environment()
    play(KVViewConnector)
    assert environment() == before
