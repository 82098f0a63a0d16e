"""Calls of hooks as vLLM's scheduler makes them, with small objects in the place of vLLM's."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any

from kvview_vllm.recorder import Recorder

BLOCK_SIZE = 16


class Role(Enum):
    SCHEDULER = 0
    WORKER = 1


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
        prompt_token_ids=[*tokens],
        num_prompt_tokens=len(tokens),
        num_tokens=len(tokens) + num_output,
        num_computed_tokens=len(tokens) + num_output - 1,
        max_tokens=num_output,
        block_hashes=hashes,
        status=SimpleNamespace(name="FINISHED_STOPPED"),
    )


class Calls:
    """The calls of one scheduler, all of which a recorder receives.

    Args:
        recorder: Receives each call.
        num_blocks: Blocks of the pool.
    """

    def __init__(self, recorder: Recorder, num_blocks: int = 60) -> None:
        self.recorder = recorder
        spec = FullAttentionSpec(block_size=BLOCK_SIZE)
        config = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=BLOCK_SIZE, num_gpu_blocks=num_blocks),
            kv_transfer_config=SimpleNamespace(kv_connector="MyConnector", kv_role="kv_both"),
            scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=128),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            speculative_config=None,
        )
        groups = [SimpleNamespace(kv_cache_spec=spec)]
        caches = SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=groups)
        self.note("__init__", config, Role.SCHEDULER, caches)

    def note(self, hook: str, *args: Any, result: Any = None) -> None:
        self.recorder.note(hook, args, {}, result)

    def serve(self, request: Any, num_computed: int = 0, num_promised: int = 0) -> None:
        """Play a request from its first lookup to its end."""
        self.start(request, num_computed, num_promised)
        self.step(request)
        for _ in range(request.max_tokens):
            self.step()
        blocks = [*range(-(-request.num_tokens // BLOCK_SIZE))]
        self.note("request_finished", request, blocks, result=(True, None))
        self.step(finished=[request.request_id])
        self.report(finished_sending={request.request_id})

    def start(self, request: Any, num_computed: int = 0, num_promised: int = 0) -> None:
        """Play the lookup and the allocation of a request."""
        lookup = "get_num_new_matched_tokens"
        self.note(lookup, request, num_computed, result=(num_promised, num_promised > 0))
        table = [SimpleNamespace(block_id=n) for n in range(1, len(request.block_hashes) + 1)]
        blocks = SimpleNamespace(blocks=(table,))
        self.note("update_state_after_alloc", request, blocks, num_promised)
        if num_promised:
            self.step()
            self.report(finished_recving={request.request_id})

    def step(self, new: Any = None, finished: Sequence[str] = ()) -> None:
        """Play a step, which schedules a new request if one is given."""
        scheduled = {} if new is None else {new.request_id: new.num_prompt_tokens}
        started = [
            SimpleNamespace(req_id=name, num_computed_tokens=0, block_ids=([1, 2],))
            for name in scheduled
        ]
        cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_new_reqs=started,
            scheduled_cached_reqs=cached,
            finished_req_ids={*finished},
            preempted_req_ids=set(),
        )
        meta = SimpleNamespace(stores={}, loads={}, secret="a name")
        self.note("build_connector_meta", output, result=meta)

    def report(self, **fields: Any) -> None:
        """Play a report of the workers."""
        empty = dict.fromkeys(("finished_sending", "finished_recving"))
        output = SimpleNamespace(**{**empty, "invalid_block_ids": set(), **fields})
        self.note("update_connector_output", output)


def play_reuse(calls: Calls, prefix: str = "chatcmpl-5f3a") -> None:
    """Play two prompts, and one of them again after its blocks were evicted."""
    first, other = [*range(7_000_000, 7_000_048)], [*range(8_000_000, 8_000_048)]
    calls.serve(make_request(f"{prefix}-1", first))
    calls.serve(make_request(f"{prefix}-2", other))
    calls.serve(make_request(f"{prefix}-3", [*first, 9_999_999]), 0, 48)
