"""Complete connectors: offloading to host memory, and a connector that runs several others."""

from kvview_reference.connector.multi import (
    MultiConnector,
    MultiOptions,
    MultiScheduler,
    MultiWorker,
)
from kvview_reference.connector.offload import (
    OffloadConnector,
    OffloadOptions,
    OffloadScheduler,
    OffloadWorker,
)

__all__ = [
    "MultiConnector",
    "MultiOptions",
    "MultiScheduler",
    "MultiWorker",
    "OffloadConnector",
    "OffloadOptions",
    "OffloadScheduler",
    "OffloadWorker",
]
