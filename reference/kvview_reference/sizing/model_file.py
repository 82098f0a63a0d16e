"""``--model FILE`` and the options beside it: three ways to give the layers of a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from kvview.errors import ConfigError
from kvview_reference.sizing.fields import Fields, printable, shown
from kvview_reference.sizing.model import (
    Kind,
    LayerSet,
    ModelShape,
    attention_layers,
    dtype_name,
)
from kvview_reference.sizing.model_config import read_config

_OWN_FIELDS = ("layers", "kv_heads", "head_size", "dtype", "tp", "name")
_GROUP_FIELDS = ("kind", "layers", "kv_heads", "head_size", "tokens", "state_bytes")
_SIZES = ("layers", "kv_heads", "head_size")
_MOST_BYTES = 2**24  # no config.json has a hundredth of it


def read_model(path: str | None, given: Mapping[str, Any]) -> ModelShape | None:
    """The model that a file and options give; None when neither is there.

    Args:
        path: JSON: ``layers``, ``kv_heads`` and ``head_size``; or ``groups`` of such layers; or
            a ``config.json`` as Hugging Face has it.
        given: ``layers``, ``kv_heads``, ``head_size``, ``dtype``, ``tp``; None where not given.
            They replace the file's.

    Raises:
        ConfigError: The file cannot be read, or something is missing, wrong or not understood.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if path is None:
        return _own({}, given, "model") if given else None
    where = f"--model {path!r}"
    config = _load(path, where)
    if "layers" in config:
        _require_known(config, _OWN_FIELDS, where)
        return _own(config, given, where)
    for name in _SIZES:
        if name in given:
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} and a --model that lists its layers cannot both be given")
    if "groups" in config:
        _require_known(config, ("groups", *_OWN_FIELDS[3:]), where)
        return _own_groups({**config, **given}, where)
    tp = Fields(given, "model").number("tp", missing=1)
    return read_config(config, where, given.get("dtype"), tp)


def _load(path: str, where: str) -> dict[str, Any]:
    try:
        if not Path(path).is_file() and Path(path).exists():  # a pipe or /dev/zero never ends
            raise ConfigError(f"{where}: not a regular file")
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ConfigError(f"{where}: larger than {_MOST_BYTES // 2**20} MiB, so no config.json")
        config = json.loads(text)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{where}: not a JSON object")
    return config


def _require_known(config: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    if unknown := config.keys() - set(known):
        names = printable(", ".join(sorted(unknown)))
        raise ConfigError(f"{where}: unknown {names}; known: {', '.join(known)}")


def _own(config: Mapping[str, Any], given: Mapping[str, Any], where: str) -> ModelShape:
    fields = Fields({**config, **given}, where)
    missing = [name for name in _SIZES if fields.get(name) is None]
    if missing:
        options = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise ConfigError(f"the size of a block needs {options} too, or --model FILE")
    tp = fields.number("tp", missing=1)
    layers = _layers(fields, "full", fields.text("dtype", "bfloat16"), tp)
    return ModelShape((layers,), tp, printable(fields.text("name", "")))


def _own_groups(config: Mapping[str, Any], where: str) -> ModelShape:
    fields = Fields(config, where)
    tp = fields.number("tp", missing=1)
    dtype = fields.text("dtype", "bfloat16")
    dtype_name(dtype)
    groups = fields.get("groups")
    if not isinstance(groups, list) or not groups or not all(isinstance(g, dict) for g in groups):
        raise ConfigError(f"{where}: groups must be a list of objects, got {shown(groups)}")
    layers: dict[str, LayerSet] = {}
    for number, group in enumerate(groups):
        place = f"{where}: groups[{number}]"
        _require_known(group, _GROUP_FIELDS, place)
        inner = Fields(group, place)
        kind = inner.text("kind", "full")
        if kind not in get_args(Kind):
            raise ConfigError(
                f"{place}: kind {shown(kind)} is not known; known: {', '.join(get_args(Kind))}"
            )
        if kind in layers:
            raise ConfigError(f"{place}: there are {kind} layers already; give each kind once")
        layers[kind] = _layers(inner, kind, dtype, tp)
    return ModelShape(tuple(layers.values()), tp, printable(fields.text("name", "")))


def _layers(fields: Fields, kind: Any, dtype: str, tp: int) -> LayerSet:
    count = fields.number("layers")
    if kind == "state":
        size = fields.number("state_bytes")
        if size % tp:
            raise ConfigError(f"{fields.where}: state_bytes {size} do not go onto {tp} ranks (tp)")
        return LayerSet(kind, count, 0, size // tp, None, f"{count} layers x {size:,} bytes")
    tokens = fields.number("tokens") if kind in ("window", "chunked") else None
    heads, head_size = fields.number("kv_heads"), fields.number("head_size")
    return attention_layers(kind, count, heads, head_size, dtype=dtype, tp=tp, tokens=tokens)
