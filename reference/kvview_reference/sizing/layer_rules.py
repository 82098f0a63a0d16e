"""Which layer of a model stores what: the ways in which a ``config.json`` says so."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

from kvview.errors import ConfigError
from kvview_reference.sizing.fields import Fields, shown

Stored = Literal["full", "window", "chunked", "state", "full and state", "nothing"]
"""What a layer stores; "full and state" is attention and a state-space half side by side."""

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
class Rule(ABC):
    """One way to say it.

    Args:
        field: Read to decide; "" where nothing is read.
    """

    field: str

    @abstractmethod
    def stored(self, fields: Fields, num_layers: int) -> list[Stored] | None:
        """What each layer stores; None where the field is not set.

        Raises:
            ConfigError: The field is wrong, or says something that nothing here understands.
        """


@dataclass(frozen=True)
class Listed(Rule):
    """A list with a word for each layer."""

    field: str = "layer_types"

    @override
    def stored(self, fields: Fields, num_layers: int) -> list[Stored] | None:
        words = fields.sequence(self.field, str)
        if not words:
            return None
        return [_meaning(self.field, word, WORDS, fields) for word in words]


@dataclass(frozen=True)
class Lettered(Rule):
    """A text with a letter for each layer."""

    @override
    def stored(self, fields: Fields, num_layers: int) -> list[Stored] | None:
        letters = fields.text(self.field, "")
        return [_meaning(self.field, letter, LETTERS, fields) for letter in letters] or None


@dataclass(frozen=True)
class Every(Rule):
    """All layers alike."""

    field: str = ""
    alike: Stored = "full"

    @override
    def stored(self, fields: Fields, num_layers: int) -> list[Stored]:
        return [self.alike] * num_layers


@dataclass(frozen=True)
class _TwoKinds(Rule):
    there: Stored
    elsewhere: Stored

    def _where(self, is_there: list[bool]) -> list[Stored]:
        return [self.there if there else self.elsewhere for there in is_there]


@dataclass(frozen=True)
class Period(_TwoKinds):
    """One layer in so many differs: the one at ``offset``, or the last where that is empty."""

    offset: str = ""

    @override
    def stored(self, fields: Fields, num_layers: int) -> list[Stored] | None:
        length = fields.number(self.field)
        at = fields.number(self.offset, least=0) if self.offset else length - 1
        if at >= length:
            raise ConfigError(
                f"{fields.where}: {self.offset} must be below {self.field} ({length}), got {at}"
            )
        return self._where([layer % length == at for layer in range(num_layers)])


@dataclass(frozen=True)
class Numbered(_TwoKinds):
    """A list of numbers of layers, from 0."""

    @override
    def stored(self, fields: Fields, num_layers: int) -> list[Stored] | None:
        numbers = fields.sequence(self.field, int)
        if numbers is None:
            return None
        return self._where([layer in numbers for layer in range(num_layers)])


@dataclass(frozen=True)
class Flagged(_TwoKinds):
    """A list of 0 and 1, one for each layer."""

    @override
    def stored(self, fields: Fields, num_layers: int) -> list[Stored] | None:
        flags = fields.sequence(self.field, int)
        return self._where([bool(flag) for flag in flags]) if flags else None


@dataclass(frozen=True)
class From(_TwoKinds):
    """All layers from a number on."""

    @override
    def stored(self, fields: Fields, num_layers: int) -> list[Stored] | None:
        first = fields.number(self.field, least=0)
        return self._where([layer >= first for layer in range(num_layers)])


def _meaning(field: str, word: str, meanings: Mapping[str, Stored], fields: Fields) -> Stored:
    if word not in meanings:
        raise ConfigError(
            f"{fields.where}: {field} has {shown(word)}, which is not understood; known: "
            f"{', '.join(meanings)}"
        )
    return meanings[word]
