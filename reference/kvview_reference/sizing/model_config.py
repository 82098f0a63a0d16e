"""The layers in a ``config.json`` of Hugging Face.

1. The language part of a model with image input is in ``text_config``, which may lack any field
   with the default value of its class.
2. Each number and name is checked when it is read.
3. A field that may change the KV cache and was not read is an error, because a wrong size would
   go unnoticed.

:data:`~kvview_reference.sizing.model_facts.FACTS` has the differences between model types.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvview.errors import ConfigError
from kvview_reference.sizing.fields import Fields, shown
from kvview_reference.sizing.layer_rules import list_kinds
from kvview_reference.sizing.model import (
    Kind,
    LayerSet,
    ModelShape,
    attention_layers,
    dtype_name,
    state_layers,
)
from kvview_reference.sizing.model_facts import CUES, FACTS, HARMLESS, PLAIN

_NESTED = ("text_config", "llm_config", "language_config")
_DTYPES = ("dtype", "torch_dtype")
LONGEST_NAME = 80
_MAX_LAYERS = 10_000
_CACHE_DTYPES = {"fp8": "fp8", "nvfp4": "nvfp4", 8: "fp8", 4: "nvfp4"}
_INSTEAD = 'describe its layers in a file with "groups" instead (docs/sizing.md)'


def read_config(config: Mapping[str, Any], where: str, dtype: str | None, tp: int) -> ModelShape:
    """Read the layers of a ``config.json``.

    Args:
        config: The file.
        where: Name of the file, for error messages.
        dtype: Type of the KV cache; None for the type in the file.
        tp: Number of ranks that share a layer.

    Raises:
        ConfigError: A field is missing, wrong or not understood; the message names it.
    """
    return _Reader(config, where, dtype, tp).shape()


class _Reader:
    def __init__(self, config: Mapping[str, Any], where: str, dtype: str | None, tp: int) -> None:
        self._where, self._tp = where, tp
        self._outer = Fields(config, where)
        halves = [config[name] for name in _NESTED if isinstance(config.get(name), dict)]
        nested: Mapping[str, Any] = halves[0] if halves else {}
        outer_type = self._outer.text("model_type", "")
        self._type = Fields(nested, where).text("model_type", "") or outer_type
        if self._type not in FACTS and f"{self._type}_text" in FACTS:
            self._type = f"{self._type}_text"
        self._facts = FACTS.get(self._type, PLAIN)
        self._fields = Fields({**self._facts.defaults, **(nested or config)}, where)
        self._model_dtype = self._read_model_dtype()
        self._dtype = dtype_name(dtype) if dtype else self._quantised() or self._model_dtype

    def shape(self) -> ModelShape:
        kinds = self._kinds()
        layers = tuple(
            self._states(count) if kind == "state" else self._attention(kind, count)
            for kind, count in Counter(kinds).items()
        )
        self._require_understood()
        if not layers:
            raise ConfigError(f"{self._where}: no layer of this model has a KV cache")
        name = self._outer.text("_name_or_path", "") or self._type
        return ModelShape(layers, self._tp, name[:LONGEST_NAME])

    # --- the kinds of the layers ---

    def _kinds(self) -> list[Kind]:
        """List the kinds of the layers, without layers that read the cache of another layer."""
        pattern = self._fields.get("hybrid_override_pattern")
        num_layers = self._fields.number(
            "num_hidden_layers",
            most=_MAX_LAYERS,
            missing=len(pattern) if isinstance(pattern, str) and pattern else None,
        )
        lists = [list_kinds(rule, self._fields, num_layers) for rule in self._facts.rules]
        stored = next((each for each in lists if each is not None), None)
        if stored is None:
            names = " or ".join(field for _, field, *_ in self._facts.rules)
            raise ConfigError(f"{self._where}: {names} is missing")
        if len(stored) != num_layers:
            raise ConfigError(
                f"{self._where}: {len(stored)} layers are listed, but num_hidden_layers is "
                f"{num_layers}"
            )
        # The last layers may read the cache of earlier layers.
        shared = self._fields.number("num_kv_shared_layers", least=0, most=num_layers, missing=0)
        kinds: list[Kind] = []
        for layer in stored[: num_layers - shared]:
            if layer == "full and state":
                kinds += ["full", "state"]
            elif layer != "nothing":
                is_bounded = layer in ("window", "chunked") and self._tokens(layer) is not None
                kinds.append(layer if is_bounded or layer == "state" else "full")
        return kinds

    def _tokens(self, kind: Kind) -> int | None:
        """Read the tokens of a window or chunk; None if the file has no window or chunk."""
        if kind == "chunked":
            return self._fields.number("attention_chunk_size", missing=0) or None
        uses = self._fields.get("use_sliding_window")
        window = self._fields.number("sliding_window", least=0, missing=0)
        if kind != "window" or not window or uses is False:
            return None
        return window + self._facts.extra_window

    # --- the sizes of the layers ---

    def _attention(self, kind: Kind, count: int) -> LayerSet:
        if self._facts.is_latent:
            heads = 1
            size = self._fields.number("kv_lora_rank") + self._fields.number("qk_rope_head_dim")
        else:
            heads, size = self._kv_heads(kind), self._head_size(kind)
        return attention_layers(
            kind,
            count,
            heads,
            size,
            dtype=self._dtype,
            tp=self._tp,
            tokens=self._tokens(kind),
            is_latent=self._facts.is_latent,
        )

    def _kv_heads(self, kind: Kind) -> int:
        name = self._name_for("num_key_value_heads", kind)
        if self._fields.get(name) is None:
            name = "num_attention_heads"
        return self._fields.number(name)

    def _head_size(self, kind: Kind) -> int:
        name = self._name_for("head_dim", kind)
        if name != "head_dim":
            return self._fields.number(name)
        if size := self._fields.number(name, least=0, missing=0):
            return size
        hidden = self._fields.number("hidden_size")
        heads = self._fields.number("num_attention_heads", most=hidden)
        return hidden // heads

    def _name_for(self, name: str, kind: Kind) -> str:
        """Find the field of a number that may differ between full attention and windows."""
        other = self._facts.global_fields.get(name, "")
        if kind == "full" and self._fields.get(other) is not None:
            return other
        return self._facts.head_size if name == "head_dim" else name

    def _states(self, count: int) -> LayerSet:
        state = self._facts.state
        if state is None:
            raise ConfigError(
                f"{self._where}: kvview does not know the linear attention of model_type "
                f"{shown(self._type)}; {_INSTEAD}"
            )
        sizes = {
            name: self._fields.number(field)
            for name, field in state.sizes.items()
            if self._fields.get(field) not in (None, "auto")
        }
        sizes["hidden"] = self._fields.number("hidden_size")
        dtype = self._fields.text(state.dtype, "") if state.dtype else ""

        def missing(name: str) -> ConfigError:
            return ConfigError(f"{self._where}: {state.sizes.get(name, name)} is missing")

        return state_layers(
            state.kind,
            sizes,
            count=count,
            conv_dtype=self._model_dtype,
            state_dtype=dtype_name(dtype) if dtype else self._model_dtype,
            tp=self._tp,
            missing=missing,
        )

    # --- types ---

    def _read_model_dtype(self) -> str:
        """Read the type of the weights; vLLM runs float32 weights in bfloat16."""
        named = [
            fields.text(name, "") for fields in (self._fields, self._outer) for name in _DTYPES
        ]
        dtype = dtype_name(next(filter(None, named), "bfloat16"))
        return "bfloat16" if dtype in ("float32", "float") else dtype

    def _quantised(self) -> str | None:
        """Read the type of a KV cache that was quantised with the weights."""
        quantised = self._outer.get("quantization_config")
        if quantised is None:
            quantised = self._fields.get("quantization_config") or {}
        scopes = [quantised]
        if isinstance(quantised, dict) and "quantization" in quantised:
            scopes.append(quantised["quantization"])
        if not all(isinstance(scope, dict) for scope in scopes):
            raise ConfigError(
                f"{self._where}: quantization_config must be an object, got {shown(quantised)}"
            )
        found = [(name, v) for scope in scopes for name, v in scope.items() if "kv_cache" in name]
        dtype: str | None = None
        for name, value in found:
            if value is None:
                continue
            scheme = value
            if isinstance(value, dict) and value.get("type") == "float":
                scheme = value.get("num_bits")
            key = scheme.lower() if isinstance(scheme, str) else scheme
            dtype = _CACHE_DTYPES.get(key) if type(key) in (str, int) else None
            if dtype is None:
                raise ConfigError(
                    f"{self._where}: quantization_config.{name[:LONGEST_NAME]} has the unknown "
                    f"value {shown(value)}; pass --dtype"
                )
        return dtype

    # --- the rest ---

    def _require_understood(self) -> None:
        """Refuse a file that has an unread field which may change the cache."""
        has_window = self._tokens("window") is not None
        for name, value in self._fields.unread():
            if not value or name in self._facts.ignored or HARMLESS.search(name):
                continue
            if CUES.search(name) and (has_window or name != "max_window_layers"):
                raise ConfigError(
                    f"{self._where}: {name[:LONGEST_NAME]} is an unknown field for model_type "
                    f"{shown(self._type)} and may change the KV cache; {_INSTEAD}"
                )
