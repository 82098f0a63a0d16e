"""The view of the real BlockPool: its methods on this release, and the pools that it refuses.

The laws of the pool are in ``test_conformance.py``.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from test_conformance import VLLMPool, block_pool  # type: ignore[import-not-found]

import kvview
import vllm
from kvview import UnsupportedEngineError
from kvview_vllm import view
from kvview_vllm.pool import VLLMBlockPoolView
from kvview_vllm.releases import TESTED, probe_pool

OPTIONAL = {"SupportsGiveBack": "free_prepend"}


@pytest.fixture
def pool() -> Any:
    return VLLMPool(16).pool


@pytest.fixture
def pool_view(pool: Any) -> VLLMBlockPoolView:
    return view(pool, owner="tester")


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, value in vars(kvview).items()
        if name.startswith("Supports")
        and value.__module__ == "kvview.pool.queries"
        and name != "SupportsPinBudget"  # only a guard has a budget
    ],
)
def test_the_view_offers_every_query_that_the_release_allows(
    pool_view: VLLMBlockPoolView, name: str
) -> None:
    # POOL-12: 0.23.0 puts freed blocks at the head; no other release does with hashed blocks.
    is_offered = name not in OPTIONAL or getattr(pool_view.release, OPTIONAL[name])
    assert isinstance(pool_view, getattr(kvview, name)) is is_offered


def test_no_public_name_reaches_a_block_object(pool_view: VLLMBlockPoolView) -> None:
    public = [name for name in dir(pool_view) if not name.startswith("_")]
    values = [getattr(pool_view, name) for name in public]
    assert not any(type(value).__module__.startswith("vllm") for value in values)


def test_a_pool_without_caching_has_a_view() -> None:
    pool = VLLMPool(8, enable_caching=False).pool
    pool_view = view(pool)
    pool_view.touch_blocks([2, 3])
    pool_view.free_blocks([3, 2])
    queue = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert sorted(queue) == list(range(1, 8))
    assert list(pool_view.iter_free_block_ids()) == queue


def test_a_touch_with_an_unknown_signature_is_refused(pool: Any) -> None:
    class Fork(block_pool.BlockPool):  # type: ignore[misc]
        def touch(self, blocks: Any, deadline: float) -> None: ...

    pool.__class__ = Fork
    with pytest.raises(UnsupportedEngineError) as caught:
        view(pool)
    for part in ("pool seam", vllm.__version__, "touch(blocks, deadline)", TESTED):
        assert part in str(caught.value)


def test_an_object_that_is_not_a_pool_is_refused() -> None:
    with pytest.raises(UnsupportedEngineError, match=r"without blocks, .*null_block"):
        view(object())


def test_a_fork_with_its_own_version_string_is_probed(
    pool: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    release = probe_pool(pool)
    monkeypatch.setattr(vllm, "__version__", "0.1.dev1+fork")
    assert view(pool).release == replace(release, version="0.1.dev1+fork")
    assert "outside the tested range" in caplog.text


def test_without_vllm_the_error_names_it() -> None:
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "import kvview_vllm\n"
        "try: kvview_vllm.view(object())\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"kvview_vllm needs an installed vLLM ({TESTED})" in done.stdout
