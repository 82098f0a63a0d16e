"""Real inference on vLLM's CPU build, with and without a kvview connector.

    python tests/vllm/inference.py [--model llama|gemma] [--scenario NAME]

A tiny random model and its word-level tokenizer are made on the spot. The engine
serves some prompts, its prefix cache is reset, its whole KV cache is overwritten,
and the prompts are served again: only KV that the connector loads back can then
give the same greedy tokens. The connector is `examples/host_cache.py`, the very
file that the reference engine runs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[2] / "examples" / "host_cache.py"
SLOW = Path(__file__).with_name("faulty_connectors.py")
SCENARIOS = ("plain", "reload", "corrupt", "pressure", "abort", "multi", "async", "workers")
BLOCK_SIZE = 32  # the CPU attention wants a multiple
VOCABULARY = 512
PROMPTS = (
    list(range(10, 110)),
    list(range(50, 250)),
    [*range(10, 74), *range(300, 340)],  # shares two blocks with the first
)


@dataclass
class Result:
    """What one run showed.

    Args:
        tokens: Greedy tokens of each prompt, served cold.
        again: The same after the reset, with the KV cache overwritten.
        hits: Prompt tokens that were not computed the second time.
        offloaded: Blocks that the connector holds.
        leaked: Blocks that were not free at the end.
    """

    vllm: str = ""
    tokens: list[list[int]] = field(default_factory=list)
    again: list[list[int]] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    offloaded: int = 0
    leaked: int = 0


def prepare() -> None:
    """Set what the CPU build needs, before vLLM is imported."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",  # two workers would want a NUMA node each
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",  # our own function is called in the workers
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
    )


def make_model(kind: str, folder: Path) -> Path:
    """Write a tiny random model and its tokenizer.

    Args:
        kind: "llama" (one KV-cache group) or "gemma" (sliding window and full).
        folder: Where to.
    """
    import torch
    import transformers
    from tokenizers import (
        Tokenizer,
        models,
        pre_tokenizers,
    )

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
    }
    if kind == "llama":
        config = transformers.LlamaConfig(num_hidden_layers=2, torch_dtype="float32", **sizes)
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.Gemma3TextConfig(
            num_hidden_layers=4,
            sliding_window=64,
            layer_types=["sliding_attention", "full_attention"] * 2,
            query_pre_attn_scalar=32,
            tie_word_embeddings=False,
            **sizes,
        )
        model = transformers.Gemma3ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # far enough from zero that attention decides the tokens
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    words = {f"t{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="t0", bos_token="t1", eos_token="t2", pad_token="t3"
    ).save_pretrained(folder)
    return folder


def transfer_config(*targets: str, **options: Any) -> dict[str, Any]:
    """`kv_transfer_config` of one kvview connector, of several under MultiConnector."""
    children = [
        {
            "kv_connector": "KVViewConnector",
            "kv_connector_module_path": "kvview_vllm.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connector": target, "options": options},
        }
        for target in targets or (f"{EXAMPLE}:HostCacheConnector",)
    ]
    if len(children) == 1:
        return children[0]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children},
    }


def overwrite(worker: Any, half: str, value: int) -> int:
    """Fill tensors of a worker's connectors; runs in the worker's process.

    Args:
        worker: vLLM's worker.
        half: "gpu" for the KV cache, "host" for what the connector keeps.
        value: Of every byte.

    Returns:
        Tensors filled.
    """
    state: Any = importlib.import_module("vllm.distributed.kv_transfer")
    top = state.get_kv_transfer_group()
    tensors = [
        tensor
        for connector in getattr(top, "_connectors", [top])
        for tensor in getattr(connector._worker_side._half, half)
    ]
    for tensor in tensors:
        tensor.fill_(value)
    return len(tensors)


class Server:
    """One vLLM engine, its scheduler in this process, with or without a connector.

    Args:
        model: Folder of the model.
        config: `kv_transfer_config`; None serves without a connector.
        num_blocks: Blocks of the KV cache; those of one longest prompt must fit.
        more: Further arguments of `vllm.LLM`.
    """

    def __init__(
        self, model: Path, config: dict[str, Any] | None, num_blocks: int = 64, **more: Any
    ) -> None:
        vllm: Any = importlib.import_module("vllm")
        vllm_config: Any = importlib.import_module("vllm.config")
        if config is not None:
            more["kv_transfer_config"] = vllm_config.KVTransferConfig(**config)
        self.llm: Any = vllm.LLM(
            str(model),
            max_model_len=256,
            enforce_eager=True,
            dtype="float32",
            enable_prefix_caching=True,
            num_gpu_blocks_override=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=4,
            disable_log_stats=True,
            **more,
        )
        self.version: str = vllm.__version__
        self._params = vllm.SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)

    @property
    def scheduler(self) -> Any:
        """The engine's scheduler."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def connectors(self) -> list[Any]:
        """The scheduler's kvview connectors, children of MultiConnector included."""
        top = self.scheduler.connector
        return list(getattr(top, "_connectors", [top]))

    def serve(
        self, prompts: Sequence[Sequence[int]] = PROMPTS
    ) -> tuple[list[list[int]], list[int]]:
        """Greedy tokens and cached prompt tokens of each prompt, served one by one."""
        tokens, hits = [], []
        for prompt in prompts:
            output = self.llm.generate(
                [{"prompt_token_ids": list(prompt)}], self._params, use_tqdm=False
            )[0]
            tokens.append(list(output.outputs[0].token_ids))
            hits.append(output.num_cached_tokens or 0)
        return tokens, hits

    def serve_together(self, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[list[int]]:
        """The same in one batch."""
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts], self._params, use_tqdm=False
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def settle(self) -> None:
        """Step until the connector rests, as `vllm serve` does; `LLM` stops at the last answer."""
        while self.scheduler.has_requests():
            self.llm.llm_engine.step()

    def abort_while_loading(self, prompt: Sequence[int]) -> None:
        """Start a request whose prefix is loaded, and drop it before the load ends."""
        engine = self.llm.llm_engine
        engine.add_request("dropped", {"prompt_token_ids": list(prompt)}, self._params)
        engine.step()
        waiting = [request.status.name for request in self.scheduler.requests.values()]
        assert waiting == ["WAITING_FOR_REMOTE_KVS"], waiting
        engine.abort_request(["dropped"])
        assert self.leaked_blocks() > 0, "the load still writes"

    def forget(self) -> None:
        """Reset the prefix cache and overwrite every byte of the KV cache."""
        self.settle()
        assert self.llm.reset_prefix_cache() is not False, "the connector still holds blocks"
        assert all(self.llm.collective_rpc(overwrite, args=("gpu", 17)))

    def leaked_blocks(self) -> int:
        """Blocks that are not free, the null block aside."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


def run(scenario: str, model: Path) -> Result:
    """Serve, forget, serve again.

    Args:
        scenario: "plain" serves once, without a connector. "reload" loads back what
            was served; "corrupt" overwrites it first; "multi" has two connectors
            under MultiConnector. "pressure" serves batches from a KV cache and a host
            tier that are both too small. "abort" drops a request whose load is on.
            "async" schedules a step ahead of the one that runs; "workers" has two
            tensor-parallel workers, each with half of every page.
        model: Folder of the model.
    """
    example = f"{EXAMPLE}:HostCacheConnector"
    config = transfer_config(example, cpu_blocks=200)
    num_blocks = 64
    if scenario == "multi":
        config = transfer_config(example, example, cpu_blocks=200)
    elif scenario == "pressure":
        config, num_blocks = transfer_config(example, cpu_blocks=9), 13
    elif scenario == "abort":
        config = transfer_config(f"{SLOW}:SlowConnector", cpu_blocks=200)
    more: dict[str, Any] = {}
    if scenario == "async":
        scheduler = "kvview_vllm.scheduler.AsyncViewScheduler"
        more = {"async_scheduling": True, "scheduler_cls": scheduler}
    elif scenario == "workers":
        more = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    server = Server(model, None if scenario == "plain" else config, num_blocks, **more)
    if scenario == "async":
        assert type(server.scheduler).__name__ == "AsyncViewScheduler"
    result = Result(vllm=server.version)
    result.tokens, _ = server.serve()
    if scenario == "plain":
        return result
    server.settle()
    result.offloaded = sum(
        len(connector._scheduler_side.half.slots) for connector in server.connectors()
    )
    if scenario == "pressure":
        for _ in range(4):
            result.again = server.serve_together()
        _, result.hits = server.serve()
    else:
        server.forget()
        if scenario == "corrupt":
            assert all(server.llm.collective_rpc(overwrite, args=("host", 0)))
        if scenario == "abort":
            server.abort_while_loading(PROMPTS[1])
        result.again, result.hits = server.serve()
    server.settle()
    result.leaked = server.leaked_blocks()
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run one scenario and print its result as one line of JSON.

    Args:
        argv: The command line's arguments; those of the process if None.

    Returns:
        0 when the tokens are the same both times, nothing leaked, and something
        was loaded; 1 otherwise, as "plain" and "corrupt" must.
    """
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--model", choices=("llama", "gemma"), default="llama")
    parser.add_argument("--scenario", choices=SCENARIOS, default="reload")
    arguments = parser.parse_args(argv)
    prepare()
    with tempfile.TemporaryDirectory() as folder:
        result = run(arguments.scenario, make_model(arguments.model, Path(folder)))
    identical = result.tokens == result.again
    print(json.dumps({**asdict(result), "identical": identical}), flush=True)
    return 0 if identical and any(result.hits) and not result.leaked else 1


if __name__ == "__main__":
    sys.exit(main())
