"""Computes the KV-cache specifications of ``model_configs.json`` with real vLLM.

    python tests/vllm/model_specs.py [MODEL ...] [--write]

The configs have the fields of published ``config.json`` files that determine the KV cache; other
numbers (vocabulary, experts, the width of an MLP) are small, so that models are built in seconds.
Needs vLLM's CPU build. Each model is built with all its layers on the meta device (Gemma 3n on the
CPU, because it reads values while it is built), so that no weight is loaded. Some models are built
again in four processes, as ranks of tensor parallelism. The specification of each layer, the block
size that the platform aligns, the layout and the groups come from vLLM's functions, in the order in
which its engine calls them. ``--write`` pins the figures in ``tests/replay/model_specs.json``.

There are two differences from a server on this machine. The state of Mamba layers has the type of
the model (vLLM makes it float32 on CPUs with AVX512 BF16). Of a model for images only the language
half is built, because only this half has a KV cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPLAY = Path(__file__).parents[1] / "replay"
CONFIGS: dict[str, dict[str, Any]] = json.loads((REPLAY / "model_configs.json").read_text())
PINNED = REPLAY / "model_specs.json"
RELEASE = "0.32.0"
OF_TEXT = {"gemma3": "Gemma3ForCausalLM", "llama4": "Llama4ForCausalLM"}
"""The class of the language half of a model for images."""
ON_CPU = ("Gemma 3n E4B",)
NUM_RANKS = 4
OF_RANKS = ("Llama 3.1 8B", "DeepSeek V3", "Qwen3-Next 80B", "Jamba v0.1", "Falcon-H1 7B")
"""Models that four ranks share: heads and states divided, copied, and in groups of their own."""


def specs_of(name: str, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """Build a model, and return the figures of one rank as JSON has them.

    Args:
        name: One of ``CONFIGS``.
        rank: Of this process.
        ranks: Of tensor parallelism, each in a process of its own.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.utils import (
        get_supported_kv_cache_layouts,
        resolve_kv_cache_layout,
    )
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    config = CONFIGS[name]
    if config["model_type"] in OF_TEXT:
        text = {"vocab_size": 1024, "torch_dtype": config["torch_dtype"], **config["text_config"]}
        config = {**text, "architectures": [OF_TEXT[config["model_type"]]]}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        vllm_config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            tensor_parallel_size=ranks,
        ).create_engine_config()
        with set_current_vllm_config(vllm_config):
            if not torch.distributed.is_initialized():
                place = os.environ.get("KVVIEW_RENDEZVOUS") or tempfile.mkdtemp()
                parallel_state.init_distributed_environment(
                    ranks, rank, f"file://{place}/rendezvous", rank, "gloo"
                )
            parallel_state.destroy_model_parallel()  # experts have a group of their own
            parallel_state.initialize_model_parallel(ranks)
            with torch.device("cpu" if name in ON_CPU else "meta"):
                initialize_model(vllm_config)
    current_platform.update_block_size_for_backend(vllm_config)
    specs = get_kv_cache_spec(vllm_config)
    context = vllm_config.compilation_config.static_forward_context
    backends = list({context[layer].get_attn_backend() for layer in specs})
    layouts = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
    resolve_kv_cache_layout(vllm_config, [layouts], specs.values())
    groups = kv_cache_utils.get_kv_cache_groups(vllm_config, dict(specs))
    layers = Counter(json.dumps(_layer(spec)) for spec in specs.values())
    return {
        "block_size": vllm_config.cache_config.block_size,
        "layers": [[count, *json.loads(layer)] for layer, count in layers.items()],
        "groups": [
            [
                len(group.layer_names),
                group.kv_cache_spec.block_size,
                group.kv_cache_spec.page_size_bytes,
            ]
            for group in groups
        ],
        "block_bytes": kv_cache_utils._pool_bytes_per_block(vllm_config, groups),
    }


def _layer(spec: Any) -> list[Any]:
    """Return the kind of a layer, its window, and the bytes of a token or a state."""
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    if isinstance(spec, MambaSpec):
        return ["state", None, spec.real_page_size_bytes]
    size, rest = divmod(spec.unpadded_page_size_bytes, spec.block_size)
    assert not rest
    if isinstance(spec, SlidingWindowSpec):
        return ["window", spec.sliding_window, size]
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return ["chunked", spec.attention_chunk_size, size]
    return ["full", None, size]


def figures_of(names: Sequence[str], rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """Return the figures of several models."""
    import torch

    # Otherwise the platform of this machine decides the type of states, not the model.
    torch.cpu._is_avx512_bf16_supported = lambda: False
    suffix = f", tp {ranks}" if ranks > 1 else ""
    return {f"{name}{suffix}": specs_of(name, rank, ranks) for name in names}


def figures_of_ranks(names: Sequence[str], ranks: int) -> dict[str, Any]:
    """Return the figures of the first of several ranks, which are processes."""
    with tempfile.TemporaryDirectory() as place:
        environment = {**os.environ, "KVVIEW_RENDEZVOUS": place, "VLLM_DIST_IDENT": "kvview"}
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, *names, f"--rank={rank}/{ranks}"],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        outputs = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes)
    figures: dict[str, Any] = json.loads(outputs[0])
    return figures


def main(arguments: list[str]) -> None:
    names = [argument for argument in arguments if not argument.startswith("--")]
    place = next((a.removeprefix("--rank=") for a in arguments if a.startswith("--rank=")), "")
    if place:
        rank, ranks = map(int, place.split("/"))
        figures = figures_of(names, rank, ranks)
    else:
        figures = figures_of(names or list(CONFIGS))
        figures |= {} if names else figures_of_ranks(OF_RANKS, NUM_RANKS)
    lines = [f"  {json.dumps(name)}: {json.dumps(figure)}" for name, figure in figures.items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    if "--write" in arguments:
        PINNED.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["HF_HUB_OFFLINE"] = "1"
    main(sys.argv[1:])
