"""kvview: the contract between an LLM engine's KV cache and a connector.

An import of kvview needs neither torch nor vLLM. Each contract is one module or package: ``pool``,
``geometry``, ``events``, ``offloading``, ``transfer``, ``connector``, ``guard``, ``tier``.
"""

from kvview.connector import (
    BlockIds as BlockIds,
    Connector as Connector,
    ConnectorConfig as ConnectorConfig,
    EngineFacts as EngineFacts,
    ExtraKeys as ExtraKeys,
    FinishReason as FinishReason,
    FullBlock as FullBlock,
    RequestContent as RequestContent,
    RequestInfo as RequestInfo,
    RequestStep as RequestStep,
    SchedulerConnector as SchedulerConnector,
    StepInfo as StepInfo,
    StepPlan as StepPlan,
    SupportsSkippedBlocks as SupportsSkippedBlocks,
    TransferJob as TransferJob,
    WorkerConnector as WorkerConnector,
    full_blocks as full_blocks,
)
from kvview.errors import (
    BlockNotHeldError as BlockNotHeldError,
    ConfigError as ConfigError,
    ConnectorDefinitionError as ConnectorDefinitionError,
    ConnectorError as ConnectorError,
    EventOrderError as EventOrderError,
    GeometryError as GeometryError,
    HandoffError as HandoffError,
    HookError as HookError,
    KeyNotLoadableError as KeyNotLoadableError,
    KVViewError as KVViewError,
    MissingLibraryError as MissingLibraryError,
    NamespaceMismatchError as NamespaceMismatchError,
    NoFreeBlocksError as NoFreeBlocksError,
    NotAnOffloadKeyError as NotAnOffloadKeyError,
    NotCopyableError as NotCopyableError,
    PinBudgetExceeded as PinBudgetExceeded,
    TierJobError as TierJobError,
    TraceError as TraceError,
    TransferNotInFlightError as TransferNotInFlightError,
    TransferSpecError as TransferSpecError,
    UnknownBlockError as UnknownBlockError,
    UnsupportedContractError as UnsupportedContractError,
    UnsupportedEngineError as UnsupportedEngineError,
    ViewClosedError as ViewClosedError,
    ViewNotBoundError as ViewNotBoundError,
    WireFormatError as WireFormatError,
    WrongThreadError as WrongThreadError,
)
from kvview.events import (
    MEDIUM_CPU as MEDIUM_CPU,
    MEDIUM_GPU as MEDIUM_GPU,
    AllBlocksCleared as AllBlocksCleared,
    BlockRemoved as BlockRemoved,
    BlockStored as BlockStored,
    GPUEvent as GPUEvent,
    OffloadingEvent as OffloadingEvent,
    fold_events as fold_events,
)
from kvview.geometry import (
    CacheGeometry as CacheGeometry,
    CacheGroup as CacheGroup,
    ChunkedLocalAttention as ChunkedLocalAttention,
    FullAttention as FullAttention,
    Mamba as Mamba,
    SlidingWindow as SlidingWindow,
)
from kvview.guard import GuardedView as GuardedView, GuardStats as GuardStats, Leak as Leak
from kvview.keys import (
    BlockHash as BlockHash,
    OffloadKey as OffloadKey,
    get_offload_block_hash as get_offload_block_hash,
    get_offload_group_idx as get_offload_group_idx,
    make_offload_key as make_offload_key,
    require_offload_key as require_offload_key,
)
from kvview.offloading import (
    LookupResult as LookupResult,
    OffloadingManager as OffloadingManager,
    PrepareStoreOutput as PrepareStoreOutput,
    ReqContext as ReqContext,
)
from kvview.pool import (
    GPUBlockPoolView as GPUBlockPoolView,
    SupportsBlockKeys as SupportsBlockKeys,
    SupportsClose as SupportsClose,
    SupportsFindCachedBlock as SupportsFindCachedBlock,
    SupportsFreeCount as SupportsFreeCount,
    SupportsFreeOrder as SupportsFreeOrder,
    SupportsGiveBack as SupportsGiveBack,
    SupportsHolds as SupportsHolds,
    SupportsIsFree as SupportsIsFree,
    SupportsPinBudget as SupportsPinBudget,
    SupportsPoolSize as SupportsPoolSize,
)
from kvview.transfer import (
    CanonicalKVCacheRef as CanonicalKVCacheRef,
    CanonicalKVCaches as CanonicalKVCaches,
    CanonicalKVCacheTensor as CanonicalKVCacheTensor,
    ComputeEvent as ComputeEvent,
    ComputeStream as ComputeStream,
    CPULoadStoreSpec as CPULoadStoreSpec,
    GPULoadStoreSpec as GPULoadStoreSpec,
    LoadStoreSpec as LoadStoreSpec,
    TransferResult as TransferResult,
    TransferSpec as TransferSpec,
    TransferWorker as TransferWorker,
)
from kvview.version import CONTRACT_VERSION as CONTRACT_VERSION, __version__ as __version__
