"""A reference engine with the reference connector on a TCP port."""

from __future__ import annotations

import uuid

from kvview import CacheGeometry, ConnectorConfig
from kvview.handoff import Peer
from kvview_reference.engine.request import Request, chain_hashes
from kvview_reference.handoff.engine import PDEngine
from kvview_reference.handoff.pull import PullConnector
from kvview_reference.handoff.zmq_wire import ZmqWire

GEOMETRY = CacheGeometry.single(4)


def make_engine(name: str, lease_seconds: float, device: str = "cpu") -> tuple[PDEngine, ZmqWire]:
    wire = ZmqWire(patience=lease_seconds)
    connector = PullConnector(ConnectorConfig(GEOMETRY))
    engine = PDEngine(
        GEOMETRY, connector, num_gpu_blocks=64, page_bytes=256, num_layers=2, device=device
    )
    engine.bind_handoffs(Peer(name, uuid.uuid4().hex, wire.address), wire, lease_seconds)
    return engine, wire


def prompt(number: int, num_output_tokens: int = 0) -> Request:
    hashes = chain_hashes([f"{number}/{block}" for block in range(30)])
    return Request(f"r{number}", 121, num_output_tokens, 4, hashes)
