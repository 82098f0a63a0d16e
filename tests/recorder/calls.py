"""Calls of hooks as vLLM's scheduler makes them, with small objects in the place of vLLM's."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from kvview_vllm.recorder import Recorder

BLOCK_SIZE = 16


class FullAttentionSpec(SimpleNamespace):
    """Named like vLLM's class, because an incident has the name."""


def make_request(name: str, tokens: Sequence[int], num_output: int = 4) -> Any:
    """Make a request, whose hashes are those of whole prefixes."""
    hashes, prefix = [], hashlib.sha256()
    for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE):
        prefix.update(repr(tokens[end - BLOCK_SIZE : end]).encode())
        hashes.append(prefix.digest())
    return SimpleNamespace(
        request_id=name,
        num_prompt_tokens=len(tokens),
        num_tokens=len(tokens) + num_output,
        max_tokens=num_output,
        block_hashes=hashes,
        status=SimpleNamespace(name="FINISHED_STOPPED"),
    )


def make_recorder(limit_bytes: int = 1 << 20, num_blocks: int = 60) -> Recorder:
    """Make the recorder of an engine with one group."""
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=BLOCK_SIZE, num_gpu_blocks=num_blocks),
        kv_transfer_config=SimpleNamespace(kv_connector="MyConnector", kv_role="kv_both"),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=128),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        speculative_config=None,
    )
    groups = [SimpleNamespace(kv_cache_spec=FullAttentionSpec(block_size=BLOCK_SIZE))]
    caches = SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=groups)
    return Recorder(config, caches, limit_bytes)


class Calls:
    """The calls of one scheduler, all of which a recorder receives, and the number of its records.

    Args:
        recorder: Receives each call.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.num_records = 0

    def serve(self, request: Any, num_computed: int = 0, num_promised: int = 0) -> None:
        """Play a request from its first lookup to its end."""
        self.recorder.on_promise(request, num_computed, (num_promised, num_promised > 0))
        self.recorder.on_allocated(request, None, num_promised)
        if num_promised:
            self.step()
            self.report(finished_recving={request.request_id})
        self.step(request)
        for _ in range(request.max_tokens):
            self.step()
        self.recorder.on_finished(request, (True, None))
        self.step(finished=[request.request_id])
        self.report(finished_sending={request.request_id})
        self.num_records += 3 if num_promised else 2

    def step(self, new: Any = None, finished: Sequence[str] = ()) -> None:
        """Play a step, which schedules a new request if one is given."""
        self.num_records += 1
        started = [] if new is None else [SimpleNamespace(req_id=new.request_id)]
        output = SimpleNamespace(
            total_num_scheduled_tokens=0 if new is None else new.num_prompt_tokens,
            scheduled_new_reqs=started,
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
            finished_req_ids={*finished},
        )
        self.recorder.on_step(output)

    def report(self, **fields: Any) -> None:
        """Play a report of the workers."""
        self.num_records += 1
        empty = dict.fromkeys(("finished_sending", "finished_recving"))
        self.recorder.on_output(SimpleNamespace(**{**empty, **fields}))


def play_reuse(recorder: Recorder, prefix: str = "chatcmpl-5f3a") -> None:
    """Play two prompts, and one of them again after its blocks were evicted."""
    calls = Calls(recorder)
    first, other = [*range(7_000_000, 7_000_048)], [*range(8_000_000, 8_000_048)]
    calls.serve(make_request(f"{prefix}-1", first))
    calls.serve(make_request(f"{prefix}-2", other))
    calls.serve(make_request(f"{prefix}-3", [*first, 9_999_999]), 0, 48)
