"""``--model FILE``: a ``config.json`` of Hugging Face, or a list of layers written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_args

from kvview.errors import ConfigError, line_of
from kvview.input_files import read_file
from kvview_reference.sizing.fields import Fields, shown
from kvview_reference.sizing.model import Kind, LayerSet, ModelShape, attention_layers, dtype_name
from kvview_reference.sizing.model_config import LONGEST_NAME, read_config

_FIELDS = ("groups", "dtype", "tp", "name")
_GROUP_FIELDS = ("kind", "layers", "kv_heads", "head_size", "tokens", "state_bytes")
_MOST_BYTES = 2**24  # a config.json has less than a hundredth of it


def read_model(path: str, dtype: str | None = None, tp: int | None = None) -> ModelShape:
    """Read a model.

    Args:
        path: A ``config.json`` of Hugging Face, or JSON with ``groups`` of layers.
        dtype: Type of the KV cache; None for the type in the file.
        tp: Number of ranks that share a layer; None for the number in the file, by default 1.

    Raises:
        ConfigError: The file cannot be read, or a field is missing, wrong or unknown.
    """
    where = f"--model {path!r}"
    try:
        config = json.loads(read_file(path, _MOST_BYTES))
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{where}: not a JSON object")
    if "groups" not in config:
        return read_config(config, where, dtype, tp or 1)
    _require_known(config, _FIELDS, where)
    given = {"dtype": dtype, "tp": tp}
    config |= {name: value for name, value in given.items() if value is not None}
    return _read_groups(Fields(config, where))


def _require_known(config: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    if unknown := config.keys() - set(known):
        names = line_of(", ".join(sorted(unknown)))
        raise ConfigError(f"{where}: unknown {names}; known: {', '.join(known)}")


def _read_groups(fields: Fields) -> ModelShape:
    tp = fields.number("tp", missing=1)
    dtype = fields.text("dtype", "bfloat16")
    dtype_name(dtype)
    groups = fields.get("groups")
    if not isinstance(groups, list) or not groups or not all(isinstance(g, dict) for g in groups):
        raise ConfigError(f"{fields.where}: groups must be a list of objects, got {shown(groups)}")
    layers: dict[str, LayerSet] = {}
    for number, group in enumerate(groups):
        place = f"{fields.where}: groups[{number}]"
        _require_known(group, _GROUP_FIELDS, place)
        inner = Fields(group, place)
        kind = inner.text("kind", "full")
        if kind not in get_args(Kind):
            raise ConfigError(
                f"{place}: kind {shown(kind)} is unknown; known: {', '.join(get_args(Kind))}"
            )
        if kind in layers:
            raise ConfigError(f"{place}: a group of kind {kind} exists already; use each kind once")
        layers[kind] = _read_layers(inner, kind, dtype, tp)
    return ModelShape(tuple(layers.values()), tp, fields.text("name", "")[:LONGEST_NAME])


def _read_layers(fields: Fields, kind: Any, dtype: str, tp: int) -> LayerSet:
    count = fields.number("layers")
    if kind == "state":
        size = fields.number("state_bytes")
        if size % tp:
            raise ConfigError(
                f"{fields.where}: state_bytes {size} is not a multiple of the {tp} ranks (tp)"
            )
        return LayerSet(kind, count, 0, size // tp, None, f"{count} layers x {size:,} bytes")
    tokens = fields.number("tokens") if kind in ("window", "chunked") else None
    heads, head_size = fields.number("kv_heads"), fields.number("head_size")
    return attention_layers(kind, count, heads, head_size, dtype=dtype, tp=tp, tokens=tokens)
