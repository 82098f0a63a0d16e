"""Small facts about the calls of a connector's hooks: numbers only, without tokens or names.

Requests and block hashes are represented by :func:`hash` of their ids, which never leave the
process; an incident has numbers instead (:mod:`.export`).

Source: vllm/distributed/kv_transfer/kv_connector/v1/base.py, 0.11.0 to 0.33.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import compress
from typing import Any

from kvview_vllm.releases.compat import outputs

Facts = tuple[Any, ...]
"""Numbers, short texts and tuples of both, in the order of :data:`FIELDS`."""

MOST_BLOCK_IDS = 32
"""Block ids that a record lists for each group; further blocks are only counted."""

_CONSTRUCTOR = ("vllm_config", "role", "kv_cache_config")
_EVERY_BLOCK = 32  # the first blocks of a request, each of whose hashes is kept

FIELDS: Mapping[str, tuple[str, ...]] = {
    "on_new_request": ("request",),
    "get_num_new_matched_tokens": (
        "request",
        "num_computed_tokens",
        "num_promised_tokens",
        "is_async",
    ),
    "update_state_after_alloc": ("request", "num_external_tokens", "block_count", "blocks"),
    "build_connector_meta": (
        "num_requests",
        "num_scheduled_tokens",
        "new",
        "extended",
        "preempted",
        "resumed",
        "finished",
        "plan",
    ),
    "request_finished": (
        "request",
        "status",
        "num_tokens",
        "num_computed_tokens",
        "block_count",
        "is_delayed",
    ),
    "update_connector_output": ("sent", "received", "failed", "invalid_blocks"),
    "get_finished": ("sent", "received"),
    "get_block_ids_with_load_errors": ("invalid_blocks",),
    "reset_cache": ("has_reset",),
    "wait_for_save": ("num_layers_saved",),
}
"""The fields of the record of each hook; other hooks are recorded by their names only."""

SAME_AS = {
    "request_finished_all_groups": "request_finished",
    "get_transfer_results": "get_finished",
}
"""Hooks with the fields of another hook."""

_SIZED = (dict, list, set, tuple)
_QUERIES = ("get_", "has_", "is_", "requires_", "supports_", "take_")
_COUNTED = frozenset(
    {
        "bind_connector_metadata",
        "build_connector_worker_meta",
        "clear_connector_metadata",
        "handle_preemptions",
        "save_kv_layer",
        "wait_for_layer_load",
    }
)

Read = Callable[[Sequence[Any], Mapping[str, Any], Any], Facts | None]


def reader_of(hook: str) -> Read | None:
    """Return the function that reads the facts about a call; None if calls are only counted."""
    if read := _READERS.get(hook):
        return read
    # A query, or a call in each step or layer, shows nothing that a record needs.
    return None if hook.startswith(_QUERIES) or hook in _COUNTED else _no_facts


def request_of(hook: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the ``Request`` that a hook of the scheduler's side received, or None."""
    if hook not in _ABOUT_A_REQUEST:
        return None
    return args[0] if args else kwargs.get("request")


def describe(request: Any) -> Facts:
    """Describe a request: numbers of tokens, and some of its block hashes with their positions.

    Because a hash covers the whole prefix, the hashes show which prefixes requests share.
    """
    hashes = request.block_hashes
    at = positions(len(hashes))
    return (
        request.num_prompt_tokens,
        request.num_tokens,
        request.max_tokens,
        len(hashes),
        at,
        tuple([hash(hashes[one]) for one in at]),
    )


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


def read_setup(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Read the sizes of the engine from the arguments of a connector's constructor."""
    given = {**dict(zip(_CONSTRUCTOR, args, strict=False)), **kwargs}
    config, role = given["vllm_config"], given["role"]
    cache, transfer = config.cache_config, config.kv_transfer_config
    scheduler, speculation = config.scheduler_config, config.speculative_config
    kv_cache = given.get("kv_cache_config")
    groups = kv_cache.kv_cache_groups if kv_cache else ()
    return {
        "connector": transfer.kv_connector,
        "component": role.name.lower(),
        "role": transfer.kv_role,
        "num_blocks": kv_cache.num_blocks if kv_cache else cache.num_gpu_blocks,
        "hash_block_size": cache.block_size,
        "groups": [
            {
                "kind": type(group.kv_cache_spec).__name__,
                "block_size": group.kv_cache_spec.block_size,
                "window": outputs.window_of(group.kv_cache_spec),
            }
            for group in groups
        ],
        "max_running": scheduler.max_num_seqs,
        "max_tokens_per_step": scheduler.max_num_batched_tokens,
        "has_async_scheduling": outputs.has_async_scheduling(scheduler),
        "num_ranks": config.parallel_config.tensor_parallel_size,
        "num_draft_tokens": speculation.num_speculative_tokens if speculation else 0,
    }


# --- one hook ---


def _no_facts(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Facts:
    return ()


def _key(request: Any) -> int:
    return hash(request.request_id)


def _keys(request_ids: Iterable[str] | None) -> tuple[int, ...]:
    return tuple(map(hash, request_ids or ()))


def _new_request(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Facts:
    return (_key(request_of("on_new_request", args, kwargs)),)


def _lookup(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Facts:
    num_computed = args[1] if len(args) > 1 else kwargs["num_computed_tokens"]
    promised, is_async = result if isinstance(result, tuple) else (result, False)
    request = request_of("get_num_new_matched_tokens", args, kwargs)
    return _key(request), int(num_computed), promised, bool(is_async)


def _allocation(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Facts:
    blocks = args[1] if len(args) > 1 else kwargs["blocks"]
    num_tokens = args[2] if len(args) > 2 else kwargs["num_external_tokens"]
    tables = blocks.blocks
    first = [[one.block_id for one in table[:MOST_BLOCK_IDS]] for table in tables]
    request = request_of("update_state_after_alloc", args, kwargs)
    return _key(request), int(num_tokens), sum(map(len, tables)), first


def _step(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Facts:
    output = args[0] if args else kwargs["scheduler_output"]
    scheduled, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    new = tuple(
        (
            hash(one.req_id),
            one.num_computed_tokens,
            scheduled.get(one.req_id, 0),
            one.block_ids,
        )
        for one in output.scheduled_new_reqs
    )
    tables, names = cached.new_block_ids, cached.req_ids
    # Without a loop, because most requests of a step have no new block.
    extended = tuple(zip(map(hash, compress(names, tables)), filter(None, tables), strict=True))
    return (
        len(scheduled),
        int(output.total_num_scheduled_tokens),
        new,
        extended,
        _keys(outputs.preempted_requests(output)),
        _keys(outputs.resumed_requests(cached)),
        _keys(output.finished_req_ids),
        _sizes(result),
    )


def _sizes(plan: Any) -> tuple[tuple[str, int], ...]:
    """Return the numbers of entries in the attributes of a connector's metadata."""
    try:
        found = vars(plan)
    except TypeError:  # a class with slots
        return ()
    return tuple((name, len(one)) for name, one in found.items() if isinstance(one, _SIZED))


def _finished(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Facts:
    request = request_of("request_finished", args, kwargs)
    tables = args[1] if len(args) > 1 else kwargs["block_ids"]
    tables = tables if isinstance(tables, tuple) else (tables,)
    status = request.status.name
    is_delayed = bool(result[0]) if isinstance(result, tuple) else False
    return (
        _key(request),
        status,
        int(request.num_tokens),
        int(request.num_computed_tokens),
        sum(map(len, tables)),
        is_delayed,
    )


def _output(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Facts | None:
    output = args[0] if args else kwargs["connector_output"]
    return _unless_empty(
        _keys(output.finished_sending),
        _keys(output.finished_recving),
        _keys(outputs.failed_requests(output)),
        tuple(outputs.invalid_blocks(output)),
    )


def _ended(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Facts | None:
    if not isinstance(result, tuple):
        sent, received = result.finished_sending, result.finished_recving
    else:
        sent, received = result[:2]
    return _unless_empty(_keys(sent), _keys(received))


def _load_errors(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Facts | None:
    return _unless_empty(tuple(result or ()))


def _reset(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Facts:
    return (result is not False,)


def _unless_empty(*facts: tuple[int, ...]) -> Facts | None:
    return facts if any(facts) else None


_READERS: Mapping[str, Read] = {
    "on_new_request": _new_request,
    "get_num_new_matched_tokens": _lookup,
    "update_state_after_alloc": _allocation,
    "build_connector_meta": _step,
    "request_finished": _finished,
    "request_finished_all_groups": _finished,
    "update_connector_output": _output,
    "get_finished": _ended,
    "get_transfer_results": _ended,
    "get_block_ids_with_load_errors": _load_errors,
    "reset_cache": _reset,
}
_ABOUT_A_REQUEST = frozenset(
    {
        "on_new_request",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "request_finished",
        "request_finished_all_groups",
    }
)
