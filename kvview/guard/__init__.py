"""The guard: the view that a connector gets by default, which checks every call."""

from kvview.guard.leak import Leak as Leak
from kvview.guard.ledger import GuardStats as GuardStats
from kvview.guard.view import GuardedView as GuardedView
