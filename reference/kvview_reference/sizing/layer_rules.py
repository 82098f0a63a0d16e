"""The ways in which a ``config.json`` lists the kinds of its layers."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from kvview.errors import ConfigError
from kvview_reference.sizing.fields import Fields, shown

Stored = Literal["full", "window", "chunked", "state", "full and state", "nothing"]
"""The kind of a layer; "full and state" is attention next to a state-space half."""

Rule = tuple[str, ...]
"""One way to list the kinds: its name, the field that it reads, and further words."""

TABLE: Mapping[str, Any] = tomllib.loads(
    Path(__file__).with_name("model_facts.toml").read_text(encoding="utf-8")
)
"""The words and letters of lists, and the facts of :mod:`.model_facts`."""


def list_kinds(rule: Rule, fields: Fields, num_layers: int) -> list[Stored] | None:
    """List the kind of each layer; None if the field of the rule is not set.

    Raises:
        ConfigError: The field is wrong or unknown.
    """
    name, *words = rule
    return _WAYS[name](fields, num_layers, *words)


def _listed(fields: Fields, _: int, field: str) -> list[Stored] | None:
    """Read the kinds of layers from a list with a word for each layer."""
    return _meanings(field, fields.sequence(field, str) or (), TABLE["words"], fields)


def _lettered(fields: Fields, _: int, field: str) -> list[Stored] | None:
    """Read the kinds of layers from a text with a letter for each layer."""
    return _meanings(field, fields.text(field, ""), TABLE["letters"], fields)


def _every(_: Fields, num_layers: int, kind: Stored) -> list[Stored]:
    """Return the same kind for all layers."""
    return [kind] * num_layers


def _period(
    fields: Fields, num_layers: int, field: str, kind: Stored, other: Stored, offset: str = ""
) -> list[Stored]:
    """Return the kinds if one layer per period differs, at ``offset`` or by default the last."""
    length = fields.number(field)
    at = fields.number(offset, least=0) if offset else length - 1
    if at >= length:
        raise ConfigError(f"{fields.where}: {offset} must be below {field} ({length}), got {at}")
    return [kind if layer % length == at else other for layer in range(num_layers)]


def _numbered(
    fields: Fields, num_layers: int, field: str, kind: Stored, other: Stored
) -> list[Stored] | None:
    """Return ``kind`` for each layer whose number is in a list, and ``other`` for the others."""
    numbers = fields.sequence(field, int)
    if numbers is None:
        return None
    return [kind if layer in numbers else other for layer in range(num_layers)]


def _flagged(
    fields: Fields, _: int, field: str, kind: Stored, other: Stored
) -> list[Stored] | None:
    """Read the kinds from a list with a 0 or a 1 for each layer."""
    return [kind if flag else other for flag in fields.sequence(field, int) or ()] or None


def _starting_at(
    fields: Fields, num_layers: int, field: str, kind: Stored, other: Stored
) -> list[Stored]:
    """Return another kind for all layers from a given number on."""
    first = fields.number(field, least=0)
    return [kind if layer >= first else other for layer in range(num_layers)]


_WAYS: Mapping[str, Callable[..., list[Stored] | None]] = {
    "listed": _listed,
    "lettered": _lettered,
    "every": _every,
    "period": _period,
    "numbered": _numbered,
    "flagged": _flagged,
    "starting_at": _starting_at,
}


def _meanings(
    field: str, words: Iterable[str], meanings: Mapping[str, Stored], fields: Fields
) -> list[Stored] | None:
    kinds = []
    for word in words:
        if word not in meanings:
            raise ConfigError(
                f"{fields.where}: {field} has the unknown value {shown(word)}; known: "
                f"{', '.join(meanings)}"
            )
        kinds.append(meanings[word])
    return kinds or None
