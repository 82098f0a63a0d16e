"""Checks of connectors that hand KV from one engine to another; importing it registers them."""

from kvview.testing.handoff.harness import PDFactory, pd_factory
from kvview.testing.handoff.player import HandoffPlayer

__all__ = ["HandoffPlayer", "PDFactory", "pd_factory"]
