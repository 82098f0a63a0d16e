"""The connector contract: a connector has two halves, is one file, and works with any engine."""

from kvview.connector.halves import Connector as Connector, ConnectorConfig as ConnectorConfig
from kvview.connector.plan import StepPlan as StepPlan, TransferJob as TransferJob
from kvview.connector.request import (
    BlockIds as BlockIds,
    ExtraKeys as ExtraKeys,
    FullBlock as FullBlock,
    RequestContent as RequestContent,
    RequestInfo as RequestInfo,
    RequestStep as RequestStep,
    StepInfo as StepInfo,
    full_blocks as full_blocks,
)
from kvview.connector.scheduler_half import (
    EngineFacts as EngineFacts,
    FinishReason as FinishReason,
    SchedulerConnector as SchedulerConnector,
    SupportsSkippedBlocks as SupportsSkippedBlocks,
)
from kvview.connector.worker_half import WorkerConnector as WorkerConnector
