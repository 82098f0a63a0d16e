"""SpoolCache ends the engine for a model that is not multimodal (spoolcache 0.3.0, vLLM 0.33.0).

This script needs no GPU, no model and no kvview. ``python spoolcache_text_models.py`` computes the
identity of a deployment whose model has no multimodal configuration. Expected: an identity.
"""

from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from vllm.config import ModelConfig

spoolcache: Any = import_module("spoolcache.vllm.connector")

model: Any = SimpleNamespace(multimodal_config=None)  # as ModelConfig leaves it for text
model.get_multimodal_config = partial(ModelConfig.get_multimodal_config, model)
config: Any = SimpleNamespace(
    model_config=model,
    parallel_config=SimpleNamespace(),
    cache_config=SimpleNamespace(),
    compute_hash=lambda: "hash",
)
try:
    print(
        spoolcache._build_deployment_identity(
            config,
            SimpleNamespace(),
            model_namespace_sha256="0" * 64,
            chunk_tokens=256,
            vllm_version="0.33.0",
            vllm_build_sha256="0" * 64,
        )
    )
except Exception as error:
    print(f"{type(error).__name__}: {error}; because of {error.__cause__!r}")
