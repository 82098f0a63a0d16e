"""A tier that is addressed by key: a manager, and a worker that knows the place of each key."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvview import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    TransferSpec,
    TransferSpecError,
)
from kvview_reference.offloading import CPUOffloadingManager
from kvview_reference.transfer import CPUGPUTransferWorker

DISK = "DISK"
Keys = Collection[OffloadKey]


@dataclass(frozen=True)
class KeySpec:
    """Keys of a tier that has no pages."""

    medium: ClassVar[str] = DISK

    keys: Sequence[bytes]


class KeyedManager(CPUOffloadingManager):
    """Names keys, in a medium of its own."""

    def prepare_load(self, keys: Keys, ctx: ReqContext | None = None, /) -> Any:
        keys = list(keys)
        super().prepare_load(keys, ctx)
        return KeySpec(keys)

    def prepare_store(
        self, keys: Keys, ctx: ReqContext | None = None, /
    ) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys, ctx)
        return output and replace(output, store_spec=KeySpec(output.keys_to_store))

    def take_events(self) -> list[OffloadingEvent]:
        return [replace(event, medium=DISK) for event in super().take_events()]


class KeyedWorker(CPUGPUTransferWorker):
    """Keeps the bytes of each key in a page that only it knows."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._page_of: dict[bytes, int] = {}

    def transfer_async(self, job_id: int, spec: TransferSpec, /) -> bool:
        src, dst = spec
        if isinstance(src, GPULoadStoreSpec):
            return super().transfer_async(job_id, (src, self._pages(dst)))
        return super().transfer_async(job_id, (self._pages(src), dst))

    def _pages(self, tier: LoadStoreSpec) -> LoadStoreSpec:
        if not hasattr(tier, "keys"):  # its class may differ, because a file may be loaded twice
            raise TransferSpecError(f"XFER-1: one side is GPU blocks, the other keys: {tier}")
        pages = [self._page_of.setdefault(key, len(self._page_of)) for key in tier.keys]
        return CPULoadStoreSpec(pages)
