"""Handoffs of KV from an engine that prefills to an engine that decodes."""

from kvview.handoff.offers import Offers as Offers
from kvview.handoff.params import Handoff as Handoff, Peer as Peer, layout_of as layout_of
from kvview.handoff.roles import (
    Frame as Frame,
    HandoffScheduler as HandoffScheduler,
    HandoffWorker as HandoffWorker,
    Wire as Wire,
    require_no_wire as require_no_wire,
)
