"""The checks of connectors for handoffs; an import of this package registers the checks."""

from kvview.testing.handoff.harness import PDFactory, pd_factory
from kvview.testing.handoff.player import HandoffPlayer

__all__ = ["HandoffPlayer", "PDFactory", "pd_factory"]
