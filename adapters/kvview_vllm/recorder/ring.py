"""The recorder: a ring of the last calls of a connector's scheduler side, in bounded memory.

A record holds numbers only: requests and block hashes are represented by :func:`hash` in memory,
and by numbers in the order of their appearance in a file. There is no lock, because a signal may
interrupt the recorder, and because one thread calls it.

Source: vllm/distributed/kv_transfer/kv_connector/v1/base.py, 0.11.0 to 0.33.0.
"""

from __future__ import annotations

import marshal
import signal
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import count
from typing import Any

from kvview_vllm.releases.compat import outputs

LIMIT_BYTES = 8 << 20
"""Memory of a recorder."""

_PAGE = 512  # values of records that are packed together; one at a time costs twice as much
_BYTES_OF_PAGE = _PAGE * 50  # of the records that are not packed yet
_MARSHAL = 2  # the last version without references, which cost more time than they save bytes
_EVERY_BLOCK = 32  # the first blocks of a request, each of whose hashes is kept

_REQUEST = "request"  # a record that describes a request
_PROMISE = "get_num_new_matched_tokens"
_FIELDS = {
    _PROMISE: ("request", "num_computed_tokens", "num_promised_tokens", "is_async"),
    "update_state_after_alloc": ("request", "num_external_tokens"),
    "build_connector_meta": ("num_scheduled_tokens", "new", "preempted", "resumed", "finished"),
    "request_finished": ("request", "status", "num_tokens", "is_delayed"),
    "update_connector_output": ("sent", "received", "failed", "num_invalid_blocks"),
    "reset_cache": (),
}
_REQUESTS = frozenset({"new", "preempted", "resumed", "finished", "sent", "received", "failed"})


class Recorder:
    """Records the hooks of the scheduler's side of one connector.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        kv_cache_config: vLLM's ``KVCacheConfig``; None in 0.11.0.
        limit_bytes: Memory of the ring.
    """

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self._engine = _engine(vllm_config, kv_cache_config)
        self._page: list[tuple[Any, ...]] = []  # the last records
        self._num_values = 0  # in them
        self._pages: deque[tuple[bytes, int]] = deque()  # those before, packed, with the calls
        self._num_bytes = _BYTES_OF_PAGE
        self._most_bytes = limit_bytes
        self._num_dropped = 0
        self._described: set[int] = set()  # requests that have not ended
        self._started: set[int] = set()  # those of them that a step has scheduled

    @property
    def num_bytes(self) -> int:
        """Memory of the records."""
        return self._num_bytes

    # --- hooks ---

    def on_promise(self, request: Any, num_computed: int, answer: Any) -> None:
        """Record a promise, and describe the request at its first one.

        A description has the lengths of the request, and some of its hashes, which show shared
        prefixes.
        """
        key = hash(request.request_id)
        if key not in self._described:
            self._described.add(key)
            hashes = request.block_hashes
            kept = [hash(hashes[one]) for one in positions(len(hashes))]
            lengths = request.num_prompt_tokens, request.max_tokens, len(hashes)
            self._add(_REQUEST, key, *lengths, *kept)
        num_tokens, is_async = answer if isinstance(answer, tuple) else (None, False)
        self._add(_PROMISE, key, num_computed, num_tokens, bool(is_async))

    def on_allocated(self, request: Any, blocks: Any, num_tokens: int) -> None:
        """Record the start of a load; most allocations load nothing."""
        if num_tokens:
            self._add("update_state_after_alloc", hash(request.request_id), num_tokens)

    def on_step(self, output: Any) -> None:
        """Record a step."""
        new = [hash(one.req_id) for one in output.scheduled_new_reqs]
        preempted = _keys(outputs.preempted_requests(output))
        resumed = _keys(outputs.resumed_requests(output.scheduled_cached_reqs))
        finished = _keys(output.finished_req_ids)
        self._started.difference_update(finished)
        # For Model Runner V2, a resumed request comes like a new one.
        if not self._started.isdisjoint(new):
            resumed += [key for key in new if key in self._started]
            new = [key for key in new if key not in self._started]
        self._started.update(new)
        tokens = output.total_num_scheduled_tokens
        self._add("build_connector_meta", tokens, new, preempted, resumed, finished)

    def on_finished(self, request: Any, answer: Any) -> None:
        """Record the end of a request."""
        key = hash(request.request_id)
        self._described.discard(key)
        self._add(
            "request_finished",
            key,
            request.status.name,
            request.num_tokens,
            bool(answer[0]),
        )

    def on_output(self, output: Any) -> None:
        """Record the reports of the workers, if there are any."""
        sent, received = output.finished_sending, output.finished_recving
        failed, invalid = outputs.failed_requests(output), [*outputs.invalid_blocks(output)]
        if sent or received or failed or invalid:
            reports = (_keys(sent), _keys(received), _keys(failed), len(invalid))
            self._add("update_connector_output", *reports)

    def on_reset(self) -> None:
        """Record a reset."""
        self._add("reset_cache")

    def _add(self, *record: Any) -> None:
        self._page.append((time.monotonic_ns(), *record))
        self._num_values += len(record)
        if self._num_values >= _PAGE:
            self._pack()

    def _pack(self) -> None:
        packed = marshal.dumps(self._page, _MARSHAL)
        num_calls = sum(record[1] != _REQUEST for record in self._page)
        self._page, self._num_values = [], 0
        self._pages.append((packed, num_calls))
        self._num_bytes += sys.getsizeof(packed)
        while self._num_bytes > self._most_bytes:
            dropped, num_dropped = self._pages.popleft()
            self._num_bytes -= sys.getsizeof(dropped)
            self._num_dropped += num_dropped

    # --- incidents ---

    def export(self, law: str) -> dict[str, Any]:
        """Return the content of an incident file, in which numbers replace requests and hashes.

        Args:
            law: The broken law; empty if the file is only requested.
        """
        numbers: defaultdict[int, int] = defaultdict(count(1).__next__)
        hashes: defaultdict[int, int] = defaultdict(count(1).__next__)
        pages = [marshal.loads(packed) for packed, _ in self._pages]
        every = [record for page in [*pages, [*self._page]] for record in page]
        records = [_exported(record, numbers) for record in every if record[1] != _REQUEST]
        requests = {}
        for _, _, key, num_prompt_tokens, max_tokens, num_hashes, *kept in (
            record for record in every if record[1] == _REQUEST
        ):
            requests[key] = {
                "request": numbers[key],
                "num_prompt_tokens": num_prompt_tokens,
                "max_tokens": max_tokens,
                "positions": [*positions(num_hashes)],
                "hashes": [hashes[one] for one in kept],
            }
        return {
            "schema_version": 1,
            "law": law,
            "num_dropped": self._num_dropped,
            "engine": self._engine,
            "requests": [*requests.values()],
            "records": records,
        }


def on_signal(write: Callable[[], None]) -> None:
    """Call a function at each ``SIGUSR2``, unless the process handles this signal already."""
    is_free = signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    if is_free and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR2, lambda *_: write())


@lru_cache(maxsize=1024)
def positions(number: int) -> tuple[int, ...]:
    """Return the positions of the hashes that are kept of this number: fewer far from the start."""
    kept = list(range(min(number, _EVERY_BLOCK)))
    start, step = _EVERY_BLOCK, 2
    while start < number:
        kept += range(start + step - 1, min(2 * start, number), step)
        start, step = 2 * start, 2 * step
    if number and kept[-1] != number - 1:
        kept.append(number - 1)
    return tuple(kept)


def _keys(request_ids: Iterable[str] | None) -> list[int]:
    return [*map(hash, request_ids)] if request_ids else []


def _exported(record: tuple[Any, ...], numbers: defaultdict[int, int]) -> dict[str, Any]:
    monotonic_ns, hook, *values = record
    fields = {"monotonic_ns": monotonic_ns, "hook": hook}
    for name, value in zip(_FIELDS[hook], values, strict=True):
        if name == "request":
            fields[name] = numbers[value]
        elif name in _REQUESTS and value:
            fields[name] = [numbers[one] for one in value]
        elif value:
            fields[name] = value
    return fields


def _engine(config: Any, kv_cache_config: Any) -> dict[str, Any]:
    """Return the sizes of the engine."""
    cache, scheduler = config.cache_config, config.scheduler_config
    speculation = config.speculative_config
    return {
        "connector": config.kv_transfer_config.kv_connector,
        "num_blocks": kv_cache_config.num_blocks if kv_cache_config else cache.num_gpu_blocks,
        "hash_block_size": cache.block_size,
        "groups": [
            {
                "kind": type(group.kv_cache_spec).__name__,
                "block_size": group.kv_cache_spec.block_size,
                "window": outputs.window_of(group.kv_cache_spec),
            }
            for group in (kv_cache_config.kv_cache_groups if kv_cache_config else ())
        ],
        "max_running": scheduler.max_num_seqs,
        "max_tokens_per_step": scheduler.max_num_batched_tokens,
        "has_async_scheduling": outputs.has_async_scheduling(scheduler),
        "num_ranks": config.parallel_config.tensor_parallel_size,
        "num_stages": config.parallel_config.pipeline_parallel_size,
        "num_draft_tokens": speculation.num_speculative_tokens if speculation else 0,
    }
