"""The connector contract: a connector has two halves, is one file, and works with any engine."""

from kvview.connector.halves import (
    Connector,
    ConnectorConfig,
    EngineFacts,
    FinishReason,
    SchedulerConnector,
    SupportsSkippedBlocks,
    WorkerConnector,
)
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
