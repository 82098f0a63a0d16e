"""How many bytes the KV of a model takes: the formula that turns blocks into GiB."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvview.errors import ConfigError

_DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2, "fp8": 1}
_OWN_FIELDS = ("layers", "kv_heads", "head_size", "dtype", "tp", "name")
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"(?P<number>\d+(\.\d*)?)\s*(?P<unit>[KMGT]iB|%|)")


@dataclass(frozen=True)
class ModelShape:
    """What the size of a model's KV depends on.

    Args:
        layers: That have KV; all of them count as full attention.
        kv_heads: Key-value heads of a layer; with multi-head latent attention 1.
        head_size: Elements of a head; of the latent vector and its rotary part together.
        dtype: Of the KV cache.
        tp: Ranks that share a layer. Where there are more ranks than heads, ranks hold
            copies; a latent vector is copied to each.
        is_latent: Whether there is one vector for key and value (MLA).
        name: For people.
    """

    layers: int
    kv_heads: int
    head_size: int
    dtype: str = "bfloat16"
    tp: int = 1
    is_latent: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        for field in ("layers", "kv_heads", "head_size", "tp"):
            value = getattr(self, field)
            if type(value) is not int or value < 1:
                raise ConfigError(f"model: {field} must be a positive whole number, got {value!r}")
        if max(self.kv_heads, self.tp) % min(self.kv_heads, self.tp):
            raise ConfigError(
                f"model: {self.kv_heads} KV heads do not go evenly onto {self.tp} ranks (tp)"
            )
        self.dtype_bytes  # noqa: B018 - raises

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one element."""
        name = str(self.dtype).removeprefix("torch.")
        if name.startswith(("fp8", "float8")):
            name = "fp8"
        if name not in _DTYPE_BYTES:
            known = ", ".join(_DTYPE_BYTES)
            raise ConfigError(f"model: unknown dtype {self.dtype!r}; known: {known}")
        return _DTYPE_BYTES[name]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV, all ranks together."""
        parts = 1 if self.is_latent else 2
        heads = max(self.kv_heads, self.tp)
        return parts * self.layers * heads * self.head_size * self.dtype_bytes

    def formula(self, block_size: int) -> str:
        """How the bytes of a block come about, as a line."""
        what = "1 (latent)" if self.is_latent else "2 (K and V)"
        heads = f"{max(self.kv_heads, self.tp)} KV heads"
        if self.tp > self.kv_heads:
            heads += f" ({self.kv_heads} on {self.tp} ranks: copies)"
        return (
            f"{what} x {self.layers} layers x {heads} x {self.head_size} elements x "
            f"{self.dtype_bytes} bytes = {self.token_bytes:,} bytes a token; x {block_size} tokens "
            f"= {block_size * self.token_bytes / 2**20:,.2f} MiB a block"
        )


def read_model(path: str | None, given: Mapping[str, Any]) -> ModelShape | None:
    """The shape that a file and options give; None when neither is there.

    Args:
        path: JSON: either ``layers``, ``kv_heads``, ``head_size`` and, if they differ from
            the defaults, ``dtype``, ``tp`` and ``name``; or a ``config.json`` as Hugging Face
            has it.
        given: The same fields, None where not given; they win.

    Raises:
        ConfigError: The file cannot be read, or something is missing or impossible.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if path is None and not given:
        return None
    fields: dict[str, Any] = {}
    if path is not None:
        try:
            config = json.loads(Path(path).read_bytes())
        except OSError as error:
            raise ConfigError(f"--model {path!r}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--model {path!r}: not JSON: {error}") from None
        if not isinstance(config, dict):
            raise ConfigError(f"--model {path!r}: not a JSON object")
        fields = _own(path, config) if "layers" in config else _hugging_face(path, config)
    fields |= given
    missing = [name for name in ("layers", "kv_heads", "head_size") if name not in fields]
    if missing:
        options = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise ConfigError(f"the size of a block needs {options} too, or --model FILE")
    return replace(ModelShape(1, 1, 1), **fields)


def _own(path: str, config: dict[str, Any]) -> dict[str, Any]:
    unknown = config.keys() - set(_OWN_FIELDS)
    if unknown:
        raise ConfigError(
            f"--model {path!r}: unknown {', '.join(sorted(unknown))}; known: "
            f"{', '.join(_OWN_FIELDS)}"
        )
    return config


def _hugging_face(path: str, config: dict[str, Any]) -> dict[str, Any]:
    nested = config.get("text_config")  # of models that see pictures too
    text = {**config, **(nested if isinstance(nested, dict) else {})}
    try:
        fields: dict[str, Any] = {
            "name": str(config.get("_name_or_path") or config.get("model_type") or ""),
            "layers": text["num_hidden_layers"],
            "dtype": text.get("dtype") or text.get("torch_dtype") or "bfloat16",
        }
        if text.get("kv_lora_rank"):
            size = text["kv_lora_rank"] + text["qk_rope_head_dim"]
            return fields | {"kv_heads": 1, "head_size": size, "is_latent": True}
        heads = text["num_attention_heads"]
        fields["kv_heads"] = text.get("num_key_value_heads") or heads
        fields["head_size"] = text.get("head_dim") or text["hidden_size"] // heads
    except KeyError as error:
        raise ConfigError(
            f"--model {path!r}: neither a config.json of Hugging Face (no {error}) nor "
            f"an object of {', '.join(_OWN_FIELDS)}"
        ) from None
    return fields


def parse_size(text: str, option: str, block_bytes: int | None, num_blocks: int) -> int:
    """A size of a tier, in blocks.

    Args:
        text: ``"5000"`` blocks, ``"64GiB"``, or ``"50%"`` of the trace's different blocks.
        option: Named in the error.
        block_bytes: None where no model is known.
        num_blocks: Different blocks of the trace.

    Raises:
        ConfigError: It is none of them, or in bytes while no model is known.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (not match["unit"] and not match["number"].isdigit()):
        raise ConfigError(f"{option} {text!r}: expected blocks, GiB or %: 5000, 64GiB, 50%")
    number = float(match["number"])
    if match["unit"] == "%":
        return round(num_blocks * number / 100)
    if match["unit"] and block_bytes is None:
        raise ConfigError(f"{option} {text!r}: bytes need a model: --model, or --layers and so on")
    return int(number * _UNITS[match["unit"]] / (block_bytes or 1)) if match["unit"] else int(text)
