"""The guard, which is the view that a connector gets by default instead of an unguarded one."""

from kvview.guard.lease import GuardedLease, Leak
from kvview.guard.ledger import GuardStats
from kvview.guard.view import GuardedView

__all__ = ["GuardStats", "GuardedLease", "GuardedView", "Leak"]
