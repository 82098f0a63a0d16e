"""Handoffs of KV from one engine to another: prefill here, decode there."""

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
