"""Small real objects of the installed vLLM, for a dry run: no model, no GPU, nothing shared.

Source: the paths named at each function, 0.11.0 to the newest tested release.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, fields
from importlib import import_module
from typing import Any

from kvview_vllm.releases.calls import make_known

BLOCK_SIZE = 16
"""Tokens of a block of these samples."""

LAYER = "layer"
"""The one layer of their KV cache."""

_EMPTY = (("list", list), ("dict", dict), ("set", set), ("int", int), ("bool", bool))


def make_filled(kind: Any, **values: Any) -> Any:
    """An object of a dataclass, with something empty for all that it requires beside.

    Raises:
        TypeError: It has no such field.
    """
    for one in fields(kind):
        required = one.default is MISSING and one.default_factory is MISSING
        if required and one.name not in values:
            empty = (make for name, make in _EMPTY if str(one.type).startswith(name))
            values[one.name] = next(empty, lambda: None)()
    return kind(**values)


def make_kv_cache_config(num_blocks: int) -> Any:
    """A ``KVCacheConfig`` of one full-attention group, vllm/v1/kv_cache_interface.py."""
    import torch

    interface: Any = import_module("vllm.v1.kv_cache_interface")
    spec = make_known(
        interface.FullAttentionSpec,
        block_size=BLOCK_SIZE,
        num_kv_heads=1,
        head_size=8,
        use_mla=False,
        dtype=torch.float32,
    )
    groups = [interface.KVCacheGroupSpec([LAYER], spec)]
    return interface.KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups
    )


def make_kv_cache_manager(kv_cache_config: Any) -> Any:
    """A ``KVCacheManager`` with a pool of its own, vllm/v1/core/kv_cache_manager.py."""
    module: Any = import_module("vllm.v1.core.kv_cache_manager")
    sizes = {"hash_block_size": BLOCK_SIZE, "scheduler_block_size": BLOCK_SIZE}
    return make_known(
        module.KVCacheManager, kv_cache_config=kv_cache_config, max_model_len=512, **sizes
    )


def make_request(request_id: str, tokens: Iterable[int]) -> Any:
    """A ``Request`` of vllm/v1/request.py; its hashes are made up, vLLM's own need a seed."""
    sampling: Any = import_module("vllm.sampling_params")
    request: Any = import_module("vllm.v1.request")

    def hashes(one: Any) -> list[bytes]:
        done = len(one.block_hashes)
        return [b"%032d" % number for number in range(done, one.num_tokens // BLOCK_SIZE)]

    return make_known(
        request.Request,
        request_id=request_id,
        prompt_token_ids=list(tokens),
        sampling_params=sampling.SamplingParams(max_tokens=8),
        pooling_params=None,
        eos_token_id=None,
        block_hasher=hashes,
    )


def make_scheduler_output(request_id: str, num_tokens: int, **values: Any) -> Any:
    """A ``SchedulerOutput`` of one request, vllm/v1/core/sched/output.py.

    Args:
        request_id: Which is scheduled.
        num_tokens: Of it.
        values: Fields of the output; ``new`` and ``cached`` instead of the names of theirs.
    """
    module: Any = import_module("vllm.v1.core.sched.output")
    cached = make_filled(module.CachedRequestData, **values.pop("cached", {}))
    return make_filled(
        module.SchedulerOutput,
        scheduled_new_reqs=values.pop("new", []),
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={request_id: num_tokens},
        total_num_scheduled_tokens=num_tokens,
        **values,
    )
