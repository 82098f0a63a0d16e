"""The bytes that each layer of a model stores, per token or once per prefix.

1. A layer of full attention (``"full"``) stores a key and a value for every token.
2. A layer with a sliding window (``"window"``) or with chunked local attention (``"chunked"``)
   stores as many bytes per token as full attention, but only needs the tokens that it can still
   read.
3. A Mamba or linear-attention layer (``"state"``) stores one state, however long the prefix is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from kvview.errors import ConfigError
from kvview_reference.sizing.fields import require_number, shown

Kind = Literal["full", "window", "chunked", "state"]

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"(?P<number>\d+(\.\d*)?)\s*(?P<unit>[KMGT]iB|%|)")
_BYTES_OF_16: Mapping[str, int] = {  # in elements, because a byte is too coarse a unit for nvfp4
    "float32": 64,
    "float": 64,
    "bfloat16": 32,
    "float16": 32,
    "half": 32,
    "fp8": 16,
    "nvfp4": 9,  # half a byte per element, and a scale of one byte for 16 elements
}
_NAMES = {
    "full": "Full attention",
    "window": "Sliding window of {tokens:,} tokens",
    "chunked": "Chunks of {tokens:,} tokens",
    "state": "State",
}


def dtype_name(dtype: object) -> str:
    """Return the known name of a type, for example ``"fp8"`` for ``"fp8_e5m2"``.

    Raises:
        ConfigError: The type is unknown.
    """
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, str) else ""
    if name.startswith(("fp8_e", "float8")):
        name = "fp8"
    if name not in _BYTES_OF_16:
        known = ", ".join(_BYTES_OF_16)
        raise ConfigError(f"model: unknown dtype {shown(dtype)}; known: {known}")
    return name


def bytes_of(elements: int, dtype: str) -> int:
    """Compute the bytes of a number of elements.

    Raises:
        ConfigError: The elements do not fill whole bytes.
    """
    size, rest = divmod(elements * _BYTES_OF_16[dtype], 16)
    if rest:
        raise ConfigError(f"model: {elements} elements of {dtype} do not fill whole blocks of 16")
    return size


@dataclass(frozen=True)
class LayerSet:
    """Layers of a model with the same KV.

    Args:
        kind: Kind of the layers, which determines the tokens that the layers keep.
        count: Number of layers.
        token_bytes: Bytes of one token in one layer, on one rank; 0 for a state.
        state_bytes: Bytes of the state of one layer, on one rank; 0 for attention.
        tokens: Tokens of the window or chunk; None for other kinds.
        formula: Formula of the bytes of all layers on all ranks.
        is_latent: Whether key and value share one vector (MLA).
    """

    kind: Kind
    count: int
    token_bytes: int
    state_bytes: int
    tokens: int | None
    formula: str
    is_latent: bool = False

    @property
    def name(self) -> str:
        """Name of the kind of layers, in words."""
        return _NAMES[self.kind].format(tokens=self.tokens)


@dataclass(frozen=True)
class ModelShape:
    """The KV cache of a model.

    Args:
        layers: Sets of layers, of different kinds.
        tp: Number of ranks that share a layer, each of which stores a part.
        name: Name of the model.
    """

    layers: tuple[LayerSet, ...]
    tp: int = 1
    name: str = ""

    @property
    def token_bytes(self) -> int:
        """Bytes that every token adds in full attention, summed over all ranks."""
        return self.bytes_of_kinds("full")

    @property
    def read_token_bytes(self) -> int:
        """Bytes of a token that all attention layers can still read, summed over all ranks."""
        return self.bytes_of_kinds("full", "window", "chunked")

    @property
    def state_bytes(self) -> int:
        """Bytes of all states, summed over all ranks."""
        return self.tp * sum(layers.count * layers.state_bytes for layers in self.layers)

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers do not keep every token."""
        return any(layers.kind != "full" for layers in self.layers)

    def bytes_of_kinds(self, *kinds: Kind) -> int:
        """Compute the bytes of a token in the layers of these kinds, summed over all ranks."""
        chosen = (layers for layers in self.layers if layers.kind in kinds)
        return self.tp * sum(layers.count * layers.token_bytes for layers in chosen)


def attention_layers(
    kind: Kind,
    count: int,
    kv_heads: int,
    head_size: int,
    *,
    dtype: str = "bfloat16",
    tp: int = 1,
    tokens: int | None = None,
    is_latent: bool = False,
) -> LayerSet:
    """Make layers of attention.

    Args:
        kind: Kind of the layers.
        count: Number of layers.
        kv_heads: Key-value heads; 1 for multi-head latent attention.
        head_size: Number of elements of a head, or of the latent vector together with its rotary
            part.
        dtype: Type of the KV cache.
        tp: Ranks. Number of ranks; with more ranks than heads, several ranks hold copies of a head,
            and each rank holds a copy of a latent vector.
        tokens: Tokens of the window or chunk.
        is_latent: Whether key and value share one vector (MLA).

    Raises:
        ConfigError: A number is invalid, or the heads cannot be split evenly over the ranks.
    """
    numbers = {"layers": count, "kv_heads": kv_heads, "head_size": head_size, "tp": tp}
    for name, value in numbers.items():
        require_number(name, value, "model")
    if max(kv_heads, tp) % min(kv_heads, tp):
        raise ConfigError(f"model: {kv_heads} KV heads cannot be split evenly over {tp} ranks (tp)")
    size = bytes_of(head_size, dtype_name(dtype))
    parts = 1 if is_latent else 2
    token_bytes = parts * max(1, kv_heads // tp) * size
    vectors = "1 (latent)" if is_latent else "2 (K and V)"
    heads = f"{max(kv_heads, tp)} KV heads"
    if tp > kv_heads:
        heads += f" ({kv_heads} on {tp} ranks: copies)"
    formula = (
        f"{vectors} x {count} layers x {heads} x {head_size} elements of {dtype} ({size} bytes)"
    )
    return LayerSet(kind, count, token_bytes, 0, tokens, formula, is_latent)


def state_layers(
    kind: str,
    sizes: Mapping[str, int],
    *,
    count: int,
    conv_dtype: str,
    state_dtype: str,
    tp: int,
    missing: Callable[[str], ConfigError],
) -> LayerSet:
    """Make layers whose state is the end of a convolution and a recurrent part.

    Args:
        kind: ``"mamba1"``, ``"mamba2"``, ``"delta_net"`` or ``"convolution"``.
        sizes: Sizes from which the shapes of that kind are computed.
        count: Number of layers.
        conv_dtype: Type of the convolution's part.
        state_dtype: Type of the recurrent part.
        tp: Number of ranks that share a state.
        missing: Makes the error for a missing size.

    Raises:
        ConfigError: A size is missing, or cannot be split evenly over the ranks.

    Source: vLLM 0.32.0, ``model_executor/layers/mamba/mamba_utils.py``.
    """

    def size(name: str) -> int:
        if name not in sizes:
            raise missing(name)
        return sizes[name]

    def on_rank(name: str, value: int) -> int:
        if value % tp:
            raise ConfigError(
                f"model: {name} of {value} cannot be split evenly over {tp} ranks (tp)"
            )
        return value // tp

    if kind == "delta_net":
        keys, values = size("key_heads") * size("key_size"), size("value_heads")
        channels = 2 * keys + values * size("value_size")
        recurrent = on_rank("value heads", values) * size("value_size") * size("key_size")
    else:
        inner = sizes.get("inner")
        if inner is None and kind == "convolution":
            inner = size("hidden")
        elif inner is None and "expand" in sizes:
            inner = sizes["expand"] * size("hidden")
        elif inner is None:
            inner = size("heads") * size("size")
        channels, recurrent = inner, 0
        if kind == "mamba1":
            recurrent = on_rank("channels", inner) * size("states")
        elif kind == "mamba2":
            # Each rank needs its own group.
            groups = size("groups") if size("groups") % tp == 0 else tp
            channels += 2 * groups * size("states")
            head = sizes.get("size") or inner // size("heads")
            recurrent = on_rank("heads", size("heads")) * head * size("states")
    convolution = on_rank("channels", channels) * (size("kernel") - 1)
    state_bytes = bytes_of(convolution, conv_dtype) + bytes_of(recurrent, state_dtype)
    formula = (
        f"{count} layers x ({tp * convolution:,} elements of {conv_dtype} + {tp * recurrent:,} of "
        f"{state_dtype})"
    )
    return LayerSet("state", count, 0, state_bytes, None, formula)


def parse_size(
    text: str, option: str, block_bytes: Callable[[], int] | None, num_blocks: int
) -> int:
    """Parse a size of a tier, in blocks.

    Args:
        text: ``"5000"`` blocks, ``"64GiB"``, or ``"50%"`` of the trace's distinct blocks.
        option: Name of the option, for the error message.
        block_bytes: Computes the bytes of a block, for a size in bytes; None without a model.
        num_blocks: Number of distinct blocks of the trace.

    Raises:
        ConfigError: The text has another form, or states a size in bytes without a model.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (not match["unit"] and not match["number"].isdigit()):
        raise ConfigError(
            f"{option} {text!r}: expected a size in blocks, GiB or %, such as 5000, 64GiB or 50%"
        )
    number = float(match["number"])
    if match["unit"] == "%":
        return round(num_blocks * number / 100)
    if not match["unit"]:
        return int(text)
    if block_bytes is None:
        raise ConfigError(f"{option} {text!r}: a size in bytes needs a model; pass --model")
    return int(number * _UNITS[match["unit"]] / block_bytes())
