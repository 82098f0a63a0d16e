"""``kvview replay``: a request trace through the reference engine, with a connector."""

from kvview_reference.replay.run import ReplayConfig, ReplayReport, replay

__all__ = ["ReplayConfig", "ReplayReport", "replay"]
