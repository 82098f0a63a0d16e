"""The suite of connectors for handoffs; an import of this package registers its checks."""

from kvview.testing.handoff.suite import (
    HandoffConformance as HandoffConformance,
    pd_factory as pd_factory,
)
