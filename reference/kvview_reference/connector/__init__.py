"""Complete connectors: lazy offloading to host memory, and several side by side."""

from kvview_reference.connector.lazy_offload import (
    LazyOffloadConnector,
    LazyOffloadOptions,
    LazyOffloadScheduler,
    LazyOffloadWorker,
)
from kvview_reference.connector.multi import (
    MultiConnector,
    MultiOptions,
    MultiScheduler,
    MultiWorker,
)

__all__ = [
    "LazyOffloadConnector",
    "LazyOffloadOptions",
    "LazyOffloadScheduler",
    "LazyOffloadWorker",
    "MultiConnector",
    "MultiOptions",
    "MultiScheduler",
    "MultiWorker",
]
