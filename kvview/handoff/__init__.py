"""Handoffs of KV from an engine that prefills to an engine that decodes."""

from kvview.handoff.offers import Offers
from kvview.handoff.params import Handoff, Peer, layout_of
from kvview.handoff.roles import Frame, HandoffScheduler, HandoffWorker, Wire

__all__ = [
    "Frame",
    "Handoff",
    "HandoffScheduler",
    "HandoffWorker",
    "Offers",
    "Peer",
    "Wire",
    "layout_of",
]
