"""The fields of a ``config.json`` that determine a KV cache, by model type.

``model_facts.toml`` is the table. A type without a row is read as :data:`PLAIN`: every layer has
attention, within ``sliding_window`` tokens if this field is set. Any other field of its file that
may change a KV cache (:data:`CUES`) is refused, because its meaning is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from kvview_reference.sizing.layer_rules import TABLE, Rule


class State(BaseModel):
    """The state of a layer, and the fields with its sizes.

    Args:
        kind: The kind of shapes: Mamba 1, Mamba 2, gated delta net, or only a short convolution.
        sizes: Name of the field for each size of the shapes.
        dtype: Name of the field with the type of the recurrent part; by default that of the model.
    """

    kind: Literal["mamba1", "mamba2", "delta_net", "convolution"]
    sizes: Mapping[str, str]
    dtype: str | None = None


class Facts(BaseModel):
    """The meaning of the fields of one model type; ``model_facts.toml`` describes them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rules: tuple[Rule, ...] = (("listed", "layer_types"), ("every", "full"))
    defaults: Mapping[str, Any] = {}
    state: State | None = None
    is_latent: bool = False
    head_size: str = "head_dim"
    global_fields: Mapping[str, str] = {}
    extra_window: int = 0
    ignored: tuple[str, ...] = ()


CUES = re.compile("|".join(TABLE["cues"]))
"""Names of fields that may change what a KV cache stores."""

HARMLESS = re.compile("|".join(TABLE["harmless"]))
"""Names of fields that look like :data:`CUES` but never change the KV cache."""

PLAIN = Facts(rules=(("listed", "layer_types"), ("every", "window")))

FACTS: Mapping[str, Facts] = {
    name: Facts.model_validate({key: value for key, value in row.items() if key != "types"})
    for row in TABLE["model"]
    for name in row["types"]
}
