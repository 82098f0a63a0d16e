"""A real vLLM Scheduler of whatever release is importable, with the worker simulated.

The scheduler, its pool and the connector are vLLM's and ours; what computes is a
few lines that write, into real CPU tensors, bytes that follow from a block's hash.
So a loaded block with other bytes is seen at once. Nothing is patched: the
platform is chosen by the `+cpu` in the version of the unpacked sources.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", VLLM_USE_V1="1"
)

BLOCK_SIZE = 16
WINDOW = 32
NUM_BLOCKS = 64
LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
EXAMPLE = Path(__file__).parents[2] / "examples" / "host_cache.py"
EXAMPLE_CONNECTOR = f"{EXAMPLE}:HostCacheConnector"

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
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}


def connector_config(target: str = EXAMPLE_CONNECTOR, **options: Any) -> dict[str, Any]:
    """The `kv_transfer_config` of a kvview connector."""
    return {
        "kv_connector": "KVViewConnector",
        "kv_connector_module_path": "kvview_vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connector": target, "options": options},
    }


def multi_config(*children: dict[str, Any]) -> dict[str, Any]:
    """The `kv_transfer_config` of vLLM's MultiConnector over some children."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(children)},
    }


class Engine:
    """Scheduler and simulated worker, stepped by hand.

    Args:
        folder: Where the model's configuration is written.
        transfer_config: Arguments of `KVTransferConfig`.
        windows: Sliding windows in tokens, a KV-cache group each; None is full attention.
        num_blocks: Blocks of the pool.
    """

    def __init__(
        self,
        folder: Path,
        transfer_config: dict[str, Any],
        *,
        windows: Sequence[int | None] = (None,),
        num_blocks: int = NUM_BLOCKS,
    ) -> None:
        import torch

        self.kv_cache_config = _kv_cache_config(windows, num_blocks)
        self.vllm_config = _vllm_config(folder, transfer_config, len(windows), num_blocks)
        self.scheduler = _scheduler(self.vllm_config, self.kv_cache_config)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.worker = _worker_connector(self.vllm_config, self.kv_cache_config)
        layers = [
            name for group in self.kv_cache_config.kv_cache_groups for name in group.layer_names
        ]
        if transfer_config["kv_connector"] == "OffloadingConnector":
            _register_layers(self.vllm_config, layers)
        # Layers of several groups share memory, as in vLLM: a block belongs to one group.
        tensor = torch.zeros((num_blocks, 2, BLOCK_SIZE, 64), dtype=torch.float32)
        self.kv_caches = dict.fromkeys(layers, tensor)
        self.worker.register_kv_caches(self.kv_caches)
        self.requests: dict[str, Any] = {}
        self.hits: dict[str, int] = {}  # tokens that a request never computed
        self.hold_loads = False
        self._metadata: list[Any] = []

    def add(self, request_id: str, tokens: Iterable[int], max_tokens: int = 4) -> Any:
        """Queue a request."""
        request = self.requests[request_id] = make_request(request_id, list(tokens), max_tokens)
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """End a request as a client that went away does."""
        from vllm.v1.request import RequestStatus  # type: ignore[import-not-found]

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> Any:
        """Schedule, compute and take the output in."""
        output = self.scheduler.schedule()
        transfers = self._run_worker(output)
        self._compute(output, getattr(transfers, "invalid_block_ids", None) or ())
        if not self.hold_loads:
            self.worker.wait_for_save()
            self.worker.clear_connector_metadata()
        self.scheduler.update_from_output(
            output, make_model_output(self.scheduler, output, transfers)
        )
        return output

    def run(self, limit: int = 50) -> None:
        """Step until every request has ended and the connector rests."""
        for _ in range(limit):
            self.step()
            if not self.scheduler.has_unfinished_requests() and not self._is_busy():
                self.step()  # the last acknowledgement
                return
        raise AssertionError(f"not done after {limit} steps")

    def num_free_blocks(self) -> int:
        """Free blocks of the real pool."""
        return int(self.pool.get_num_free_blocks())

    def scribble(self) -> None:
        """Overwrite the whole KV cache: only a load can bring bytes back."""
        for tensor in self.kv_caches.values():
            tensor.fill_(-1.0)

    def _is_busy(self) -> bool:
        ask = getattr(self.scheduler.connector, "has_pending_push_work", None)  # before 0.24: ours
        children = getattr(self.scheduler.connector, "_connectors", None)
        if children is not None:
            return any(child.has_pending_push_work() for child in children)
        return bool(ask and ask())

    def _run_worker(self, output: Any) -> Any:
        """The calls of a model runner up to the forward pass, and its report.

        It reports after the pass; what a connector saves then is reported a step later here.
        """
        worker = self.worker
        if self.hold_loads:
            self._metadata.append(output.kv_connector_metadata)
            return None
        metadata = [*self._metadata, output.kv_connector_metadata]
        self._metadata.clear()
        for one in metadata:
            self._handle_preemptions(output, one)
            worker.bind_connector_metadata(one)
            worker.start_load_kv(None)
        return self._transfers(output)

    def _handle_preemptions(self, output: Any, metadata: Any) -> None:
        handle = getattr(self.worker, "handle_preemptions", None)  # 0.14
        if handle is None:
            return
        if "preempted_req_ids" in inspect.signature(handle).parameters:  # up to 0.18
            if output.preempted_req_ids:
                handle(output.preempted_req_ids)
        else:
            handle(metadata)

    def _transfers(self, output: Any) -> Any:
        from vllm.v1.outputs import KVConnectorOutput  # type: ignore[import-not-found]

        worker = self.worker
        values: dict[str, Any] = {}
        base: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
        if hasattr(base.KVConnectorBase_V1, "get_transfer_results"):  # 0.30
            results = worker.get_transfer_results(output.finished_req_ids)
            values.update(vars(results))
        else:
            sending, recving = worker.get_finished(output.finished_req_ids)
            values.update(finished_sending=sending, finished_recving=recving)
        if hasattr(worker, "get_block_ids_with_load_errors"):
            values["invalid_block_ids"] = worker.get_block_ids_with_load_errors()
        values["kv_connector_stats"] = worker.get_kv_connector_stats()
        if hasattr(worker, "build_connector_worker_meta"):
            values["kv_connector_worker_meta"] = worker.build_connector_worker_meta()
        return KVConnectorOutput(**_known(KVConnectorOutput, values))

    def _compute(self, output: Any, invalid: Collection[int]) -> None:
        """Check what earlier steps or loads brought, then write what this one computes.

        Blocks reported invalid are not checked: the scheduler computes them anew.
        """
        from kvview import CacheGeometry

        manager = self.scheduler.kv_cache_manager
        cached = output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        groups = self.kv_cache_config.kv_cache_groups
        geometry: CacheGeometry = _geometry(self.vllm_config, self.kv_cache_config)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            start = starts[request_id]
            self.hits.setdefault(request_id, start)
            tables = manager.get_block_ids(request_id)
            for index, (group, table) in enumerate(zip(groups, tables, strict=True)):
                first_read = geometry.groups[index].num_skipped_tokens(start) // BLOCK_SIZE
                for number in range(min(start + num_tokens, request.num_tokens) // BLOCK_SIZE):
                    page = _page(request.block_hashes[number], index)
                    block = table[number]
                    for layer in group.layer_names:
                        tensor = self.kv_caches[layer][block]
                        if (number + 1) * BLOCK_SIZE > start:
                            tensor.fill_(page)
                        elif number >= first_read and block not in invalid:
                            assert bool((tensor == page).all()), (
                                f"request {request_id}, group {index}, block {number}: wrong bytes"
                            )


def _page(block_hash: bytes, group: int) -> float:
    digest = hashlib.sha256(bytes(block_hash) + bytes([group])).digest()
    return float(int.from_bytes(digest[:2], "big"))


def _known(target: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Only the arguments that this release has."""
    parameters = inspect.signature(target).parameters
    return {name: value for name, value in values.items() if name in parameters}


def _make(target: Any, **values: Any) -> Any:
    return target(**_known(target, values))


def make_scheduler(
    folder: Path, transfer_config: dict[str, Any] | None, *, num_blocks: int, max_num_seqs: int
) -> Any:
    """A real Scheduler alone, of one full-attention group.

    Args:
        folder: Where the model's configuration is written.
        transfer_config: Arguments of `KVTransferConfig`; None for no connector.
        num_blocks: Blocks of the pool.
        max_num_seqs: Requests that may run together.
    """
    config = _vllm_config(folder, transfer_config, 1, num_blocks, max_num_seqs)
    return _scheduler(config, _kv_cache_config((None,), num_blocks))


def _vllm_config(
    folder: Path,
    transfer_config: dict[str, Any] | None,
    num_groups: int,
    num_blocks: int,
    max_num_seqs: int = 8,
) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_MODEL))
    complete_torch()
    config: Any = importlib.import_module("vllm.config")
    _register_model()
    model = _make(
        config.ModelConfig,
        model=str(folder),
        tokenizer=str(folder),
        dtype="float32",
        seed=0,
        max_model_len=512,
        skip_tokenizer_init=True,
        enforce_eager=True,
    )
    scheduler = _make(
        config.SchedulerConfig,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=512,
        max_model_len=512,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=False,
        scheduler_cls="kvview_vllm.scheduler.ViewScheduler",
    )
    cache = _make(
        config.CacheConfig,
        block_size=BLOCK_SIZE,
        gpu_memory_utilization=0.5,
        swap_space=0,
        cache_dtype="auto",
        enable_prefix_caching=True,
    )
    vllm_config = config.VllmConfig(
        model_config=model,
        scheduler_config=scheduler,
        cache_config=cache,
        device_config=config.DeviceConfig("cpu"),
        kv_transfer_config=transfer_config
        and _make(config.KVTransferConfig, **transfer_config, kv_load_failure_policy="recompute"),
    )
    vllm_config.cache_config.num_gpu_blocks = num_blocks
    if num_groups > 1:
        vllm_config.scheduler_config.disable_hybrid_kv_cache_manager = False
    return vllm_config


def complete_torch() -> None:
    """0.17 asks torch for names that 2.13 has no more; nothing here depends on the answers."""
    import torch

    cpu: Any = torch._C._cpu
    for name in ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        if not hasattr(cpu, name):
            setattr(cpu, name, lambda: False)


def refuses_several_groups() -> bool:
    """Whether this release takes one KV-cache group only beside a connector (0.11.0)."""
    base: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
    return not hasattr(base, "SupportsHMA")


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


def _register_layers(vllm_config: Any, layers: Sequence[str]) -> None:
    """Layers that say how their tensors lie: vLLM's OffloadingConnector asks up to 0.28."""
    kv_connector = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"
    kind = getattr(importlib.import_module(kv_connector), "Attention", None)  # up to 0.17
    if kind is None:
        name = "vllm.model_executor.layers.attention_layer_base"
        kind = importlib.import_module(name).AttentionLayerBase

    class Backend:
        @staticmethod
        def get_kv_cache_shape(
            num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *_: Any
        ) -> tuple[int, ...]:
            return (num_blocks, 2, block_size, num_kv_heads * head_size)

    class Layer(kind):  # type: ignore[misc,valid-type]
        def __init__(self) -> None: ...

        def get_attn_backend(self) -> Any:
            return Backend

        def get_kv_cache_spec(self, vllm_config: Any) -> Any: ...

    context = vllm_config.compilation_config.static_forward_context
    context.update({layer: Layer() for layer in layers})


def _kv_cache_config(windows: Sequence[int | None], num_blocks: int) -> Any:
    import torch

    interface: Any = importlib.import_module("vllm.v1.kv_cache_interface")
    specs = []
    for window in windows:
        kind = interface.FullAttentionSpec if window is None else interface.SlidingWindowSpec
        specs.append(
            _make(
                kind,
                block_size=BLOCK_SIZE,
                num_kv_heads=2,
                head_size=32,
                dtype=torch.float32,
                use_mla=False,
                sliding_window=window,
            )
        )
    layers = [f"model.layers.{index}.self_attn.attn" for index in range(len(specs))]
    page = specs[0].page_size_bytes
    tensor = _make(
        interface.KVCacheTensor,
        size=page * num_blocks,
        shared_by=layers,
        layers=layers[:1],
        layer_stride=page,
        block_stride=page,
    )
    groups = [
        interface.KVCacheGroupSpec([layer], spec) for layer, spec in zip(layers, specs, strict=True)
    ]
    return _make(
        interface.KVCacheConfig,
        num_blocks=num_blocks,
        kv_cache_tensors=[tensor],
        kv_cache_groups=groups,
    )


def _geometry(vllm_config: Any, kv_cache_config: Any) -> Any:
    from kvview_vllm.geometry import read_geometry

    return read_geometry(vllm_config, kv_cache_config)


def _scheduler(vllm_config: Any, kv_cache_config: Any) -> Any:
    from vllm.v1.core.sched.scheduler import Scheduler  # type: ignore[import-not-found]
    from vllm.v1.structured_output import StructuredOutputManager  # type: ignore[import-not-found]

    from kvview_vllm.scheduler import ViewScheduler

    values = {
        "vllm_config": vllm_config,
        "kv_cache_config": kv_cache_config,
        "structured_output_manager": StructuredOutputManager(vllm_config),
        "block_size": BLOCK_SIZE,
        "hash_block_size": BLOCK_SIZE,
        "log_stats": True,
    }
    return ViewScheduler(**_known(Scheduler, values))


def _worker_connector(vllm_config: Any, kv_cache_config: Any) -> Any:
    factory: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory")
    base: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
    create = factory.KVConnectorFactory.create_connector
    return _make(
        create,
        config=vllm_config,
        role=base.KVConnectorRole.WORKER,
        kv_cache_config=kv_cache_config,
    )


_hashes_are_ready = False


def make_request(request_id: str, tokens: list[int], max_tokens: int) -> Any:
    """A `Request` with greedy sampling."""
    global _hashes_are_ready
    utils: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
    try:
        hashing: Any = importlib.import_module("vllm.utils.hashing")
    except ImportError:
        hashing = importlib.import_module("vllm.utils")  # 0.11.0
    if not _hashes_are_ready:
        utils.init_none_hash(hashing.sha256)
        _hashes_are_ready = True
    sampling: Any = importlib.import_module("vllm.sampling_params")
    params = sampling.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    request: Any = importlib.import_module("vllm.v1.request")
    return _make(
        request.Request,
        request_id=request_id,
        prompt_token_ids=tokens,
        sampling_params=params,
        pooling_params=None,
        eos_token_id=2,
        block_hasher=utils.get_request_block_hasher(BLOCK_SIZE, hashing.sha256),
    )


def make_model_output(scheduler: Any, output: Any, transfers: Any = None) -> Any:
    """What a model runner answers: the same token for each request past its prompt."""
    outputs: Any = importlib.import_module("vllm.v1.outputs")
    request_ids = list(output.num_scheduled_tokens)
    sampled: list[Any] = []
    for request_id in request_ids:
        request = scheduler.requests[request_id]
        is_prefill = request.num_computed_tokens < request.num_tokens
        sampled.append([] if is_prefill else [7])
    wanted = inspect.signature(outputs.ModelRunnerOutput).parameters["sampled_token_ids"]
    if "ndarray" in str(wanted.annotation):  # 0.11.1 and 0.11.2
        import numpy as np

        sampled = [np.array(tokens, dtype=np.int64) for tokens in sampled]
    return _make(
        outputs.ModelRunnerOutput,
        req_ids=request_ids,
        req_id_to_index={name: index for index, name in enumerate(request_ids)},
        sampled_token_ids=sampled,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
        kv_connector_output=transfers,
        spec_token_ids=None,
    )


def can_fail_loads() -> bool:
    """Whether a worker of this release can say that a load failed (0.11.1)."""
    outputs: Any = importlib.import_module("vllm.v1.outputs")
    return "invalid_block_ids" in outputs.KVConnectorOutput.__dataclass_fields__
