"""Small real objects of the installed vLLM for trial runs, without a model, a GPU or side effects.

Source: the paths named at each function, 0.11.0 to the newest tested release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from kvview_vllm.releases.compat.calls import known_arguments, make_known, sampled_tokens
from kvview_vllm.releases.compat.shapes import reading
from kvview_vllm.releases.compat.versions import vllm

BLOCK_SIZE = 16
"""Tokens of a block of these samples."""

WINDOW = 2 * BLOCK_SIZE
"""Tokens of the sliding window of the second KV-cache group."""

LAYERS = ("layer 0", "layer 1")
"""Names of the layers of the samples' KV cache, one per group."""

TOKENS_PER_STEP = 8 * BLOCK_SIZE
"""Maximum number of tokens that one step of a sample's scheduler computes."""

_EMPTY = (("list", list), ("dict", dict), ("set", set), ("int", int), ("bool", bool))
_PLAIN = (list, dict, set, tuple)
_MOST_TOKENS = 512
_UTILS = "v1.core.kv_cache_utils"


def make_filled(kind: Any, **values: Any) -> Any:
    """Make an object of a dataclass, with an empty value for each required field that is not given.

    Raises:
        TypeError: The class does not have one of the fields.
    """
    for one in fields(kind):
        required = one.default is MISSING and one.default_factory is MISSING
        if required and one.name not in values:
            empty = (make for name, make in _EMPTY if str(one.type).startswith(name))
            values[one.name] = next(empty, lambda: None)()
    return kind(**values)


def make_unchecked(kind: Any, **values: Any) -> Any:
    """Make an object of a configuration class with its defaults, without running its constructor.

    The constructors of vLLM's configurations search for devices and a model, set environment
    variables and log. A scheduler without a model needs none of these.

    Args:
        kind: A dataclass of vllm/config.
        values: Values of fields and of properties that replace their defaults.
    """
    defaults: dict[str, Any] = {}
    for one in fields(kind):
        default: Any = one.default
        make: Any = one.default_factory
        if hasattr(default, "is_required"):  # a field of pydantic, with the factory inside
            make = default.default_factory or MISSING
            default = MISSING if default.is_required() else default.default
        if make in _PLAIN:
            default = make()
        elif is_dataclass(make):
            default = make_unchecked(make)
        defaults[one.name] = None if default is MISSING else default
    return object.__new__(type(kind.__name__, (kind,), defaults | values))


@reading("geometry", "a KV-cache configuration, made dry")
def make_kv_cache_config(num_blocks: int, num_groups: int = 1) -> Any:
    """Make a ``KVCacheConfig`` of full attention and, as a second group, a sliding window.

    Args:
        num_blocks: Blocks of the pool.
        num_groups: KV-cache groups of one layer each; the first one has full attention.
    """
    interface = vllm("v1.kv_cache_interface")
    kinds = (("FullAttentionSpec", None), ("SlidingWindowSpec", WINDOW))[:num_groups]
    groups = [
        make_known(
            interface.KVCacheGroupSpec,
            layer_names=[layer],
            kv_cache_spec=make_attention_spec(name, BLOCK_SIZE, 1, 8, sliding_window=window),
        )
        for layer, (name, window) in zip(LAYERS, kinds, strict=False)
    ]
    return make_known(
        interface.KVCacheConfig,
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
    )


def make_attention_spec(
    name: str, block_size: int, num_heads: int, head_size: int, **values: Any
) -> Any:
    """Make a ``KVCacheSpec`` in float32 (vllm/v1/kv_cache_interface.py).

    Args:
        name: Name of the class.
        block_size: Tokens of a block.
        num_heads: KV heads.
        head_size: Elements of a head.
        values: Other fields; fields that the class does not have are dropped.
    """
    import torch

    return make_known(
        getattr(vllm("v1.kv_cache_interface"), name),
        **{"dtype": torch.float32, "use_mla": False, "sliding_window": None, **values},
        block_size=block_size,
        num_kv_heads=num_heads,
        head_size=head_size,
    )


class _NoModel:
    """A ``ModelConfig`` that returns False for every property of the model."""

    max_model_len = _MOST_TOKENS

    def __init__(self) -> None:
        import torch

        self.dtype = torch.float32

    def __getattr__(self, name: str) -> Any:
        # The sizes of a page, for 0.11.0, which passes no KVCacheConfig to connectors.
        return (lambda *_: 1) if name.startswith("get_") else False


def make_dry_config(num_blocks: int, transfer_config: Mapping[str, Any] | None) -> Any:
    """Make a ``VllmConfig`` without a model, whose constructors do not run.

    A server makes it while it starts, so it must not search for devices, write files or log. The
    simulation runs in another process and makes a real one
    (:func:`kvview_vllm.simulation.scheduler.cpu_scheduler.make_vllm_config`).

    Args:
        num_blocks: Blocks of the pool.
        transfer_config: Fields of ``KVTransferConfig``; None for no connector.
    """
    config = vllm("config")
    return make_unchecked(
        config.VllmConfig,
        model_config=_NoModel(),
        scheduler_config=make_unchecked(
            config.SchedulerConfig,
            max_num_batched_tokens=TOKENS_PER_STEP,
            max_num_seqs=8,
            max_model_len=_MOST_TOKENS,
            enable_chunked_prefill=True,
            chunked_prefill_enabled=True,  # derived from it in 0.11
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
        use_v2_model_runner=False,  # otherwise vLLM warns about the missing model
    )


def make_scheduler(
    kind: Any, num_blocks: int, num_groups: int, transfer_config: Mapping[str, Any] | None
) -> Any:
    """Make a scheduler without a model, of :func:`make_dry_config`.

    Args:
        kind: vLLM's ``Scheduler``, or a class derived from it.
        num_blocks: Blocks of the pool.
        num_groups: KV-cache groups, as in :func:`make_kv_cache_config`.
        transfer_config: Fields of ``KVTransferConfig``; None for no connector.
    """
    config = make_dry_config(num_blocks, transfer_config)
    return build_scheduler(kind, config, make_kv_cache_config(num_blocks, num_groups))


def build_scheduler(
    kind: Any,
    vllm_config: Any,
    kv_cache_config: Any,
    block_size: int = BLOCK_SIZE,
    hash_block_size: int = BLOCK_SIZE,
    **more: Any,
) -> Any:
    """Build a scheduler and its connector (vllm/v1/core/sched/scheduler.py).

    Args:
        kind: vLLM's ``Scheduler``, or a class derived from it.
        vllm_config: vLLM's ``VllmConfig``.
        kv_cache_config: vLLM's ``KVCacheConfig``.
        block_size: Tokens of a scheduler block.
        hash_block_size: Tokens of a hash.
        **more: Further arguments of the scheduler.
    """
    structured = vllm("v1.structured_output").StructuredOutputManager
    values = {
        "vllm_config": vllm_config,
        "kv_cache_config": kv_cache_config,
        "structured_output_manager": object.__new__(structured),  # no request has such an output
        "block_size": block_size,
        "hash_block_size": hash_block_size,
    }
    if "hash_block_size" not in known_arguments(kind, values):
        values["block_size"] = hash_block_size  # then the only size is that of hashes
    return make_known(kind, **values, **more)


@contextmanager
def own_hash_root() -> Iterator[None]:
    """Set another root of block hashes in the ``with`` block, and then restore the root."""
    utils = vllm(_UTILS)
    before = dict(vars(utils))
    try:
        utils.init_none_hash(hash_function())
        yield
    finally:
        for name in vars(utils).keys() - before.keys():
            delattr(utils, name)
        vars(utils).update(before)


def hash_function(name: str = "sha256") -> Any:
    """Return vLLM's function for block hashes (vllm/utils/hashing.py since 0.11.1).

    Args:
        name: Name of the function; the default is also vLLM's default.
    """
    try:
        utils = vllm("utils.hashing")
    except ImportError:
        utils = vllm("utils")
    return utils.get_hash_fn_by_name(name)


@reading("connector", "a request, made dry")
def make_request(
    request_id: str,
    tokens: Iterable[int],
    max_tokens: int,
    *,
    cache_salt: str | None = None,
    lora: tuple[str, int] | None = None,
    block_hasher: Callable[[Any], list[Any]] | None = None,
    end_token: int | None = None,
    transfer_params: Mapping[str, Any] | None = None,
    **more: Any,
) -> Any:
    """Make a ``Request`` of vllm/v1/request.py with greedy sampling.

    Args:
        request_id: Id of the request.
        tokens: Tokens of the prompt.
        max_tokens: Tokens to generate.
        cache_salt: Salt of its block hashes.
        lora: Name and number of an adapter, vllm/lora/request.py.
        block_hasher: Returns the hashes of a request's new full blocks; by default vLLM's own
            function.
        end_token: Token that ends the request early.
        transfer_params: The ``kv_transfer_params`` of the request.
        **more: Further arguments of ``Request``, which replace the arguments above.
    """
    if block_hasher is None:
        block_hasher = vllm(_UTILS).get_request_block_hasher(BLOCK_SIZE, hash_function())
    values = {
        "request_id": request_id,
        "prompt_token_ids": list(tokens),
        "sampling_params": make_known(
            vllm("sampling_params").SamplingParams,
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
            stop_token_ids=[] if end_token is None else [end_token],
            extra_args=transfer_params and {"kv_transfer_params": transfer_params},
        ),
        "pooling_params": None,
        "eos_token_id": end_token,
        "cache_salt": cache_salt,
        "lora_request": lora
        and make_known(
            vllm("lora.request").LoRARequest,
            lora_name=lora[0],
            lora_int_id=lora[1],
            lora_path="/none",
        ),
        "block_hasher": block_hasher,
    }
    return make_known(vllm("v1.request").Request, **values | more)


def make_model_output(
    output: Any, sampled: Mapping[str, Sequence[int]], transfers: Any = None
) -> Any:
    """Make the output of a model runner (vllm/v1/outputs.py).

    Args:
        output: The scheduler's ``SchedulerOutput``.
        sampled: The new token of each scheduled request; empty before the end of its prompt.
        transfers: The worker's ``KVConnectorOutput``.
    """
    request_ids = list(output.num_scheduled_tokens)
    return make_known(
        vllm("v1.outputs").ModelRunnerOutput,
        req_ids=request_ids,
        req_id_to_index={name: index for index, name in enumerate(request_ids)},
        sampled_token_ids=sampled_tokens([[*sampled[name]] for name in request_ids]),
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
        kv_connector_output=transfers,
        spec_token_ids=None,
    )
