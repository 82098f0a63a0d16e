"""A small engine: continuous batching in steps, with a connector."""

from kvview_reference.engine.engine import Engine as Engine
from kvview_reference.engine.request import (
    Request as Request,
    Status as Status,
    chain_hashes as chain_hashes,
)
from kvview_reference.engine.stats import EngineStats as EngineStats
