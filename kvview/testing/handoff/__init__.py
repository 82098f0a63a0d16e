"""The suite of connectors for handoffs; an import of this package registers its checks."""

from kvview.testing.handoff.suite import HandoffConformance, pd_factory

__all__ = ["HandoffConformance", "pd_factory"]
