"""The limits that a client sets on the loads and stores of its request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_NO_LIMIT = 1 << 62
_MEDIA = (None, "CPU", "STORAGE")
_LOCALITIES = (None, "LOCAL", "REMOTE")


class RequestLimits(NamedTuple):
    """Limits of one request."""

    max_load_tokens: int = _NO_LIMIT
    """Maximum of tokens that are loaded."""
    max_offload_tokens: int = _NO_LIMIT
    """Leading tokens whose blocks may be stored."""
    uses_store: bool = True
    """Whether pages are also loaded from the store, not only from memory."""

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> RequestLimits:
        """Read the limits of a request; an invalid value sets no limit, as in vLLM.

        Args:
            params: The request's ``kv_transfer_params``, as the client sent them.

        Source: ``RequestOffloadState`` and ``_parse_tier_filter`` in
        ``vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py`` (0.33.0), and
        ``TieringOffloadingManager.lookup``, which reads host memory for every list of tiers.
        """
        if not params:
            return NO_LIMITS
        return cls(
            _tokens(params.get("max_load_tokens")),
            _tokens(params.get("max_offload_tokens")),
            _allow_storage(params.get("kv_load_tiers")),
        )


NO_LIMITS = RequestLimits()


def _tokens(value: object) -> int:
    return value if type(value) is int and value >= 0 else _NO_LIMIT


def _allow_storage(tiers: object) -> bool:
    """Whether a list of tiers includes storage; an entry without a medium means every medium."""
    if not isinstance(tiers, list):
        return True
    entries = [
        (_upper(tier.get("medium")), _upper(tier.get("locality")))
        for tier in tiers
        if isinstance(tier, dict)
    ]
    media = [medium for medium, place in entries if medium in _MEDIA and place in _LOCALITIES]
    return None in media or "STORAGE" in media or bool(tiers and not media)


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value
