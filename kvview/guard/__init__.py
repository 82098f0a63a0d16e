"""The guard: the view that a connector gets by default, which checks every call."""

from kvview.guard.leak import Leak
from kvview.guard.ledger import GuardStats
from kvview.guard.view import GuardedView

__all__ = ["GuardStats", "GuardedView", "Leak"]
