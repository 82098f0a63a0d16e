"""The namespace of a tier's bytes: the model, weights and layout on which they depend (TIER-10)."""

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
    """All properties on which KV bytes depend, except those that the key includes (such as a salt).

    1. Two namespaces that differ in any field share no pages.
    2. ``weights`` is never guessed; if the engine does not provide it, the user must do so.

    Args:
        model: Name or path of the model.
        weights: Digest or revision of the weights; any text that changes when they do.
        kv_dtype: Type of the KV cache, ``"bfloat16"`` for example.
        layout: Layers, heads and byte order of a page.
        block_size: Number of tokens in a page.
        tensor_parallel: Number of ranks over which the heads are split.
        pipeline_parallel: Number of ranks over which the layers are split.
        rank: Rank of these pages, if each rank has its own pages.
        hash_algorithm: Algorithm of the block hashes in the keys.
        hash_seed: Start of the chain of block hashes; empty if the start is always the same.
        run: Run that alone uses the pages; empty if later runs share them. A store removes the
            pages of a run when it is closed, and the pages of runs that were killed.

    Raises:
        ConfigError: ``weights`` or ``model`` is empty.
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
    run: str = ""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("a tier needs the name of the model")
        if not self.weights:
            raise ConfigError(
                f"the weights of {self.model!r} are unknown, and other weights of the same name "
                f"would give wrong tokens; set 'weights' to their revision or digest, or to any "
                f"text that you change when they change"
            )

    @cached_property
    def digest(self) -> bytes:
        """Return a digest of 16 bytes that identifies the namespace."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).digest()

    def to_json(self) -> str:
        """Format the namespace as one line; equal namespaces give equal lines."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the text that :meth:`to_json` wrote.

        Raises:
            ConfigError: The text is not a namespace.
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
                f"{text[:200]} is not the namespace of a tier: {line_of(error)}"
            ) from error

    def require_same(self, other: Namespace, where: str) -> None:
        """Refuse bytes that belong to another namespace.

        Args:
            other: Namespace of the bytes at ``where``.
            where: Place of the bytes, for the error.

        Raises:
            NamespaceMismatchError: The namespaces differ; the error lists both values of each field
                that differs.
        """
        different = [
            f"{field.name} {getattr(other, field.name)!r} there, {getattr(self, field.name)!r} here"
            for field in fields(self)
            if getattr(other, field.name) != getattr(self, field.name)
        ]
        if different:
            raise NamespaceMismatchError(
                f"TIER-10: {where} was written for another namespace: {'; '.join(different)}. Use "
                "another location for this namespace, or delete the old data"
            )
