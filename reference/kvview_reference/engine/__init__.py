"""A small engine: continuous batching in steps, with a connector."""

from kvview_reference.engine.engine import Engine
from kvview_reference.engine.request import Request, Status, chain_hashes
from kvview_reference.engine.stats import EngineStats

__all__ = ["Engine", "EngineStats", "Request", "Status", "chain_hashes"]
