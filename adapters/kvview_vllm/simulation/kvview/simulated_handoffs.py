"""The handoffs of a simulated engine with a connector of kvview."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kvview.handoff import Peer, Wire
from kvview_vllm.connector.handoffs import HandoffOptions

if TYPE_CHECKING:
    from kvview.testing.handoff.harness import EngineLife


class SimulatedHandoffs(HandoffOptions):
    """The setting ``handoffs``, with objects of the simulation.

    Args:
        life: The ``EngineLife`` of the engine.
    """

    life: Any

    @override
    def peer(self, engine_id: str, life: str, split: str) -> Peer:
        me: Peer = replace(self.life.me, split=split)
        return me

    @override
    def make_wire(self, rank: int) -> Wire:
        wire: Wire = self.life.wires[rank]
        return wire

    @classmethod
    def of(cls, life: EngineLife) -> SimulatedHandoffs:
        """Make the setting of an engine."""
        me = life.me
        return cls(wire="", address=me.address, lease_seconds=life.lease_seconds, life=life)
