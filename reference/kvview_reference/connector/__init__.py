"""A connector that runs several others side by side."""

from kvview_reference.connector.multi import (
    MultiConnector,
    MultiOptions,
    MultiScheduler,
    MultiWorker,
)

__all__ = ["MultiConnector", "MultiOptions", "MultiScheduler", "MultiWorker"]
