"""The properties in which two requests, or two engines, may differ, as a table.

Source: ``generate_block_hash_extra_keys`` in vllm/v1/core/kv_cache_utils.py, and the fields of
``VllmConfig`` that decide the bytes of a page, 0.11.0 to 0.33.0.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvview_vllm.releases.compat.calls import known_arguments
from kvview_vllm.releases.cpu.worker_caches import CacheKind, layouts

PROMPT = tuple(range(10, 74))
"""Tokens of the first request: four blocks of 16."""

_LONGEST = 60  # characters of an argument in a report
_ITEM_TOKENS = range(4, 12)
"""Positions of the multimodal item, in the first block."""


@dataclass(frozen=True)
class EngineSettings:
    """The settings of an engine that decide the bytes of its KV.

    Args:
        model: Name of the model.
        revision: Revision of the weights; vLLM does not pass weights to a connector.
        dtype: Dtype of the model, and by default of the KV cache.
        cache_dtype: Dtype of the KV cache; ``"auto"`` stands for the dtype of the model.
        block_size: Tokens.
        hash_algorithm: Name of vLLM's hash function.
        hash_seed: ``PYTHONHASHSEED``.
        ranks: Tensor-parallel and pipeline-parallel size.
        rank: Of the worker.
        layout: Name of the memory layout; empty for the default of the release.
        kind: Kind of the attention layers; None for layers with FlashAttention.
    """

    model: str = "model-a"
    revision: str = "revision-a"
    dtype: str = "float32"
    cache_dtype: str = "auto"
    block_size: int = 16
    hash_algorithm: str = "sha256"
    hash_seed: str = "0"
    ranks: tuple[int, int] = (1, 1)
    rank: int = 0
    layout: str = ""
    kind: CacheKind | None = None

    def fill(self, value: Any) -> Any:
        """Replace ``{model}``, ``{revision}`` and the names of other settings by their values.

        Args:
            value: Options, or a part of them.
        """
        if isinstance(value, str):
            for each in fields(self):
                value = value.replace(f"{{{each.name}}}", str(getattr(self, each.name)))
            return value
        if isinstance(value, Mapping):
            return {key: self.fill(part) for key, part in value.items()}
        return [self.fill(part) for part in value] if isinstance(value, list) else value


Arguments = Callable[[], Mapping[str, Any]]
"""Makes arguments of vLLM's ``Request``; called once the release is prepared."""


@dataclass(frozen=True)
class Pair:
    """Two requests: the KV of the first request is stored, and the second request needs its own KV.

    Args:
        name: The property in which the requests differ.
        num_same_tokens: Number of first tokens for which the model computes the same KV in both
            requests.
        first: The first request.
        second: The second request.
        first_engine: Settings of the engine that serves the first request.
        second_engine: Settings of a second engine, which starts after the first engine has ended;
            None if one engine serves both requests.
    """

    name: str
    num_same_tokens: int
    first: Arguments = dict
    second: Arguments = dict
    first_engine: EngineSettings = EngineSettings()
    second_engine: EngineSettings | None = None

    @property
    def is_of_layouts(self) -> bool:
        """Whether the pair tests a memory layout instead of keys."""
        return self.first_engine.kind is not None

    def __str__(self) -> str:
        """Return the two requests, each as its differences from a plain request."""
        second = self.second_engine or self.first_engine
        texts = (
            _described(self.first(), self.first_engine),
            _described(self.second(), second),
        )
        return " and then ".join(texts)


def _described(arguments: Mapping[str, Any], engine: EngineSettings) -> str:
    plain = EngineSettings()
    settings = {
        each.name: getattr(engine, each.name)
        for each in fields(engine)
        if getattr(engine, each.name) != getattr(plain, each.name)
    }
    texts = [f"{name}={_short(value)}" for name, value in (*settings.items(), *arguments.items())]
    return ", ".join(texts) or "the plain request"


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _lora(name: str, number: int, path: str) -> Mapping[str, Any]:
    kind: Any = importlib.import_module("vllm.lora.request").LoRARequest
    return {"lora_request": kind(name, number, path)}


def _item(digest: str) -> Mapping[str, Any]:
    inputs: Any = importlib.import_module("vllm.multimodal.inputs")
    place = inputs.PlaceholderRange(offset=_ITEM_TOKENS.start, length=len(_ITEM_TOKENS))
    values = {
        "data": None,
        "modality": "image",
        "identifier": digest,
        "mm_position": place,
        "mm_hash": digest,
    }
    kind = inputs.MultiModalFeatureSpec
    return {"mm_features": [kind(**known_arguments(kind, values))]}


def _embeds(value: float) -> Mapping[str, Any]:
    import torch

    embeds = torch.full((len(PROMPT), 8), value)
    return {"prompt_token_ids": None, "prompt_embeds": embeds}


def _tokens(*changed: int) -> Mapping[str, Any]:
    """Return the prompt with other tokens at some positions."""
    return {"prompt_token_ids": [7 if i in changed else t for i, t in enumerate(PROMPT)]}


def _adapter(name: str, number: int, path: str) -> Arguments:
    return lambda: _lora(name, number, path)


def _salt(salt: str) -> Arguments:
    return lambda: {"cache_salt": salt}


def _image(digest: str) -> Arguments:
    return lambda: _item(digest)


def _embedding(value: float) -> Arguments:
    return lambda: _embeds(value)


_ALL = len(PROMPT)
_TWO_RANKS = EngineSettings(ranks=(2, 1))
_A = _adapter("a", 1, "/a")

RESTART = Pair("a restart", _ALL, second_engine=EngineSettings())
"""A restart with the same settings, in another process."""

_PAIRS = (
    Pair("the same request", _ALL),
    Pair("a token of the first block", 0, second=lambda: _tokens(3)),
    Pair("a token of the third block", 32, second=lambda: _tokens(40)),
    Pair("one LoRA adapter", _ALL, _A, _A),
    Pair("a LoRA adapter or none", 0, second=_A),
    Pair("two LoRA adapters", 0, _A, _adapter("b", 2, "/b")),
    Pair("a LoRA name with other weights", 0, _A, _adapter("a", 1, "/other")),
    Pair("one cache salt", _ALL, _salt("one"), _salt("one")),
    Pair("a cache salt or none", 0, second=_salt("one")),
    Pair("two cache salts", 0, _salt("one"), _salt("two")),
    Pair("one multimodal item", _ALL, _image("one"), _image("one")),
    Pair("two multimodal items", 0, _image("one"), _image("two")),
    Pair("one prompt embedding", _ALL, _embedding(0.5), _embedding(0.5)),
    Pair("two prompt embeddings", 0, _embedding(0.5), _embedding(0.25)),
    RESTART,
    Pair("another hash function", _ALL, second_engine=EngineSettings(hash_algorithm="sha256_cbor")),
    Pair("another hash seed", _ALL, second_engine=EngineSettings(hash_seed="1")),
    Pair("another model", 0, second_engine=EngineSettings(model="model-b")),
    Pair("another revision of the weights", 0, second_engine=EngineSettings(revision="revision-b")),
    Pair("another dtype", 0, second_engine=EngineSettings(dtype="bfloat16")),
    Pair("a quantised cache", 0, second_engine=EngineSettings(cache_dtype="fp8")),
    Pair("another block size", 0, second_engine=EngineSettings(block_size=32)),
    Pair("another tensor-parallel size", 0, second_engine=_TWO_RANKS),
    Pair(
        "another tensor-parallel rank",
        0,
        first_engine=_TWO_RANKS,
        second_engine=EngineSettings(ranks=(2, 1), rank=1),
    ),
    Pair("another pipeline-parallel size", 0, second_engine=EngineSettings(ranks=(1, 2))),
)


def all_pairs() -> list[Pair]:
    """Return every pair that the installed release supports, in the order of the report."""
    other_layout = EngineSettings(layout=layouts()[1])
    return [*_PAIRS, Pair("another memory layout", 0, second_engine=other_layout)]
