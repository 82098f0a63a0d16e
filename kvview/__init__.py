"""kvview: the contract between an LLM engine's KV cache and a connector.

Importing it needs neither torch nor vLLM. Each contract is one file: ``pool``,
``geometry``, ``events``, ``offloading``, ``transfer``, ``connector``.
"""

from kvview.connector import (
    Connector,
    ConnectorConfig,
    EngineFacts,
    FinishReason,
    RequestInfo,
    RequestStep,
    SchedulerConnector,
    StepInfo,
    StepPlan,
    TransferJob,
    WorkerConnector,
)
from kvview.errors import (
    BlockInUseError,
    BlockNotHeldError,
    ConfigError,
    EventOrderError,
    GeometryError,
    KeyNotLoadableError,
    KVViewError,
    NoFreeBlocksError,
    TraceError,
    TransferSpecError,
    UnknownBlockError,
    ViewClosedError,
)
from kvview.events import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockSizeIndex,
    BlockStored,
    GPUEvent,
    OffloadingEvent,
    fold_events,
)
from kvview.geometry import (
    CacheGeometry,
    CacheGroup,
    ChunkedLocalAttention,
    FullAttention,
    Mamba,
    SlidingWindow,
)
from kvview.keys import (
    OffloadKey,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from kvview.offloading import (
    LookupResult,
    OffloadingManager,
    PrepareStoreOutput,
    ReqContext,
    SupportsRequestHooks,
    SupportsStepHooks,
)
from kvview.pool import (
    GPUBlockPoolView,
    SupportsBlockHashes,
    SupportsClose,
    SupportsFindCachedBlock,
    SupportsFreeCount,
    SupportsFreeOrder,
    SupportsHolds,
    SupportsIsFree,
    SupportsPoolSize,
)
from kvview.transfer import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    TransferResult,
    TransferSpec,
    TransferWorker,
)

__version__ = "0.1.0"
