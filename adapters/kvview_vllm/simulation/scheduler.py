"""A real vLLM ``Scheduler`` without a model: what must be built around one, on any machine.

The scheduler, its pool and the connectors are vLLM's; the configuration names a model
that is never built, and what a model runner would answer is made up.

Nothing of vLLM is patched; the platform is the one that it chose, and arguments are
those that the installed release has (:mod:`kvview_vllm.releases.calls`).

Source: vllm/config, vllm/v1/core/sched/scheduler.py and vllm/v1/outputs.py, 0.11.0 to
0.33.0; the order of calls to a worker is that of vllm/v1/worker/gpu_model_runner.py.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from kvview import (
    CacheGroup,
    ChunkedLocalAttention,
    FullAttention,
    Mamba,
    SlidingWindow,
    UnsupportedEngineError,
)
from kvview_vllm.releases import installed
from kvview_vllm.releases.calls import (
    complete_torch,
    handle_preemptions,
    known_arguments,
    make_known,
    set_concurrent_batches,
)
from kvview_vllm.releases.samples import make_filled
from kvview_vllm.releases.samples import make_model_output as make_model_output

MAX_TOKENS = 512
"""Longest request, prompt and output together."""

END_TOKEN = 2
"""What ends a request before it has all the tokens that it asked for."""

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V1": "1",
}
_MODEL = {
    "architectures": ["KVViewTestModel"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": END_TOKEN,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
_SPECS: dict[type[CacheGroup], str] = {
    FullAttention: "FullAttentionSpec",
    SlidingWindow: "SlidingWindowSpec",
    ChunkedLocalAttention: "ChunkedLocalAttentionSpec",
    Mamba: "MambaSpec",
}

_RECOMPUTE = {"kv_load_failure_policy": "recompute"}


def prepare() -> None:
    """Set what vLLM reads when it is imported; call it before."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    complete_torch()
    logging.getLogger("vllm").setLevel(logging.ERROR)  # late releases configure no level


def connector_config(target: str, **options: Any) -> dict[str, Any]:
    """The ``kv_transfer_config`` of a kvview connector."""
    return {
        "kv_connector": "KVViewConnector",
        "kv_connector_module_path": "kvview_vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connector": target, "options": options},
    }


def multi_config(*children: dict[str, Any]) -> dict[str, Any]:
    """The ``kv_transfer_config`` of vLLM's ``MultiConnector`` over some children."""
    target: Any = importlib.import_module("vllm.config").KVTransferConfig
    policy = known_arguments(target, _RECOMPUTE)
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [policy | child for child in children]},
    }


# --- what a release can do ---


def refuses_several_groups() -> bool:
    """Whether this release takes one KV-cache group only beside a connector (0.11.0)."""
    return not installed().connector.several_groups


def can_load_between_steps() -> bool:
    """Whether a request waits for its loads between steps; else within one (LOAD-1)."""
    return installed().connector.worker_metadata


def most_steps_in_flight() -> int:
    """Steps that a scheduler of this release keeps in order (three: 0.27.0).

    Before, a preempted request may be resumed while the last but one of its outputs is in
    flight, and is then given a token twice, with no connector at all.
    """
    return 3 if drops_stale_outputs() else 2


def can_fail_loads(num_groups: int = 1) -> bool:
    """Whether a worker of this release can say that a load failed (0.11.1; several: 0.30.0)."""
    release = installed().connector
    return release.failed_blocks if num_groups == 1 else release.failed_requests


def can_load_beside_hits(num_groups: int) -> bool:
    """Whether a request may load what follows on what it hits (several groups: 0.24.0)."""
    release = installed().connector
    return num_groups == 1 or release.hits_come_first or not release.null_window_blocks


def fewest_tokens_per_step(groups: Sequence[CacheGroup]) -> int:
    """Smallest token budget with which every block is counted before it is taken.

    0.20.0 and 0.20.1 count the blocks of a window or a chunk up to a cap that grows with the
    budget, and that no request exceeds if a step may compute the longest one.
    """
    has_cap = any(isinstance(group, SlidingWindow | ChunkedLocalAttention) for group in groups)
    return MAX_TOKENS if has_cap and installed().connector.uncounted_window_blocks else 1


def can_block_itself() -> bool:
    """Whether waiting requests may hold loaded blocks that the first needs (to 0.22)."""
    return not installed().connector.reserved_blocks


def can_reset_connectors() -> bool:
    """Whether a reset of the prefix cache reaches the connector (0.13.0)."""
    return installed().connector.connector_reset


def drops_stale_outputs() -> bool:
    """Whether what a preempted request has in flight is dropped (0.27.0)."""
    return bool(installed().connector.stale_outputs)


def invalid_blocks(transfers: Any) -> Collection[int]:
    """Blocks that a worker's report says were not loaded; of no report none."""
    if transfers is None or not installed().connector.failed_blocks:
        return ()
    blocks: Collection[int] = transfers.invalid_block_ids or ()
    return blocks


# --- configuration ---


def make_vllm_config(
    folder: Path,
    transfer_config: dict[str, Any] | None,
    *,
    block_size: int,
    num_groups: int,
    num_blocks: int,
    has_states: bool = False,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = MAX_TOKENS,
    steps_in_flight: int = 1,
) -> Any:
    """A ``VllmConfig`` for the CPU.

    Args:
        folder: Where the model's configuration is written.
        transfer_config: Arguments of ``KVTransferConfig``; None for no connector. What
            becomes of failed loads is ``recompute``.
        block_size: Tokens.
        num_groups: KV-cache groups.
        num_blocks: Blocks of the pool.
        has_states: Whether there are Mamba groups, whose states are cached then.
        max_num_seqs: Requests that may run together.
        max_num_batched_tokens: Token budget of one step.
        steps_in_flight: Steps that may be launched before the output of the first of them
            is taken in; with several, scheduling is asynchronous.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_MODEL))
    config: Any = importlib.import_module("vllm.config")
    _register_model()
    model = make_known(
        config.ModelConfig,
        model=str(folder),
        tokenizer=str(folder),
        dtype="float32",
        seed=0,
        max_model_len=MAX_TOKENS,
        skip_tokenizer_init=True,
        enforce_eager=True,
    )
    scheduler = make_known(
        config.SchedulerConfig,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_batched_tokens, max_num_seqs),
        max_model_len=MAX_TOKENS,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=False,
        scheduler_cls="kvview_vllm.scheduler.ViewScheduler",
    )
    cache = make_known(
        config.CacheConfig,
        block_size=16,
        gpu_memory_utilization=0.5,
        swap_space=0,
        cache_dtype="auto",
        enable_prefix_caching=True,
        mamba_cache_mode="align" if has_states else "none",
    )
    vllm_config = config.VllmConfig(
        model_config=model,
        scheduler_config=scheduler,
        cache_config=cache,
        device_config=config.DeviceConfig("cpu"),
        kv_transfer_config=transfer_config
        and make_known(config.KVTransferConfig, **_RECOMPUTE | transfer_config),
    )
    # Afterwards: old releases name the sizes that a user may choose.
    vllm_config.cache_config.block_size = block_size
    vllm_config.cache_config.num_gpu_blocks = num_blocks
    # Afterwards too: the CPU platform has it switched off.
    vllm_config.scheduler_config.async_scheduling = steps_in_flight > 1
    if steps_in_flight > 1:
        set_concurrent_batches(vllm_config, steps_in_flight)
    if num_groups > 1:
        vllm_config.scheduler_config.disable_hybrid_kv_cache_manager = False
    return vllm_config


def make_kv_cache_config(
    groups: Sequence[CacheGroup], num_blocks: int, layers_per_group: int = 1
) -> Any:
    """A ``KVCacheConfig`` whose groups share the memory of their layers.

    Args:
        groups: The KV-cache groups.
        num_blocks: Blocks of the pool.
        layers_per_group: Layers of each.

    Raises:
        UnsupportedEngineError: A group that needs more than a block size and a span.
    """
    import torch

    interface: Any = importlib.import_module("vllm.v1.kv_cache_interface")
    specs: list[Any] = []
    page = 2 * 2 * 32 * 4 * groups[0].block_size  # of keys and values
    for group in groups:
        if type(group) not in _SPECS:
            raise UnsupportedEngineError(f"no spec of vLLM is made for {type(group).__name__} here")
        specs.append(
            make_known(
                getattr(interface, _SPECS[type(group)]),
                **{"sliding_window": None, "attention_chunk_size": None, **vars(group)},
                num_kv_heads=2,
                head_size=32,
                dtype=torch.float32,
                use_mla=False,
                shapes=((page // 4,),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align",
            )
        )
    names = [
        [f"model.layers.{index}.self_attn.attn" for index in range(first, first + layers_per_group)]
        for first in range(0, len(specs) * layers_per_group, layers_per_group)
    ]
    page = specs[0].page_size_bytes
    tensors = [
        make_known(
            interface.KVCacheTensor,
            size=page * num_blocks,
            shared_by=[group_names[layer] for group_names in names],
            layers=[names[0][layer]],
            layer_stride=page,
            block_stride=page,
        )
        for layer in range(layers_per_group)
    ]
    return make_known(
        interface.KVCacheConfig,
        num_blocks=num_blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=[
            interface.KVCacheGroupSpec(group_names, spec)
            for group_names, spec in zip(names, specs, strict=True)
        ],
    )


def make_scheduler(
    vllm_config: Any, kv_cache_config: Any, geometry: Any, *, plain: bool = False
) -> Any:
    """A ``ViewScheduler`` or ``AsyncViewScheduler``, connector and all, or what they derive from.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        kv_cache_config: Its ``KVCacheConfig``.
        geometry: As :func:`~kvview_vllm.geometry.read_geometry` reads it from them.
        plain: Whether vLLM's own is wanted.
    """
    from kvview_vllm.scheduler import AsyncViewScheduler, ViewScheduler

    structured: Any = importlib.import_module("vllm.v1.structured_output")
    scheduler: Any = importlib.import_module("vllm.v1.core.sched.scheduler")
    values = {
        "vllm_config": vllm_config,
        "kv_cache_config": kv_cache_config,
        "structured_output_manager": structured.StructuredOutputManager(vllm_config),
        "block_size": geometry.scheduler_block_size,
        "hash_block_size": geometry.hash_block_size,
        "log_stats": True,
    }
    known = known_arguments(scheduler.Scheduler, values)
    if "block_size" in known and "hash_block_size" not in known:
        known["block_size"] = geometry.hash_block_size  # the one size is that of hashes then
    asynchronous = vllm_config.scheduler_config.async_scheduling
    if plain:
        ahead: Any = importlib.import_module("vllm.v1.core.sched.async_scheduler")
        return (ahead.AsyncScheduler if asynchronous else scheduler.Scheduler)(**known)
    return AsyncViewScheduler(**known) if asynchronous else ViewScheduler(**known)


def reset_caches(scheduler: Any, *, running_too: bool = False) -> bool:
    """Reset the prefix cache, and the connector's cache where it is asked; False when refused.

    Args:
        scheduler: Which does it.
        running_too: Whether running requests are preempted, where the release can (0.12.0) and
            drops what they have in flight (0.27.0): before, an output of before the reset may
            end a request that computes its prompt again.

    Raises:
        RuntimeError: A block is in use although nothing runs any more.
    """
    running_too &= drops_stale_outputs()
    arguments = {"reset_running_requests": running_too, "reset_connector": True}
    return bool(make_known(scheduler.reset_prefix_cache, **arguments))


def make_worker_connector(vllm_config: Any, kv_cache_config: Any) -> Any:
    """The worker's side of the configured connector."""
    factory: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory")
    return make_known(
        factory.KVConnectorFactory.create_connector,
        config=vllm_config,
        role=_base().KVConnectorRole.WORKER,
        kv_cache_config=kv_cache_config,
    )


# --- requests and answers ---


def make_request(
    request_id: str,
    tokens: Iterable[int],
    max_tokens: int,
    block_hasher: Callable[[Any], list[Any]],
    **more: Any,
) -> Any:
    """A ``Request`` with greedy sampling.

    Args:
        request_id: Its id.
        tokens: Of the prompt.
        max_tokens: To generate.
        block_hasher: Called with the request; hashes of full blocks that it lacks.
        **more: Further arguments of ``Request``, which replace those above.
    """
    sampling: Any = importlib.import_module("vllm.sampling_params")
    request: Any = importlib.import_module("vllm.v1.request")
    values = {
        "request_id": request_id,
        "prompt_token_ids": list(tokens),
        "sampling_params": sampling.SamplingParams(
            max_tokens=max_tokens, temperature=0, ignore_eos=True, stop_token_ids=[END_TOKEN]
        ),
        "pooling_params": None,
        "eos_token_id": END_TOKEN,
        "block_hasher": block_hasher,
    }
    return make_known(request.Request, **values | more)


def computed_before(output: Any) -> dict[str, int]:
    """Tokens of each scheduled request whose KV exists before the step."""
    cached = output.scheduled_cached_reqs
    starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return starts


def loads_after_launch(output: Any) -> bool:
    """Whether the worker's loads of a step start when its forward is launched (0.29.0)."""
    return installed().connector.loads_after_launch and not output.has_sync_kv_loads


def bind_transfers(worker: Any, output: Any, metadata: Any) -> None:
    """What a model runner says first."""
    handle_preemptions(worker, output, metadata)
    worker.bind_connector_metadata(metadata)


def start_transfers(worker: Any) -> None:
    """Start what the step brings, before its forward is launched or after."""
    worker.start_load_kv(None)


def end_transfers(worker: Any) -> None:
    """What a model runner calls when it has computed."""
    worker.wait_for_save()
    worker.clear_connector_metadata()


def take_transfers(worker: Any, output: Any) -> Any:
    """A worker's report, a ``KVConnectorOutput``.

    A model runner takes it at the end of a step; who makes bytes up needs it before.
    """
    values: dict[str, Any] = {}
    release = installed().connector
    if release.failed_requests:
        values.update(vars(worker.get_transfer_results(output.finished_req_ids)))
    else:
        sending, recving = worker.get_finished(output.finished_req_ids)
        values.update(finished_sending=sending, finished_recving=recving)
    if release.failed_blocks:
        values["invalid_block_ids"] = worker.get_block_ids_with_load_errors()
    values["kv_connector_stats"] = worker.get_kv_connector_stats()
    if release.worker_metadata:
        values["kv_connector_worker_meta"] = worker.build_connector_worker_meta()
    kind = _outputs().KVConnectorOutput
    return make_filled(kind, **known_arguments(kind, values))


# --- what differs between releases ---


def _base() -> Any:
    return importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")


def _outputs() -> Any:
    return importlib.import_module("vllm.v1.outputs")


def _register_model() -> None:
    """A model of our own, never run: vLLM would import a real one in a process of its own."""
    import torch

    models: Any = importlib.import_module("vllm.model_executor.models")

    class KVViewTestModel(torch.nn.Module):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__()

        def embed_input_ids(self, input_ids: Any) -> Any: ...

        get_input_embeddings = embed_input_ids  # its name up to 0.11

        def forward(self, input_ids: Any, positions: Any) -> Any: ...

        def compute_logits(self, hidden_states: Any, *args: Any) -> Any: ...

    models.ModelRegistry.register_model("KVViewTestModel", KVViewTestModel)
