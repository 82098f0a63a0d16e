"""The facts that a connector gets of a request on vLLM, and the reports that are not its own.

The trial run (``test_trial_run.py``) and the simulation compare its computed tokens, and the
simulation its full blocks with steps in flight (CONN-7).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import pytest

from kvview import CacheGeometry, RequestContent, StepPlan, TransferResult, make_offload_key
from kvview_vllm.events import BlockDescriptions
from kvview_vllm.releases.build.samples import BLOCK_SIZE, make_request
from kvview_vllm.releases.compat.calls import request_content
from tests.vllm.server import EXAMPLE, Server


def test_the_content_has_everything_that_hashes_cover() -> None:
    hashes = [bytes([number]) * 32 for number in range(6)]
    tokens = range(10, 10 + 6 * BLOCK_SIZE + 4)
    request = make_request("r", tokens, 4, block_hasher=lambda request: hashes)
    request.cache_salt = "tenant"
    request.kv_transfer_params = {"max_load_tokens": 4}
    lora: Any = importlib.import_module("vllm.lora.request")
    request.lora_request = lora.LoRARequest("poet", 3, "/adapters/poet")
    content = request_content(request, BLOCK_SIZE)
    assert content.token_ids is request.all_token_ids, "it grows with the request"
    assert (content.lora_name, content.lora_id, content.cache_salt) == ("poet", 3, "tenant")
    assert content.transfer_params == {"max_load_tokens": 4}
    utils: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
    expected = []
    next_image = 0
    for start in range(0, 6 * BLOCK_SIZE, BLOCK_SIZE):
        keys, next_image = utils.generate_block_hash_extra_keys(
            request, start, start + BLOCK_SIZE, next_image
        )
        expected.append(keys)
    assert list(content.extra_keys) == expected == content.extra_keys[:]
    assert "tenant" in str(expected[0])
    assert expected[0] != expected[1]
    with pytest.raises(IndexError):
        content.extra_keys[6]


@dataclass(frozen=True)
class Drops(StepPlan):
    """A plan that has more than jobs."""

    dropped: str = ""


def test_a_plan_without_jobs_reaches_the_worker() -> None:
    server = Server()
    plans: list[Any] = []
    server.half.plan_step = lambda step: Drops(dropped="a key")
    server.worker._worker_side._half.start_plan = plans.append
    server.ask("r")
    server.step()
    assert [plan.dropped for plan in plans] == ["a key"]


def test_a_report_of_an_unknown_job_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    # MSG-2
    server = Server()
    worker = server.worker._worker_side
    results = [TransferResult(99, success=True)]
    take = worker._half.get_finished
    worker._half.get_finished = lambda: [*take(), *(results.pop() for _ in results[:1])]
    request = server.ask("r")
    server.run()
    assert request.is_finished()
    assert f"CONN-3: connector {EXAMPLE}: HostCacheWorker reported job 99" in caplog.text
    assert not worker.reports(), "no scheduler could acknowledge it, so it would be sent forever"


@pytest.mark.parametrize("ends", [False, True])
def test_the_content_of_a_block_is_kept_as_long_as_one_of_its_requests(ends: bool) -> None:
    """A shorter request with the same blocks finishes, and then others finish."""
    geometry = CacheGeometry.single(BLOCK_SIZE)
    descriptions = BlockDescriptions(geometry, num_blocks=2)

    def follow(name: str, first: int) -> tuple[Any, RequestContent]:
        tokens = range(first, first + BLOCK_SIZE)
        request = make_request(name, tokens, 1, block_hasher=lambda request: [bytes([first]) * 32])
        content = request_content(request, BLOCK_SIZE)
        descriptions.follow(request, content)
        descriptions.places()
        return request, content

    longest = follow("longest", 0)
    descriptions.finish(*follow("shorter", 0))
    key = make_offload_key(longest[0].block_hashes[0], 0)
    assert key in descriptions.places()
    if ends:
        descriptions.finish(*longest)
        descriptions.finish(*follow("another", 10))
    else:
        for number in range(1, 4):
            descriptions.finish(*follow(f"another {number}", 10 * number))
    assert key in descriptions.places()
    for number in range(4, 7):
        descriptions.finish(*follow(f"another {number}", 10 * number))
    assert (key in descriptions.places()) == (not ends)
    assert len(descriptions.places()) == 2 + (not ends)
