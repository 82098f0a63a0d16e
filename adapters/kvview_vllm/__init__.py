"""kvview on vLLM: wrappers for every release, which can be imported without vLLM."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvview_vllm.pool import VLLMBlockPoolView as VLLMBlockPoolView, view as view

_MODULE_OF = {
    "VLLMBlockPoolView": "kvview_vllm.pool",
    "view": "kvview_vllm.pool",
}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_MODULE_OF]
