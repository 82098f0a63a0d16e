"""Small real objects of the installed vLLM, for a dry run: no model, no GPU, nothing shared.

Source: the paths named at each function, 0.11.0 to the newest tested release.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from typing import Any

from kvview_vllm.releases.calls import known_arguments, make_known, sampled_tokens

BLOCK_SIZE = 16
"""Tokens of a block of these samples."""

WINDOW = 2 * BLOCK_SIZE
"""Tokens of the sliding window of the second KV-cache group."""

LAYERS = ("layer 0", "layer 1")
"""The layers of their KV cache, one a group."""

TOKENS_PER_STEP = 8 * BLOCK_SIZE
"""Tokens that one step of their scheduler computes at most."""

_EMPTY = (("list", list), ("dict", dict), ("set", set), ("int", int), ("bool", bool))
_PLAIN = (list, dict, set, tuple)
_MOST_TOKENS = 512


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


def make_unchecked(kind: Any, **values: Any) -> Any:
    """An object of a configuration class with its defaults, without running its constructor.

    The constructors of vLLM's configurations look for devices and a model, set environment
    variables and log; a scheduler that is never asked to compute needs none of it.

    Args:
        kind: A dataclass of vllm/config.
        values: Values of fields and of properties, in place of their defaults.
    """
    defaults: dict[str, Any] = {}
    for one in fields(kind):
        default: Any = one.default
        make: Any = one.default_factory
        if hasattr(default, "is_required"):  # pydantic's, with the factory inside
            make = default.default_factory or MISSING
            default = MISSING if default.is_required() else default.default
        if make in _PLAIN:
            default = make()
        elif is_dataclass(make):
            default = make_unchecked(make)
        defaults[one.name] = None if default is MISSING else default
    return object.__new__(type(kind.__name__, (kind,), defaults | values))


def make_kv_cache_config(num_blocks: int, num_groups: int = 1) -> Any:
    """A ``KVCacheConfig`` of full attention and a sliding window, vllm/v1/kv_cache_interface.py.

    Args:
        num_blocks: Blocks of the pool.
        num_groups: KV-cache groups, of a layer each; the first one has full attention.
    """
    import torch

    interface: Any = import_module("vllm.v1.kv_cache_interface")
    kinds = (interface.FullAttentionSpec, interface.SlidingWindowSpec)[:num_groups]
    groups = [
        interface.KVCacheGroupSpec(
            [layer],
            make_known(
                kind,
                block_size=BLOCK_SIZE,
                num_kv_heads=1,
                head_size=8,
                use_mla=False,
                dtype=torch.float32,
                sliding_window=None if kind is kinds[0] else WINDOW,
            ),
        )
        for layer, kind in zip(LAYERS, kinds, strict=False)
    ]
    return interface.KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups
    )


class _NoModel:
    """A ``ModelConfig`` that says no to all that a scheduler asks of the model."""

    max_model_len = _MOST_TOKENS

    def __init__(self) -> None:
        import torch

        self.dtype = torch.float32

    def __getattr__(self, name: str) -> Any:
        # Of 0.11.0, which gives connectors no KVCacheConfig: the sizes of a page.
        return (lambda *_: 1) if name.startswith("get_") else False


def make_scheduler(
    kind: Any, num_blocks: int, num_groups: int, transfer_config: Mapping[str, Any] | None
) -> Any:
    """A scheduler without a model, vllm/v1/core/sched/scheduler.py.

    Args:
        kind: vLLM's ``Scheduler``, or a class derived from it.
        num_blocks: Blocks of the pool.
        num_groups: KV-cache groups, as of :func:`make_kv_cache_config`.
        transfer_config: Fields of ``KVTransferConfig``; None for no connector.
    """
    config: Any = import_module("vllm.config")
    structured: Any = import_module("vllm.v1.structured_output")
    vllm_config = make_unchecked(
        config.VllmConfig,
        model_config=_NoModel(),
        scheduler_config=make_unchecked(
            config.SchedulerConfig,
            max_num_batched_tokens=TOKENS_PER_STEP,
            max_num_seqs=8,
            max_model_len=_MOST_TOKENS,
            enable_chunked_prefill=True,
            chunked_prefill_enabled=True,  # what comes of it in 0.11
            async_scheduling=False,
            disable_hybrid_kv_cache_manager=False,
        ),
        cache_config=make_unchecked(
            config.CacheConfig,
            block_size=BLOCK_SIZE,
            num_gpu_blocks=num_blocks,
            enable_prefix_caching=True,
        ),
        parallel_config=make_unchecked(
            config.ParallelConfig, world_size=1, rank=0, data_parallel_index=0
        ),
        kv_transfer_config=transfer_config
        and make_unchecked(config.KVTransferConfig, **transfer_config),
        use_v2_model_runner=False,  # else a warning about the missing model
    )
    scheduler: Any = import_module("vllm.v1.core.sched.scheduler")
    values = {
        "vllm_config": vllm_config,
        "kv_cache_config": make_kv_cache_config(num_blocks, num_groups),
        "structured_output_manager": object.__new__(structured.StructuredOutputManager),
        "block_size": BLOCK_SIZE,
        "hash_block_size": BLOCK_SIZE,
    }
    return kind(**known_arguments(scheduler.Scheduler, values))


@contextmanager
def own_hash_root() -> Iterator[None]:
    """Give block hashes a root, and afterwards the one back that the engine had, if any."""
    utils: Any = import_module("vllm.v1.core.kv_cache_utils")
    before = dict(vars(utils))
    try:
        utils.init_none_hash(hash_function())
        yield
    finally:
        for name in vars(utils).keys() - before.keys():
            delattr(utils, name)
        vars(utils).update(before)


def hash_function() -> Any:
    """The function that vLLM hashes blocks with by default, vllm/utils/hashing.py since 0.11.1."""
    try:
        module: Any = import_module("vllm.utils.hashing")
    except ImportError:
        module = import_module("vllm.utils")
    return module.sha256


def make_request(
    request_id: str,
    tokens: Iterable[int],
    max_tokens: int,
    *,
    cache_salt: str | None = None,
    lora: tuple[str, int] | None = None,
) -> Any:
    """A ``Request`` of vllm/v1/request.py with greedy sampling and vLLM's own hashes.

    Args:
        request_id: Its id.
        tokens: Of the prompt.
        max_tokens: To generate.
        cache_salt: What its hashes depend on beside the tokens.
        lora: Name and number of an adapter, vllm/lora/request.py.
    """
    sampling: Any = import_module("vllm.sampling_params")
    request: Any = import_module("vllm.v1.request")
    utils: Any = import_module("vllm.v1.core.kv_cache_utils")
    adapters: Any = import_module("vllm.lora.request")
    return make_known(
        request.Request,
        request_id=request_id,
        prompt_token_ids=list(tokens),
        sampling_params=sampling.SamplingParams(
            max_tokens=max_tokens, temperature=0, ignore_eos=True
        ),
        pooling_params=None,
        eos_token_id=None,
        cache_salt=cache_salt,
        lora_request=lora and adapters.LoRARequest(*lora, "/none"),
        block_hasher=utils.get_request_block_hasher(BLOCK_SIZE, hash_function()),
    )


def make_model_output(output: Any, sampled: Mapping[str, list[int]], transfers: Any = None) -> Any:
    """What a model runner answers, vllm/v1/outputs.py.

    Args:
        output: The scheduler's ``SchedulerOutput``.
        sampled: By scheduled request its token; none before the end of its prompt.
        transfers: The worker's ``KVConnectorOutput``.
    """
    outputs: Any = import_module("vllm.v1.outputs")
    request_ids = list(output.num_scheduled_tokens)
    return make_known(
        outputs.ModelRunnerOutput,
        req_ids=request_ids,
        req_id_to_index={name: index for index, name in enumerate(request_ids)},
        sampled_token_ids=sampled_tokens([sampled[name] for name in request_ids]),
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
        kv_connector_output=transfers,
        spec_token_ids=None,
    )
