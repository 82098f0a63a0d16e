"""The ways in which a ``config.json`` lists the kinds of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from kvview.errors import ConfigError
from kvview_reference.sizing.fields import Fields, shown

Stored = Literal["full", "window", "chunked", "state", "full and state", "nothing"]
"""The kind of a layer; "full and state" is attention next to a state-space half."""

WORDS: Mapping[str, Stored] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunked",
    "linear_attention": "state",
    "mamba": "state",
    "conv": "state",
    "hybrid": "full and state",
    "mlp": "nothing",
    "moe": "nothing",
}
"""The words of ``layer_types`` and of its older names."""

LETTERS: Mapping[str, Stored] = {"M": "state", "*": "full", "-": "nothing", "E": "nothing"}
"""The letters of ``hybrid_override_pattern``."""


@dataclass(frozen=True)
class Rule:
    """One way to list the kinds.

    Args:
        field: The field that decides; "" if no field is read.
        stored: Lists the kind of each layer, from the fields and the number of layers; returns
            None if the field is not set, and raises ConfigError if it is wrong or unknown.
    """

    field: str
    stored: Callable[[Fields, int], list[Stored] | None]


def listed(field: str = "layer_types") -> Rule:
    """A list with a word for each layer."""
    return Rule(
        field,
        lambda fields, _: _meanings(field, fields.sequence(field, str) or (), WORDS, fields),
    )


def lettered(field: str) -> Rule:
    """A text with a letter for each layer."""
    return Rule(field, lambda fields, _: _meanings(field, fields.text(field, ""), LETTERS, fields))


def every(kind: Stored = "full") -> Rule:
    """The same kind for all layers."""
    return Rule("", lambda _, num_layers: [kind] * num_layers)


def period(field: str, kind: Stored, other: Stored, *, offset: str = "") -> Rule:
    """One layer of each period has its own kind: the layer at ``offset``, or else the last."""

    def stored(fields: Fields, num_layers: int) -> list[Stored]:
        length = fields.number(field)
        at = fields.number(offset, least=0) if offset else length - 1
        if at >= length:
            raise ConfigError(
                f"{fields.where}: {offset} must be below {field} ({length}), got {at}"
            )
        return [kind if layer % length == at else other for layer in range(num_layers)]

    return Rule(field, stored)


def numbered(field: str, kind: Stored, other: Stored) -> Rule:
    """A list with the numbers of some layers, from 0."""

    def stored(fields: Fields, num_layers: int) -> list[Stored] | None:
        numbers = fields.sequence(field, int)
        if numbers is None:
            return None
        return [kind if layer in numbers else other for layer in range(num_layers)]

    return Rule(field, stored)


def flagged(field: str, kind: Stored, other: Stored) -> Rule:
    """A list of 0 and 1, one for each layer."""

    def stored(fields: Fields, _: int) -> list[Stored] | None:
        return [kind if flag else other for flag in fields.sequence(field, int) or ()] or None

    return Rule(field, stored)


def starting_at(field: str, kind: Stored, other: Stored) -> Rule:
    """All layers from a number on."""

    def stored(fields: Fields, num_layers: int) -> list[Stored]:
        first = fields.number(field, least=0)
        return [kind if layer >= first else other for layer in range(num_layers)]

    return Rule(field, stored)


def _meanings(
    field: str, words: Iterable[str], meanings: Mapping[str, Stored], fields: Fields
) -> list[Stored] | None:
    kinds = []
    for word in words:
        if word not in meanings:
            raise ConfigError(
                f"{fields.where}: {field} has {shown(word)}, which is not understood; known: "
                f"{', '.join(meanings)}"
            )
        kinds.append(meanings[word])
    return kinds or None
