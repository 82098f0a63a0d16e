"""Whose bytes a tier keeps: KV computed by other weights is other KV (TIER-10)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Self

from kvview.errors import ConfigError, NamespaceMismatchError, line_of


@dataclass(frozen=True)
class Namespace:
    """All that KV bytes depend on besides their key; the salt belongs to the key.

    1. Two namespaces that differ anywhere share nothing.
    2. ``weights`` is never guessed: where an engine does not tell, the user does.

    Args:
        model: Name or path of the model.
        weights: Digest or revision of the weights; any text that changes when they do.
        kv_dtype: Type of the KV cache, ``"bfloat16"`` for example.
        layout: What else the bytes of a page depend on: layers, heads, order.
        block_size: Tokens of a page.
        tensor_parallel: Ranks that the heads are split over.
        pipeline_parallel: Ranks that the layers are split over.
        rank: Of these pages, where ranks have pages of their own.
        hash_algorithm: What the keys were hashed with.
        hash_seed: What the chain of hashes begins with; empty where it is always the same.

    Raises:
        ConfigError: There is nothing in ``weights`` or ``model``.
    """

    model: str
    weights: str
    kv_dtype: str = ""
    layout: str = ""
    block_size: int = 0
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    rank: int = 0
    hash_algorithm: str = ""
    hash_seed: str = ""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("a tier needs the name of the model")
        if not self.weights:
            raise ConfigError(
                f"the weights of {self.model!r} are not known, and other weights under the same "
                "name would answer wrong tokens: set 'weights' to their revision or digest, or "
                "to any text that you change when they change"
            )

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that no other namespace has."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).digest()

    def to_json(self) -> str:
        """One line, the same for equal namespaces; :meth:`from_json` reads it."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote.

        Raises:
            ConfigError: It is something else.
        """
        try:
            found: Mapping[str, Any] = json.loads(text)
            values = {field.name: found[field.name] for field in fields(cls)}
            for field in fields(cls):
                kind = int if isinstance(field.default, int) else str
                if type(values[field.name]) is not kind:
                    raise TypeError(f"{field.name} is not of type {kind.__name__}")
            return cls(**values)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(
                f"this is not the namespace of a tier: {text[:200]!r}: {line_of(error)}"
            ) from error

    def require_same(self, other: Namespace, where: str) -> None:
        """Refuse bytes of another namespace.

        Args:
            other: What is written at ``where``.
            where: Of the bytes, for the error.

        Raises:
            NamespaceMismatchError: They differ; names both sides of each difference.
        """
        different = [
            f"{field.name} {getattr(other, field.name)!r} there, {getattr(self, field.name)!r} here"
            for field in fields(self)
            if getattr(other, field.name) != getattr(self, field.name)
        ]
        if different:
            raise NamespaceMismatchError(
                f"TIER-10: {where} was written for another namespace: {'; '.join(different)}. "
                "Give this one a place of its own, or delete the old one"
            )
