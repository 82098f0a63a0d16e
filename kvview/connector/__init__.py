"""The connector contract: a connector has two halves, is one file, and works with any engine."""

from kvview.connector.halves import Connector, ConnectorConfig
from kvview.connector.plan import StepPlan, TransferJob
from kvview.connector.request import (
    BlockIds,
    ExtraKeys,
    FullBlock,
    RequestContent,
    RequestInfo,
    RequestStep,
    StepInfo,
    full_blocks,
)
from kvview.connector.scheduler_half import (
    EngineFacts,
    FinishReason,
    SchedulerConnector,
    SupportsSkippedBlocks,
)
from kvview.connector.worker_half import WorkerConnector

__all__ = [
    "BlockIds",
    "Connector",
    "ConnectorConfig",
    "EngineFacts",
    "ExtraKeys",
    "FinishReason",
    "FullBlock",
    "RequestContent",
    "RequestInfo",
    "RequestStep",
    "SchedulerConnector",
    "StepInfo",
    "StepPlan",
    "SupportsSkippedBlocks",
    "TransferJob",
    "WorkerConnector",
    "full_blocks",
]
