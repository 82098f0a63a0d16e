"""A small engine: continuous batching in steps, with a connector beside it."""

from kvview_reference.engine.engine import Engine, EngineStats
from kvview_reference.engine.request import Request, Status, chain_hashes

__all__ = ["Engine", "EngineStats", "Request", "Status", "chain_hashes"]
